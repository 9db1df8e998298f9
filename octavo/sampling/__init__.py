"""Sampler: turns logits into tokens, row by row and independently of the batch."""
