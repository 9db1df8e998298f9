"""Processors of pictures, one file for each kind: pixels to the inputs of a vision encoder."""
