"""A package that adds to Octavo: see pyproject.toml for how it is found."""
