"""Blocks of a model: a spec for each kind of block, which builds the live block."""
