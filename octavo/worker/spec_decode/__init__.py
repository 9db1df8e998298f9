"""Speculative decoding: proposers of the drafts that the model verifies."""
