"""The arrays of a step, each declared once, and where they are in one piece of memory.

Layout, views on host and device and native addresses (`StepArrays` in csrc/inputs.h) follow from
the declaration. Without torch and the compiled extension: the memory plan counts the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

import numpy as np

_ALIGNMENT = 16
SAMPLING_ROW_WORDS = 5
"""A `SAMPLING_ROW` as int64."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """The named dimensions of a step; those that native calls can bind to are in csrc/plan.h."""

    tokens: int
    """To compute (T)."""
    requests: int
    """They belong to (R)."""
    samples: int
    """Rows of logits that tokens are chosen from (S)."""


Array = TypeVar("Array")
Other = TypeVar("Other")


def _array(dtype: str, *dims: str | int) -> dict[str, Any]:
    """An array. `dims`: of `StepSize`, "bounds" (R + 1), "groups", "blocks", or a number."""
    return {"dtype": dtype, "dims": dims}


@dataclass(slots=True)
class StepTable(Generic[Array]):
    """The arrays of a step: numpy's on the host, tensors for the model.

    Tokens of one request are neighbours. G is the number of KV-cache groups.
    """

    query_start_loc: Array = field(metadata=_array("int32", "bounds"))
    """Where each request's tokens begin, and where the last one's end."""
    seq_lens: Array = field(metadata=_array("int32", "requests"))
    """Tokens of each request up to and including this step's."""
    logits_indices: Array = field(metadata=_array("int64", "samples"))
    """The tokens whose logits are wanted, as indices into the batch."""
    sampling_rows: Array = field(metadata=_array("int64", "samples"))
    """The row of each of these tokens' request; -1: none. On devices only, like the next."""
    sampling_params: Array = field(metadata=_array("int64", "samples", SAMPLING_ROW_WORDS))
    """`SAMPLING_ROW`."""
    input_ids: Array = field(metadata=_array("int64", "tokens"))
    """Token ids."""
    positions: Array = field(metadata=_array("int64", "tokens"))
    """Position of each token in its request."""
    slot_mappings: Array = field(metadata=_array("int64", "groups", "tokens"))
    """Where each token's keys and values go: block * block_size + offset; -1: nowhere."""
    block_tables: Array = field(metadata=_array("int32", "groups", "requests", "blocks"))
    """Blocks of each request; what is behind its last one is not set."""

    def first(self, size: StepSize) -> StepTable[Array]:
        """Views of what a step of that size has set of arrays that may be larger."""
        parts: dict[str | int, slice] = {
            "tokens": slice(size.tokens),
            "requests": slice(size.requests),
            "samples": slice(size.samples),
            "bounds": slice(size.requests + 1),
        }
        whole = slice(None)
        return StepTable(
            *[
                getattr(self, name)[tuple([parts.get(dim, whole) for dim in dims])]
                for name, _, dims in _DECLARED
            ]
        )

    def map(self, function: Callable[[Array], Other]) -> StepTable[Other]:
        """The same table of what a function makes of each array."""
        return StepTable(*[function(array) for array in self])

    def __iter__(self) -> Iterator[Array]:
        """The arrays, in order of their declaration."""
        for name, _, _ in _DECLARED:
            yield getattr(self, name)


_DECLARED: list[tuple[str, str, tuple[str | int, ...]]] = [
    (array.name, array.metadata["dtype"], array.metadata["dims"]) for array in fields(StepTable)
]
STEP_ARRAYS = [name for name, _, _ in _DECLARED]
"""Their names, in order."""


class StepLayout:
    """Where a step's arrays are in one piece of memory, on the host and on a device alike.

    Args:
        size: of the step.
        blocks: of the longest request, in each KV-cache group.
        num_groups: KV-cache groups.
    """

    def __init__(self, size: StepSize, blocks: int, num_groups: int) -> None:
        self.size = size
        self.nbytes = 0
        self._places: list[tuple[int, int, str, tuple[int, ...]]] = []
        lengths = {
            "tokens": size.tokens,
            "requests": size.requests,
            "samples": size.samples,
            "bounds": size.requests + 1,
            "groups": num_groups,
            "blocks": blocks,
        }
        for _, dtype, dims in _DECLARED:
            shape = tuple(dim if isinstance(dim, int) else lengths[dim] for dim in dims)
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            self._places.append((self.nbytes, self.nbytes + nbytes, dtype, shape))
            self.nbytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def table(self, view: Callable[[int, int, str, tuple[int, ...]], Array]) -> StepTable[Array]:
        """The arrays; `view` makes one of the bytes from ... to ..., a dtype and a shape."""
        return StepTable(*[view(*place) for place in self._places])


def input_batch_nbytes(size: StepSize, max_model_len: int, block_size: int, num_groups: int) -> int:
    """Bytes of `InputBatch`'s rows and of the largest step's arrays, for the memory plan.

    Args:
        size: of the largest step.
        max_model_len: longest context.
        block_size: tokens in a KV block.
        num_groups: KV-cache groups.
    """
    blocks = -(-max_model_len // block_size)
    rows = size.requests * 4 * (max_model_len + blocks * num_groups)
    return rows + StepLayout(size, blocks, num_groups).nbytes
