"""Sizes of packed data for the memory plan. Imports no torch: the control plane may ask."""

from __future__ import annotations

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element, by dtype name."""

PANEL = 64
"""Outputs that a packed weight is rounded up to: the widest panel of any instruction set."""


def packed_nbytes(n: int, k: int, dtype: str) -> int:
    """Bytes that a weight of shape [n, k] takes once packed."""
    return -(-n // PANEL) * PANEL * (-(-k // 2) * 2) * ITEMSIZE[dtype]
