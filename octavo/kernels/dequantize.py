"""Numbers of blocks, in numpy: the reference of the native kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.system.block_types import BLOCK_TYPES

# Numpy's operators have the type Any.
# mypy: disable-error-code="no-any-return"

Bytes = NDArray[np.uint8]
Floats = NDArray[Any]

IQ4_LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
"""Levels of iq4_nl and iq4_xs."""
E2M1_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Levels of mxfp4 and nvfp4: twice the numbers of the type e2m1."""
_THREE = (4, 12, 20, 28, 36, 44, 52, 62)
_ODD = (1, 3, 5, 7, 9, 11, 13, 15)
LEVELS: dict[str, tuple[float, tuple[int, ...]]] = {
    "iq1_levels": (1 / 8, (-7, 1, 9, 0, -9, -1, 7, 0)),
    "iq2_levels": (1 / 8, (8, 25, 43, 0, -8, -25, -43, 0)),
    "iq3_xxs_levels": (1 / 4, (*_THREE, *(-level for level in _THREE))),
    "iq3_s_levels": (1, (*_ODD, *(-level for level in _ODD))),
}
"""Factor of all scales, and levels, of the types with levels."""

INT4_LEVELS = np.array(
    [-127, -101, -76, -58, -44, -31, -20, -10, 0, 10, 20, 31, 43, 58, 74, 95], np.float32
)
"""Levels of int4_levels, times 16."""
# fmt: off
NF4_LEVELS = np.array(
    [-32767, -22812, -17205, -12940, -9320, -6054, -2983, 0,
     2608, 5273, 8064, 11072, 14441, 18435, 23689, 32767], np.float32
)
# fmt: on
"""Levels of nf4 (bitsandbytes), times 32767."""


def dequantize(blocks: Bytes, block_type: str) -> Floats:
    """Return the numbers of raw blocks in float32.

    The layouts are those of ggml, the tensor library of llama.cpp.

    Args:
        blocks: rows of blocks as a file has them: [rows, bytes].
        block_type: a key of `BLOCK_TYPES`.
    """
    size = BLOCK_TYPES[block_type]
    one_each = blocks.reshape(-1, size.nbytes)
    with np.errstate(invalid="ignore", over="ignore"):
        numbers = _READERS[block_type](one_each)
    return numbers.reshape(len(blocks), -1)


