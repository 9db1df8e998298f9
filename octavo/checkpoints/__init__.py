"""Checkpoints: where a model's configuration and weights come from, one file for each kind."""
