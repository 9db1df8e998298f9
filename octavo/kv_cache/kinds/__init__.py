"""Kinds of cache: which blocks a request needs of each, and which of them others may share."""
