"""Quantizers to the block types of GGUF.

A block has codes with a scale, and in some types a minimum. The layouts are those of ggml, the
tensor library of llama.cpp; the search is Octavo's own: for each of several first guesses of the
scale, the codes are rounded, the scale (and minimum) with the least squared error for these codes
is computed, and the guess with the least error wins. Each row depends on its own numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.system.block_types import BLOCK_TYPES

# Numpy's operators have the type Any.
# mypy: disable-error-code="no-any-return"

Bytes = NDArray[np.uint8]
Codes = NDArray[np.int32]
Floats = NDArray[np.float32]

_SYMMETRIC_GUESSES = np.linspace(-0.9, 0.9, 13, dtype=np.float32)
_AFFINE_GUESSES = np.linspace(-1.0, 1.0, 15, dtype=np.float32)
"""Numbers that are added to the largest code, for the guesses of a scale."""
_LARGEST_HALF = np.float32(65504.0)


def quantize(rows: Floats, block_type: str) -> Bytes:
    """Return rows of blocks: uint8 [rows, bytes].

    Args:
        rows: finite numbers: float32 [rows, columns], with whole blocks in a row.
        block_type: a type of `QUANTIZERS`.
    """
    size = BLOCK_TYPES[block_type]
    blocks = QUANTIZERS[block_type](rows.reshape(-1, size.numbers))
    return blocks.reshape(len(rows), -1)


def fit_symmetric(x: Floats, most: int) -> Floats:
    """Return the scale [B] of each block of numbers x [B, G] for codes from -most to most - 1.

    The number with the largest magnitude is near the code -most, so that scales may be negative.
    """
    extreme = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)[:, 0]
    best, scale = np.full(len(x), -1.0, np.float32), np.zeros(len(x), np.float32)
    for guess in _SYMMETRIC_GUESSES:
        codes = _rounded(x, extreme / -(most + guess))
        np.clip(codes, -most, most - 1, out=codes)
        squares = np.einsum("bg,bg->b", codes, codes)
        products = np.einsum("bg,bg->b", x, codes)
        found = products / np.maximum(squares, np.float32(1))
        gain = found * products  # of squared error, against codes that are all 0
        better = gain > best
        best[better], scale[better] = gain[better], found[better]
    return scale


def fit_affine(x: Floats, most: int, *, negative: bool = False) -> tuple[Floats, Floats]:
    """Return scale and minimum [B] of blocks of numbers x [B, G] for codes from 0 to most.

    A number is scale * code + minimum.

    Args:
        x: the numbers.
        most: largest code.
        negative: True if the minimum must not be above 0.
    """
    low, high = x.min(1), x.max(1)
    if negative:
        low = np.minimum(low, np.float32(0))
    width, size = high - low, np.float32(x.shape[1])
    total, squares = x.sum(1), np.einsum("bg,bg->b", x, x)
    best, scale, minimum = np.full(len(x), np.inf, np.float32), np.zeros_like(low), low.copy()
    shifted = x - low[:, None]
    for guess in _AFFINE_GUESSES:
        codes = _rounded(shifted, width / (most + guess))
        np.clip(codes, 0, most, out=codes)
        sums, code_squares = codes.sum(1), np.einsum("bg,bg->b", codes, codes)
        products = np.einsum("bg,bg->b", x, codes)
        divisor = size * code_squares - sums * sums
        is_flat = divisor <= 0
        divisor[is_flat] = 1
        s = (size * products - total * sums) / divisor
        m = (code_squares * total - sums * products) / divisor
        without = is_flat | (m > 0) if negative else is_flat  # a scale alone, or low alone
        s = np.where(without, products / np.maximum(code_squares, np.float32(1)), s)
        m = np.where(without, np.where(code_squares > 0, np.float32(0), low), m)
        error = squares - 2 * (s * products + m * total)
        error += s * s * code_squares + 2 * s * m * sums + size * m * m
        better = error < best
        best[better], scale[better], minimum[better] = error[better], s[better], m[better]
    return scale, minimum


def _rounded(x: Floats, scale: Floats) -> Floats:
    """Return x / scale, rounded to whole numbers, as floats; 0 where the scale is 0."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    inverse[~np.isfinite(inverse)] = 0  # of scales below the smallest normal number
    return np.rint(x * inverse[:, None])


def _half(x: Floats) -> tuple[Bytes, Floats]:
    """Return numbers as the bytes of float16 [B, 2], and as they are then."""
    half = np.clip(x, -_LARGEST_HALF, _LARGEST_HALF).astype("<f2")
    return half.view(np.uint8).reshape(len(x), 2), half.astype(np.float32)


def _codes(x: Floats, scale: Floats, low: int, high: int, offset: int = 0) -> Codes:
    codes = _rounded(x, scale)
    return np.clip(codes, low, high).astype(np.int32) + offset


