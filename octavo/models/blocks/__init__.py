"""Blocks of a model: a torch-free spec for each kind of block, which builds the live block."""
