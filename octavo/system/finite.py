"""Check of many numbers for NaN and infinity."""

from __future__ import annotations

import numpy as np

# Bytes that are checked in one call, so that the temporary memory is small.
_PIECE = 2**22
_EXPONENT_BFLOAT16 = 0x7F80


def is_finite(data: bytes, dtype: str) -> bool:
    """Return True if no number is NaN or infinite.

    Args:
        data: the numbers.
        dtype: "bfloat16", or the name of numpy's type of floating-point numbers.
    """
    for begin in range(0, len(data), _PIECE):
        piece = memoryview(data)[begin : begin + _PIECE]
        if dtype == "bfloat16":
            bits = np.frombuffer(piece, np.uint16) & _EXPONENT_BFLOAT16
            finite = bool((bits != _EXPONENT_BFLOAT16).all())
        else:
            finite = bool(np.isfinite(np.frombuffer(piece, dtype)).all())
        if not finite:
            return False
    return True
