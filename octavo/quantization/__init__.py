"""Formats of linear weights with fewer bits, and the conversion of ordinary checkpoints to them."""
