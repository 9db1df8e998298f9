"""Sounds, pictures and videos of requests, which helper processes read under limits."""
