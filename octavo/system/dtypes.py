"""Bytes of one number of each type that weights, activations and caches have. No torch."""

from __future__ import annotations

DTYPE_NBYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
"""By torch's names, but for fp8, which goes by the cache's."""
