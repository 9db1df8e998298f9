"""`octavo router`: one address for several servers."""
