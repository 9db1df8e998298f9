"""Sounds and pictures of requests: read by helper processes under limits."""
