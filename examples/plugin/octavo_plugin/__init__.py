"""Package that extends Octavo: pyproject.toml shows how Octavo finds it."""
