"""The sampler: from logits to tokens, row by row and independent of the batch."""
