"""Layers of a decoder, as plain objects that use the operations of `octavo.kernels`."""
