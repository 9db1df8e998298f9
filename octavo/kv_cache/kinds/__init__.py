"""Kinds of caches, which determine the needed and the shareable blocks of a request."""
