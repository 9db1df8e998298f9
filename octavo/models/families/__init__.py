"""Families of models: one file with the reader of config.json for each family.

A file lists its architectures in `ARCHITECTURES`: name in config.json -> function that reads it.
"""
