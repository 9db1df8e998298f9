"""Executors, which run the scheduler's steps on the workers."""
