"""Repacking of blocks that Octavo has no kernels for, into block types with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.gguf.grids import grid
from octavo.system.block_types import BlockType

# Numpy's operators have the type Any.
# mypy: disable-error-code="no-any-return"

Bytes = NDArray[Any]


class Repacked(NamedTuple):
    """A type of ggml that is repacked."""

    stored: BlockType
    """Its blocks in a file."""
    block_type: str
    """Key of `BLOCK_TYPES`: the type of the blocks that it is repacked to."""
    repack: Callable[[Bytes], Bytes]
    """Conversion of blocks: [blocks, bytes] to [blocks, bytes of as many numbers]."""


def _shifts(*shifts: int) -> NDArray[Any]:
    return np.array(shifts, np.uint8)


def _parity_signs(codes: NDArray[Any]) -> NDArray[Any]:
    """Return the signs of 8 numbers: 7 bits, and one that makes their sum even."""
    signs = codes & 127
    parity = signs ^ signs >> 4
    parity ^= parity >> 2
    return signs | (parity ^ parity >> 1) << 7 & 128


def _bits(signs: NDArray[Any]) -> Bytes:
    """Return the bits of bytes, lowest first: [blocks, 256]."""
    flat = np.ascontiguousarray(signs.astype(np.uint8)).reshape(len(signs), -1)
    return np.unpackbits(flat, axis=-1, bitorder="little")


def _codes(name: str, indices: NDArray[Any]) -> Bytes:
    """Return the digits of a grid's vectors: [blocks, 256]."""
    return grid(name)[indices.reshape(len(indices), -1)].reshape(len(indices), 256)


def _halves(scales: Bytes) -> Bytes:
    """Return the low half of each byte, then its high half."""
    return (scales[..., None] >> _shifts(0, 4) & 15).reshape(len(scales), -1)


def _join(factor: Bytes, scales: NDArray[Any], codes: Bytes) -> Bytes:
    """Return blocks with levels: see `BLOCK_TYPES`."""
    runs = codes.reshape(len(codes), 8, 2, 16)
    nibbles = (runs[:, :, 0] | runs[:, :, 1] << 4).reshape(len(codes), -1)
    return np.concatenate([factor, scales.astype(np.uint8), nibbles], axis=1)


def _view(b: Bytes, dtype: str) -> NDArray[Any]:
    return np.ascontiguousarray(b).view(dtype)


def _iq2_xxs(b: Bytes) -> Bytes:
    words = _view(b[:, 2:], "<u4").reshape(len(b), 8, 2)
    indices = _view(words[:, :, :1], "u1")
    signs = _parity_signs(words[:, :, 1:] >> np.array([0, 7, 14, 21], np.uint32))
    scales = np.repeat(2 * (words[:, :, 1] >> 28) + 1, 2, axis=1)
    return _join(b[:, :2], scales, _codes("iq2_xxs", indices) | _bits(signs) << 2)


def _iq2_xs(b: Bytes) -> Bytes:
    words = _view(b[:, 2:66], "<u2")
    codes = _codes("iq2_xs", words & 511) | _bits(_parity_signs(words >> 9)) << 2
    return _join(b[:, :2], 2 * _halves(b[:, 66:]) + 1, codes)


def _iq2_s(b: Bytes) -> Bytes:
    high = (b[:, 66:74, None] >> _shifts(0, 2, 4, 6) & 3).reshape(len(b), -1)
    indices = b[:, 2:34] | high.astype(np.uint16) << 8
    codes = _codes("iq2_s", indices) | _bits(b[:, 34:66]) << 2
    return _join(b[:, :2], 2 * _halves(b[:, 74:]) + 1, codes)


def _iq3_xxs(b: Bytes) -> Bytes:
    words = _view(b[:, 66:], "<u4")
    signs = _parity_signs(words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32))
    codes = _codes("iq3_xxs", b[:, 2:66]) | _bits(signs) << 3
    return _join(b[:, :2], 2 * (words >> 28) + 1, codes)


def _iq3_s(b: Bytes) -> Bytes:
    indices = b[:, 2:66] | _bits(b[:, 66:74]).astype(np.uint16) << 8
    codes = _codes("iq3_s", indices) | _bits(b[:, 74:106]) << 3
    return _join(b[:, :2], 2 * _halves(b[:, 106:]) + 1, codes)


def _iq1_s(b: Bytes) -> Bytes:
    words = _view(b[:, 34:], "<u2")
    high = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(b), -1)
    below = np.repeat((words >> 15).astype(np.uint8), 32, axis=1)
    codes = _codes("iq1_s", b[:, 2:34] | high << 8) | below << 2
    return _join(b[:, :2], np.repeat(2 * (words >> 12 & 7) + 1, 2, axis=1), codes)


