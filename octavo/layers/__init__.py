"""Layers of a decoder, each a plain object around the operations of `octavo.kernels`."""