def _half(b: Bytes, at: int) -> Floats:
    return np.ascontiguousarray(b[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(b: Bytes) -> Floats:
    """Return the low halves of 16 bytes, then the high halves."""
    return np.concatenate([b & 15, b >> 4], axis=-1).astype(np.float32)


def _fifth_bits(b: Bytes) -> Floats:
    return 16 * np.unpackbits(b, axis=-1, bitorder="little").astype(np.float32)


def _q4_0(b: Bytes) -> Floats:
    return _half(b, 0) * (_nibbles(b[:, 2:]) - 8)


def _q4_1(b: Bytes) -> Floats:
    return _half(b, 0) * _nibbles(b[:, 4:]) + _half(b, 2)


def _q5_0(b: Bytes) -> Floats:
    return _half(b, 0) * (_nibbles(b[:, 6:]) + _fifth_bits(b[:, 2:6]) - 16)


def _q5_1(b: Bytes) -> Floats:
    return _half(b, 0) * (_nibbles(b[:, 8:]) + _fifth_bits(b[:, 4:8])) + _half(b, 2)


def _q8_0(b: Bytes) -> Floats:
    return _half(b, 0) * b[:, 2:].view(np.int8).astype(np.float32)


def _iq4_nl(b: Bytes) -> Floats:
    return _half(b, 0) * IQ4_LEVELS[_nibbles(b[:, 2:]).astype(int)]


def _mxfp4(b: Bytes) -> Floats:
    scale = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128)
    return scale * E2M1_LEVELS[_nibbles(b[:, 1:]).astype(int)]


def _nvfp4(b: Bytes) -> Floats:
    factor = np.ascontiguousarray(b[:, :4]).view(np.float32)
    codes = b[:, 4:6].astype(np.int32)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    leading = np.where(exponents == 0, 0, 8)
    scales = np.ldexp(np.float32(1), np.maximum(exponents, 1) - 10) * (leading + mantissas)
    scales = np.where(codes & 128, -scales, scales).astype(np.float32) * factor / 2
    return _spread(scales, 16) * E2M1_LEVELS[_nibbles(b[:, 6:]).astype(int)]


def _two_bits(b: Bytes) -> NDArray[Any]:
    """Return the 256 numbers of two bits in 64 bytes.

    The numbers of 32 bytes follow one another; among these, first those in all bytes' lowest bits.
    """
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (b.reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 256)


def _spread(scales: Floats, each: int) -> Floats:
    return np.repeat(scales, each, axis=1)


def _q2_k(b: Bytes) -> Floats:
    scales, minima = (b[:, :16] & 15).astype(np.float32), (b[:, :16] >> 4).astype(np.float32)
    low = _spread(_half(b, 82) * minima, 16)
    return _spread(_half(b, 80) * scales, 16) * _two_bits(b[:, 16:80]) - low


def _q3_k(b: Bytes) -> Floats:
    high = (b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 256)
    packed = b[:, 96:108]
    four = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    two = packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = (four | two.reshape(-1, 16) << 4).astype(np.float32) - 32
    codes = _two_bits(b[:, 32:96]).astype(np.float32) + 4 * high - 4
    return _spread(_half(b, 108) * scales, 16) * codes


def _scales_and_minima(b: Bytes) -> tuple[Floats, Floats]:
    """Return the 8 scales and minima of 6 bits in 12 bytes."""
    first, second, third = b[:, :4], b[:, 4:8], b[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _four_bits(b: Bytes) -> Floats:
    """Return the 256 numbers of four bits in 128 bytes.

    The numbers of 32 bytes follow one another; among these, first those in all bytes' low halves.
    """
    return _nibbles(b.reshape(-1, 4, 32)).reshape(-1, 256)


def _with_minima(b: Bytes, codes: Floats) -> Floats:
    scales, minima = _scales_and_minima(b[:, 4:16])
    low = _spread(_half(b, 2) * minima, 32)
    return _spread(_half(b, 0) * scales, 32) * codes - low


def _q4_k(b: Bytes) -> Floats:
    return _with_minima(b, _four_bits(b[:, 16:]))


def _q5_k(b: Bytes) -> Floats:
    high = b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _with_minima(b, _four_bits(b[:, 48:]) + 16 * high.reshape(-1, 256))


def _q6_k(b: Bytes) -> Floats:
    low = b[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    codes = low.reshape(-1, 256) | _two_bits(b[:, 128:192]) << 4
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return _spread(_half(b, 208) * scales, 16) * (codes.astype(np.float32) - 32)


def _iq4_xs(b: Bytes) -> Floats:
    high = np.ascontiguousarray(b[:, 2:4]).view(np.uint16)
    low = (b[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    scales = (low | (high >> np.arange(0, 16, 2, dtype=np.uint16) & 3) << 4).astype(np.float32)
    levels = IQ4_LEVELS[_nibbles(b[:, 8:].reshape(-1, 8, 16)).astype(int)].reshape(-1, 256)
    return _spread(_half(b, 0) * (scales - 32), 32) * levels


def _with_levels(block_type: str, b: Bytes) -> Floats:
    factor, table = LEVELS[block_type]
    groups = BLOCK_TYPES[block_type].nbytes - 2 - 128
    scales = np.ascontiguousarray(b[:, 2 : 2 + groups]).view(np.int8).astype(np.float32)
    levels = np.array(table + (0,) * (16 - len(table)), np.float32)
    numbers = levels[_nibbles(b[:, 2 + groups :].reshape(-1, 8, 16)).astype(int)].reshape(-1, 256)
    return _spread(_half(b, 0) * np.float32(factor) * scales, 256 // groups) * numbers


_READERS: dict[str, Callable[[Bytes], Floats]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "iq4_nl": _iq4_nl,
    "mxfp4": _mxfp4,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq4_xs": _iq4_xs,
    "nvfp4": _nvfp4,
}
_READERS |= {name: partial(_with_levels, name) for name in LEVELS}
