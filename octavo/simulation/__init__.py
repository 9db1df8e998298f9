"""Simulation of an engine's schedule without its model, and replay of recordings."""
