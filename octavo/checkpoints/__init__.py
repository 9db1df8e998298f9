"""Checkpoints: sources of a model's configuration and weights, one file for each kind."""
