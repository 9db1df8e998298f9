"""Executors carry the scheduler's steps to the workers."""