def _nibbles(codes: Codes) -> Bytes:
    """Return the low four bits of codes [B, G]: the first half in the low half of G / 2 bytes."""
    half = codes.shape[1] // 2
    return ((codes[:, :half] & 15) | (codes[:, half:] & 15) << 4).astype(np.uint8)


def _fifth_bits(codes: Codes) -> Bytes:
    """Return the bits of value 16, the first one lowest."""
    return np.packbits((codes >> 4) & 1, axis=1, bitorder="little")


def _q8_0(x: Floats) -> Bytes:
    data, scale = _half(np.abs(x).max(1) / 127)
    codes = _codes(x, scale, -127, 127).astype(np.int8).view(np.uint8)
    return np.concatenate([data, codes], axis=1)


def _q4_0(x: Floats) -> Bytes:
    data, scale = _half(fit_symmetric(x, 8))
    return np.concatenate([data, _nibbles(_codes(x, scale, -8, 7, 8))], axis=1)


def _q5_0(x: Floats) -> Bytes:
    data, scale = _half(fit_symmetric(x, 16))
    codes = _codes(x, scale, -16, 15, 16)
    return np.concatenate([data, _fifth_bits(codes), _nibbles(codes)], axis=1)


def _q4_1(x: Floats) -> Bytes:
    scales, minima, codes = _affine_block(x, 15)
    return np.concatenate([scales, minima, _nibbles(codes)], axis=1)


def _q5_1(x: Floats) -> Bytes:
    scales, minima, codes = _affine_block(x, 31)
    return np.concatenate([scales, minima, _fifth_bits(codes), _nibbles(codes)], axis=1)


def _affine_block(x: Floats, most: int) -> tuple[Bytes, Bytes, Codes]:
    """Return scales and minima as bytes, and the codes."""
    scale, minimum = fit_affine(x, most)
    (scales, scale), (minima, minimum) = _half(scale), _half(minimum)
    return scales, minima, _codes(x - minimum[:, None], scale, 0, most)


def _super_block(x: Floats, most: int) -> tuple[Bytes, Codes]:
    """Return the first 16 bytes of q4_k and q5_k, and the codes [B, 8, 32].

    They are the scales of the scales and of the minima, and these in six bits.
    """
    parts = x.reshape(-1, 32)
    found, lowest = fit_affine(parts, most, negative=True)
    found, lowest = found.reshape(-1, 8), lowest.reshape(-1, 8)
    found = np.maximum(found, np.float32(0))
    (d_bytes, d), (m_bytes, m) = _half(found.max(1) / 63), _half((-lowest).max(1) / 63)
    scales, minima = _codes(found, d, 0, 63), _codes(-lowest, m, 0, 63)
    packed = np.empty((len(x), 12), np.int32)
    packed[:, :4] = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    packed[:, 4:8] = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    packed[:, 8:] = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    steps, offsets = (d[:, None] * scales).reshape(-1), (m[:, None] * minima).reshape(-1)
    codes = _codes(parts + offsets[:, None], steps.astype(np.float32), 0, most)
    head = np.concatenate([d_bytes, m_bytes, packed.astype(np.uint8)], axis=1)
    return head, codes.reshape(-1, 8, 32)


def _pairs(codes: Codes) -> Bytes:
    """Return the low four bits of codes [B, 8, 32]: 32 bytes for two parts each."""
    low, high = codes[:, ::2] & 15, codes[:, 1::2] & 15
    return (low | high << 4).astype(np.uint8).reshape(len(codes), 128)


def _q4_k(x: Floats) -> Bytes:
    head, codes = _super_block(x, 15)
    return np.concatenate([head, _pairs(codes)], axis=1)


def _q5_k(x: Floats) -> Bytes:
    head, codes = _super_block(x, 31)
    bits = ((codes >> 4) << np.arange(8)[:, None]).sum(1).astype(np.uint8)
    return np.concatenate([head, bits, _pairs(codes)], axis=1)


def _q6_k(x: Floats) -> Bytes:
    parts = x.reshape(-1, 16)
    found = fit_symmetric(parts, 32).reshape(-1, 16)
    data, d = _half(np.abs(found).max(1) / 127)
    scales = _codes(found, d, -127, 127)
    steps = (d[:, None] * scales).reshape(-1).astype(np.float32)
    # Two halves of 128 numbers, each of four parts of 32.
    codes = _codes(parts, steps, -32, 31, 32).reshape(-1, 2, 4, 32)
    low = (codes[:, :, :2] & 15) | (codes[:, :, 2:] & 15) << 4
    high = ((codes >> 4) << (2 * np.arange(4)[:, None])).sum(2)
    return np.concatenate(
        [
            low.astype(np.uint8).reshape(len(x), 128),
            high.astype(np.uint8).reshape(len(x), 64),
            scales.astype(np.int8).view(np.uint8),
            data,
        ],
        axis=1,
    )


QUANTIZERS: dict[str, Callable[[Any], Bytes]] = {
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}
"""Quantizers of blocks [B, numbers] by block type."""
