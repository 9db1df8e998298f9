"""Native operations on logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo._native import kernels
from octavo.kernels.native_base import NativeMemory, check_logits
from octavo.kernels.ops_logits import SAMPLING_ROW, LongArray
from octavo.system.tensor import Tensor, from_numpy

# Largest k for which a heap is the fastest way to find the largest.
_FEW, _LOW_WORD = 64, 0xFFFFFFFF


class NativeLogitOps(NativeMemory):
    """The operations of `LogitOps` by the native kernels."""

    def _softmax(self, x: Tensor, log: bool) -> Tensor:
        rows, dim = check_logits(x)
        out = self._empty(rows, dim, dtype=x.dtype)
        kernels.softmax(
            x=x.data_ptr(), x_stride=x.stride(0), out=out.data_ptr(), rows=rows, dim=dim, log=log
        )
        return out

    def softmax(self, x: Tensor) -> Tensor:
        """Compute maximum, sum of exponentials and quotient, each in the order of the row."""
        return self._softmax(x, log=False)

    def log_softmax(self, x: Tensor) -> Tensor:
        """Compute maximum, sum of exponentials and difference, each in the order of the row."""
        return self._softmax(x, log=True)

    def argmax(self, x: Tensor) -> Tensor:
        rows, dim = check_logits(x)
        out = self._empty(rows, dtype="int64")
        kernels.argmax(x=x.data_ptr(), x_stride=x.stride(0), out=out.data_ptr(), rows=rows, dim=dim)
        return out

    def row_max(self, x: Tensor) -> Tensor:
        rows, dim = check_logits(x)
        out = self._empty(rows, dtype=x.dtype)
        kernels.row_max(
            x=x.data_ptr(), x_stride=x.stride(0), out=out.data_ptr(), rows=rows, dim=dim
        )
        return out

    def sample(self, x: Tensor, params: NDArray[np.void]) -> Tensor:
        """Sample without sorting the vocabulary; see csrc/sample.h."""
        rows, dim = check_logits(x)
        assert params.dtype == SAMPLING_ROW
        assert params.shape == (rows,)
        assert params.flags.c_contiguous
        out = self._empty(rows, dtype="int64")
        kernels.sample(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            params=params.ctypes.data,
            out=out.data_ptr(),
            rows=rows,
            dim=dim,
        )
        return out

    def apply_bitmask_(self, x: Tensor, bitmask: Tensor, rows: Tensor) -> None:
        """Mask rows of x; ignore indices beyond x. In a plan, `rows` has the length of a step."""
        x_rows, dim = check_logits(x)
        assert bitmask.shape == (len(rows), -(-dim // 32))
        assert bitmask.dtype == "int32"
        assert bitmask.stride(1) == 1 or bitmask.shape[1] == 1
        assert rows.dtype == "int64"
        assert rows.is_contiguous()
        kernels.apply_bitmask(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            x_rows=x_rows,
            bitmask=bitmask.data_ptr(),
            bitmask_stride=bitmask.stride(0),
            indices=rows.data_ptr(),
            rows=len(rows),
            dim=dim,
        )

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Compute in one pass with a heap of size k, or by sorting."""
        rows, dim = check_logits(x)
        assert 0 <= k <= dim
        if k > _FEW:
            return self._sort(x, k)
        values = self._empty(rows, k, dtype=x.dtype)
        indices = self._empty(rows, k, dtype="int64")
        kernels.top_k(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            values=values.data_ptr(),
            indices=indices.data_ptr(),
            rows=rows,
            dim=dim,
            k=k,
        )
        return values, indices

    def _sort(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Sort integers that consist of a number and its index.

        No two of them are equal, so every algorithm returns the same order.
        """
        numbers = self.to_host(x)
        dim = numbers.shape[1]
        numbers = np.where(np.isnan(numbers), np.float32(-np.inf), numbers)
        bits = (numbers + np.float32(0)).view(np.int32)  # -0.0 is equal to 0.0
        bits ^= (bits >> 31) & 0x7FFFFFFF  # negative floats sort backwards as integers
        keys = bits.astype(np.int64) << 32
        keys |= _LOW_WORD - np.arange(dim)
        if k < dim:
            keys.partition(dim - k, axis=-1)
            keys = keys[:, dim - k :]
        keys.sort(axis=-1)
        indices = _LOW_WORD - (keys[:, ::-1] & _LOW_WORD)
        values = np.take_along_axis(numbers, indices, 1)
        return from_numpy(values), from_numpy(indices)

    def gather(self, x: Tensor, ids: LongArray) -> NDArray[np.float32]:
        numbers: NDArray[np.float32] = np.take_along_axis(self.to_host(x), ids, 1)
        return numbers

    def ranks(self, x: Tensor, ids: LongArray) -> LongArray:
        numbers, ids = self.to_host(x), ids[:, None]
        value = np.take_along_axis(numbers, ids, 1)
        lower = np.arange(numbers.shape[1]) < ids
        ahead = (numbers > value) | ((numbers == value) & lower)
        ranks: LongArray = ahead.sum(-1) + 1
        return ranks

    def set_at_(self, x: Tensor, rows: LongArray, columns: LongArray | None, value: float) -> None:
        self.to_host(x)[rows if columns is None else (rows, columns)] = value

    def add_at_(
        self, x: Tensor, rows: LongArray, columns: LongArray, values: NDArray[np.float32]
    ) -> None:
        with np.errstate(all="ignore"):
            self.to_host(x)[rows, columns] += values

    def penalize_(
        self,
        x: Tensor,
        rows: LongArray,
        columns: LongArray,
        counts: NDArray[np.float32],
        penalties: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]],
    ) -> None:
        repetition, frequency, presence = penalties
        logits = self.to_host(x)
        values = logits[rows, columns]
        with np.errstate(all="ignore"):
            values = np.where(values > 0, values / repetition, values * repetition)
            values -= frequency * counts
            values -= presence * (counts > 0)
        logits[rows, columns] = values
