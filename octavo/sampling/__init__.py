"""Sampler: converts logits to tokens, row by row and independently of the batch."""
