"""Bytes of one number of each type of weights, activations and caches."""

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
"""Sizes by torch's names, except for fp8, which has the cache's name."""
