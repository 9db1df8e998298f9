"""Compatibility with the names of other systems."""
