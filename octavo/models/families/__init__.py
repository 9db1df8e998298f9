"""Families of models: how each one's config.json is read, one file a family.

A file names its architectures in `ARCHITECTURES`: name in config.json -> function that reads it.
"""
