"""Attention over a paged KV cache: the interface, a plain torch reference, and the CPU kernel."""