def _iq1_m(b: Bytes) -> Bytes:
    high = _halves(b[:, 32:48])
    words = _view(b[:, 48:], "<u2")
    factor = (
        words[:, 0] >> 12 | words[:, 1] >> 8 & 240 | words[:, 2] >> 4 & 3840 | words[:, 3] & 61440
    )
    scales = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(b), -1)
    indices = b[:, :32] | (high & 7).astype(np.uint16) << 8
    codes = _codes("iq1_s", indices) | np.repeat(high >> 3, 8, axis=1) << 2
    return _join(_view(factor[:, None], "u1"), 2 * scales + 1, codes)


def _as_q2_k(codes: Bytes, factor: Bytes) -> Bytes:
    """Return blocks of q2_k with the numbers factor * (code - 1)."""
    ones = np.full((len(codes), 16), 1 | 1 << 4, np.uint8)
    return np.concatenate([ones, codes, factor, factor], axis=1)


def _tq2_0(b: Bytes) -> Bytes:
    return _as_q2_k(b[:, :64], b[:, 64:])


def _tq1_0(b: Bytes) -> Bytes:
    def digits(bytes_: Bytes, count: int) -> NDArray[Any]:
        """Return the digits in base 3 of bytes: all first ones, then all second ones."""
        powers = (3 ** np.arange(count)).astype(np.uint8)[:, None]
        return ((bytes_[:, None] * powers).astype(np.uint16) * 3 >> 8).reshape(len(b), -1)

    parts = [digits(b[:, :32], 5), digits(b[:, 32:48], 5), digits(b[:, 48:52], 4)]
    codes = np.concatenate(parts, axis=1).astype(np.uint8).reshape(-1, 2, 4, 32)
    packed = codes[:, :, 0] | codes[:, :, 1] << 2 | codes[:, :, 2] << 4 | codes[:, :, 3] << 6
    return _as_q2_k(packed.reshape(len(b), 64), b[:, 52:])


def _nvfp4(b: Bytes) -> Bytes:
    """Return two blocks with the factor 1 for each block of 64 numbers."""
    stored = b[:, :4] & 127  # ggml ignores the sign
    scales = np.where(stored == 127, 0, stored).astype(np.uint8).reshape(-1, 2)  # NaN is 0 in ggml
    pairs = b[:, 4:].reshape(-1, 2, 8)  # of each scale, the second 8 numbers in the high halves
    low, high = pairs & 15, pairs >> 4
    codes = np.concatenate([low[:, 0] | low[:, 1] << 4, high[:, 0] | high[:, 1] << 4], axis=1)
    factors = np.ones((len(scales), 1), np.float32).view(np.uint8)
    return np.concatenate([factors, scales, codes], axis=1).reshape(len(b), -1)


REPACKED: dict[str, Repacked] = {
    "iq1_s": Repacked(BlockType(256, 50), "iq1_levels", _iq1_s),
    "iq1_m": Repacked(BlockType(256, 56), "iq1_levels", _iq1_m),
    "iq2_xxs": Repacked(BlockType(256, 66), "iq2_levels", _iq2_xxs),
    "iq2_xs": Repacked(BlockType(256, 74), "iq2_levels", _iq2_xs),
    "iq2_s": Repacked(BlockType(256, 82), "iq2_levels", _iq2_s),
    "iq3_xxs": Repacked(BlockType(256, 98), "iq3_xxs_levels", _iq3_xxs),
    "iq3_s": Repacked(BlockType(256, 110), "iq3_s_levels", _iq3_s),
    "tq1_0": Repacked(BlockType(256, 54), "q2_k", _tq1_0),
    "tq2_0": Repacked(BlockType(256, 66), "q2_k", _tq2_0),
    "nvfp4": Repacked(BlockType(64, 36), "nvfp4", _nvfp4),
}
"""Types that are repacked, by ggml's names in lower case."""
_AT_ONCE = 2**14


def repack(data: Bytes, kind: str) -> Bytes:
    """Return the bytes of blocks, repacked.

    Args:
        data: bytes of whole blocks of a file.
        kind: their type, a key of `REPACKED`.
    """
    stored, _, convert = REPACKED[kind]
    blocks = data.reshape(-1, stored.nbytes)
    parts = [convert(blocks[i : i + _AT_ONCE]) for i in range(0, len(blocks), _AT_ONCE)]
    return np.concatenate(parts).reshape(-1)
