"""Memory of drafting without a model."""

from __future__ import annotations

SUFFIX_TOKENS = 2**17
"""Capacity in tokens of each of the two stores of earlier answers of the suffix method."""
SUFFIX_NBYTES_PER_TOKEN = 200


def suffix_nbytes() -> int:
    """Return an upper bound of the bytes of the suffix method."""
    return 2 * SUFFIX_TOKENS * SUFFIX_NBYTES_PER_TOKEN
