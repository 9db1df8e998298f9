"""Scheduler: chooses the work of each step and processes its results."""
