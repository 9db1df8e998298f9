"""Norms of the rows of changed weights, for adapters of the kind DoRA."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Source, Tensors
from octavo.models.loader import read_turned, with_module
from octavo.models.weights import Weight
from octavo.quantization.base import IntArray, PackedShape, TensorError
from octavo.quantization.dequantized import Dequantized, as_numbers
from octavo.quantization.plain import floats
from octavo.system.tensor import from_numpy

_ROWS = 64
"""Number of rows of a weight whose norms are computed at once."""


class WeightNorms:
    """Reader of a model's weights, which computes norms of their rows.

    Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation" (2024). The numbers are those of the
    checkpoint: quantized ones are dequantized, and those that loading quantizes are as they are. A
    norm depends neither on the rank that computes it nor on the rows that it is computed with.

    Args:
        weights: weights of the model, or of a rank's or a stage's part of it, with their forms.
        open_checkpoint: opens the checkpoint that the loaded weights come from.
    """

    def __init__(self, weights: Iterable[Weight], open_checkpoint: Callable[[], Tensors]) -> None:
        self._open = open_checkpoint
        self._sources = {name: it for weight in weights for name, it in _modules(weight)}

    @cached_property
    def _tensors(self) -> Tensors:
        return self._open()

    def compute(
        self,
        module: str,
        rows: Sequence[slice | IntArray],
        a: NDArray[Any],
        b: NDArray[Any],
        scale: float,
    ) -> NDArray[np.float32]:
        """Return the norms of rows of W + scale * B A, with the inputs of all ranks.

        Args:
            module: name of a module in the checkpoint.
            rows: rows of W, as `rows_of` returns them.
            a: A, of any float type: [rank, inputs].
            b: the rows of B, of any float type: [number of rows, rank].
            scale: factor of the change.

        Raises:
            ModelError: the checkpoint cannot be read, or has changed since the model was loaded.
        """
        from octavo.kernels.native import NativeOps

        weight, sources = self._sources[module]
        turned, whole = read_turned(sources, self._tensors)
        try:
            parts = weight.form.cut(turned, list(_pieces(rows, len(b))), None)
        except TensorError as error:
            raise with_module(error, sources[0]) from None
        form, ops = as_numbers([weight.form]), NativeOps()
        left = from_numpy(np.ascontiguousarray(a, np.float32))
        right = np.float32(scale) * np.ascontiguousarray(b, np.float32)
        norms, begin = np.empty(len(b), np.float32), 0
        for part in parts:
            end = begin + part[0].shape[0]
            if isinstance(form, Dequantized):
                shape = PackedShape(end - begin, a.shape[1], "float32", weight.whole_rows)
                numbers = form.numbers([part], shape)
            else:
                (numbers,) = floats([part], "float32")
            own = right[begin:end], norms[begin:end]
            ops.lora_norms(numbers, left, *map(from_numpy, own))
            begin = end
        assert begin == len(b)
        for tensor in whole:
            self._tensors.done(tensor)
        return norms


def norms_nbytes(
    weights: Iterable[Weight], layers: Collection[str], rank: int, *, copies: bool = False
) -> int:
    """Return an upper bound of the bytes that `WeightNorms.compute` uses.

    Args:
        weights: weights of the whole model, with their forms.
        layers: linear layers that adapters may change, as prefixes of the names of their weights.
        rank: largest rank of an adapter.
        copies: True if reading a tensor of the checkpoint makes a copy of it.
    """
    most = 0
    for weight in weights:
        if f"{weight.name.rpartition('.weight')[0]}." not in layers:
            continue
        n, k = weight.shape
        for _, (_, sources) in _modules(weight):
            # A, B and their float32 copies, norms and gains; rows as float64, and copied.
            needed = 2 * 4 * rank * (n + k) + 8 * 4 * n + 2 * 8 * _ROWS * k
            if isinstance(as_numbers([weight.form]), Dequantized):
                # As integers of 32 bits and of 8 bits; scales; rows of numbers, zeros and scales.
                needed += (4 + 2) * n * k + 5 * 4 * _ROWS * k
            elif (
                copies or sources[0].transform in ("taps", "padded") or sources[0].order is not None
            ):
                needed += 8 * n * k
            most = max(most, needed)
    return most


def _modules(weight: Weight) -> Iterator[tuple[str, tuple[Weight, tuple[Source, ...]]]]:
    """Yield the modules of a linear weight: their names, and the sources of their tensors."""
    step = weight.form.num_tensors
    if weight.kind == "linear":
        for begin in range(0, len(weight.sources), step):
            sources = weight.sources[begin : begin + step]
            yield sources[0].name.rpartition(".")[0], (weight, sources)


def _pieces(rows: Sequence[slice | IntArray], count: int) -> Iterator[slice | IntArray]:
    """Yield parts of `count` rows of a module, each of a few rows."""
    for part in rows:
        if isinstance(part, slice):
            begin, end, _ = part.indices(count if part.stop is None else part.stop)
            for first in range(begin, end, _ROWS):
                yield slice(first, min(first + _ROWS, end))
        else:
            for first in range(0, len(part), _ROWS):
                yield part[first : first + _ROWS]
