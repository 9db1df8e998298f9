"""How much memory drafting takes without a model. Imports no torch, as the memory plan wants it."""

from __future__ import annotations

SUFFIX_TOKENS = 2**17
"""Tokens of earlier answers that the suffix method keeps, twice."""
SUFFIX_NBYTES_PER_TOKEN = 200


def suffix_nbytes() -> int:
    """Bytes that the suffix method takes at most."""
    return 2 * SUFFIX_TOKENS * SUFFIX_NBYTES_PER_TOKEN
