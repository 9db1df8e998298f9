"""Numbers of quantized weights, from the codes and scales that forms pack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.dequantize import INT4_LEVELS, NF4_LEVELS, dequantize
from octavo.kernels.native import NativeOps
from octavo.kernels.weights import Codes, QuantFormat, QuantizedWeight
from octavo.system.tensor import HostTensor, Tensor, dense, empty, from_numpy

_CHUNK = 2**17
"""Most numbers that are computed at once, or those of one row."""


class NumberOps(NativeOps):
    """Operations whose packed weights are numbers [N, K] in a type, in the order of the inputs.

    A number is computed in float32 and rounded once: code times scale.

    Args:
        dtype: the type: float32, float16 or bfloat16.
    """

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self._dtype = dtype

    def pack_quantized(
        self,
        n: int,
        k: int,
        format: QuantFormat,
        group_size: int,
        parts: Iterable[Codes],
        out: Tensor | None = None,
        order: NDArray[np.int32] | None = None,
    ) -> QuantizedWeight:
        """Return codes times scales."""
        assert out is None
        data, row, group = empty(n, k, dtype=self._dtype), 0, group_size or k
        table = _table(format)
        places = None if order is None else np.argsort(order)
        for part in parts:
            codes, scales, zeros = (
                None if it is None else self.to_host(it)
                for it in (part.codes, part.scales, part.zeros)
            )
            assert codes is not None
            assert scales is not None
            for begin, end in _chunks(len(codes), k):
                numbers = table[codes[begin:end]]
                if zeros is not None:
                    numbers -= _wide(zeros[begin:end], group, k)
                numbers *= _wide(scales[begin:end], group, k)
                self._put(data, row + begin, numbers if places is None else numbers[:, places])
            row += len(codes)
        assert row == n
        return QuantizedWeight(data, n, k, format, group_size, panel=0)

    def pack_blocks(
        self,
        blocks: Sequence[HostTensor],
        block_type: QuantFormat,
        k: int,
        out: Tensor | None = None,
    ) -> QuantizedWeight:
        """Return the numbers of the blocks."""
        assert out is None
        n, row = sum(len(part) for part in blocks), 0
        data = empty(n, k, dtype=self._dtype)
        for part in blocks:
            rows = np.ascontiguousarray(part.numpy())
            for begin, end in _chunks(len(rows), k):
                self._put(data, row + begin, dequantize(rows[begin:end], block_type))
            row += len(rows)
        return QuantizedWeight(data, n, k, block_type, 0, panel=0)

    def _put(self, data: HostTensor, row: int, numbers: NDArray[np.float32]) -> None:
        """Write rows from `row` on."""
        rounded = dense(from_numpy(np.ascontiguousarray(numbers)), self._dtype)
        data[row : row + len(numbers)].numpy()[:] = rounded.numpy()


def _chunks(rows: int, k: int) -> Iterable[tuple[int, int]]:
    """Yield ranges of rows of `_CHUNK` numbers."""
    step = max(1, _CHUNK // k)
    for begin in range(0, rows, step):
        yield begin, min(rows, begin + step)


def _wide(each: NDArray[Any], group: int, k: int) -> NDArray[Any]:
    """Return the number of each input [rows, K], from those of groups."""
    return each if each.shape[1] == 1 else each.repeat(group, 1)[:, :k]


def _table(format: QuantFormat) -> NDArray[np.float32]:
    """Return the numbers of all codes, in units of their scales."""
    codes = np.arange(256, dtype=np.float32)
    match format:
        case "int8":
            return codes - np.float32(128)
        case "int4":
            return codes - np.float32(8)
        case "int4_levels":
            return INT4_LEVELS / np.float32(16)
        case "nf4":
            return NF4_LEVELS
        case "fp8":
            exponent, mantissa = np.divmod(codes[:128], np.float32(8))
            normal = np.ldexp(1 + mantissa / np.float32(8), exponent.astype(np.int32) - 7)
            positive = np.where(exponent == 0, mantissa * np.float32(2**-9), normal)
            return np.concatenate([positive, -positive]).astype(np.float32)
    assert format in ("int4_zeros", "int8_groups")
    return codes
