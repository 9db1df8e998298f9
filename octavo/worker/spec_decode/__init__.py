"""Speculative decoding: who proposes the tokens that the model then verifies."""
