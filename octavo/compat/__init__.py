"""Octavo under the names of others."""
