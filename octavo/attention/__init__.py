"""Attention over a paged KV cache: the interface, a torch reference, and backends for devices."""
