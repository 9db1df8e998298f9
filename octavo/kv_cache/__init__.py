"""Bookkeeping of the paged KV cache: the tokens and the requests of each block."""
