"""Tensor operations of the layers: one interface with native, Triton and torch implementations."""
