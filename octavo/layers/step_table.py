"""Declaration of a step's arrays, and their layout in one piece of memory.

Layout, views on host and device, and native addresses (`StepArrays` in csrc/inputs.h) follow from
the declaration. The memory plan uses this module, so it does not import the compiled
extension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from octavo.messages import NewRequestData, ScheduledRequest

LongArray = NDArray[np.int64]

_ALIGNMENT = 16
SAMPLING_ROW_WORDS = 5
"""Size of a `SAMPLING_ROW` in int64 words."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """Named dimensions of a step; csrc/plan.h lists those that native calls can bind to."""

    tokens: int
    """Number of tokens to compute (T)."""
    requests: int
    """Number of requests (R)."""
    samples: int
    """Number of rows of logits to sample from (S)."""


Array = TypeVar("Array")
Other = TypeVar("Other")


def _array(dtype: str, *dims: str | int) -> dict[str, Any]:
    """Return the field metadata that declares an array.

    Args:
        dtype: type of its elements.
        dims: fields of `StepSize`, "groups", "blocks", "bounds" (R + 1), or numbers.
    """
    return {"dtype": dtype, "dims": dims}


class StepFiller(Protocol):
    """Filler of a `StepArray`: it sets the array in each step, from state that it keeps."""

    def add_row(self, row: int, data: NewRequestData) -> None:
        """Add a request in the given row of the batch."""
        ...

    def schedule(self, row: int, request: ScheduledRequest) -> None:
        """Note a request's part of the next step."""
        ...

    def fill(
        self, out: NDArray[Any], rows: LongArray, starts: LongArray, counts: LongArray
    ) -> None:
        """Set the array for a step.

        Args:
            out: the array, of the step's size.
            rows: int64 [R], row of each request.
            starts: int64 [R], position in each request of its first token of the step.
            counts: int64 [R], number of tokens of each request in the step.
        """
        ...


class StepArray(Protocol):
    """Array of a step that a block declares. It is hashable; blocks with equal arrays share one.

    Rows that fill a captured step up to its size have -1.
    """

    @property
    def name(self) -> str:
        """Key in `StepContext.arrays`."""

    @property
    def dtype(self) -> str:
        """Data type: "int32" or "int64"."""

    @property
    def dims(self) -> tuple[str | int, ...]:
        """Dimensions: first "tokens", "requests" or "samples", then numbers."""

    def make_filler(self, max_num_rows: int) -> StepFiller:
        """Return the filler of the array, for a batch of `max_num_rows` rows."""


@dataclass(slots=True)
class StepTable(Generic[Array]):
    """Arrays of a step: numpy arrays on the host, tensors for the model.

    Tokens of one request are contiguous. G is the number of KV-cache groups.
    """

    query_start_loc: Array = field(metadata=_array("int32", "bounds"))
    """Index of each request's first token, then the end of the last request's tokens."""
    seq_lens: Array = field(metadata=_array("int32", "requests"))
    """Number of tokens of each request, including this step's."""
    logits_indices: Array = field(metadata=_array("int64", "samples"))
    """Index in the batch of each token that needs logits."""
    sampling_rows: Array = field(metadata=_array("int64", "samples"))
    """Row of the request of each row of logits; -1: none. Only `DeviceSteps` uses this array and
    `sampling_params`."""
    sampling_params: Array = field(metadata=_array("int64", "samples", SAMPLING_ROW_WORDS))
    """`SAMPLING_ROW` of each row of logits."""
    input_ids: Array = field(metadata=_array("int64", "tokens"))
    """Token ids."""
    positions: Array = field(metadata=_array("int64", "tokens"))
    """Position of each token in its request."""
    slot_mappings: Array = field(metadata=_array("int64", "groups", "tokens"))
    """Slot of each token's keys and values: block * block_size + offset; -1: do not store them."""
    block_tables: Array = field(metadata=_array("int32", "groups", "requests", "blocks"))
    """Blocks of each request; entries after its last block are not set."""
    extra: dict[str, Array] = field(default_factory=dict, kw_only=True)
    """Arrays that the model's blocks declare, by name; see `StepArray`."""
    extra_dims: dict[str, tuple[str | int, ...]] = field(default_factory=dict, kw_only=True)
    """Dimensions of the arrays in `extra`."""

    def first(self, size: StepSize) -> StepTable[Array]:
        """Return views of the beginnings of the arrays, for a step of the given size."""
        parts: dict[str | int, slice] = {
            "tokens": slice(size.tokens),
            "requests": slice(size.requests),
            "samples": slice(size.samples),
            "bounds": slice(size.requests + 1),
        }

        def cut(array: Array, dims: tuple[str | int, ...]) -> Array:
            # `Array` has no bound, because numpy's, torch's and host arrays share no base class.
            part: Array = array[tuple([parts.get(dim, slice(None)) for dim in dims])]  # type: ignore[index]
            return part

        return StepTable(
            *[cut(getattr(self, name), dims) for name, _, dims in _DECLARED],
            extra={name: cut(self.extra[name], dims) for name, dims in self.extra_dims.items()},
            extra_dims=self.extra_dims,
        )

    def map(self, function: Callable[[Array], Other]) -> StepTable[Other]:
        """Return the table with a function applied to each array."""
        return StepTable(
            *[function(array) for array in self],
            extra={name: function(array) for name, array in self.extra.items()},
            extra_dims=self.extra_dims,
        )

    def __iter__(self) -> Iterator[Array]:
        """Yield the arrays of all models, in order of their declaration."""
        for name, _, _ in _DECLARED:
            yield getattr(self, name)


_DECLARED: list[tuple[str, str, tuple[str | int, ...]]] = [
    (array.name, array.metadata["dtype"], array.metadata["dims"])
    for array in fields(StepTable)
    if array.metadata
]
STEP_ARRAYS = [name for name, _, _ in _DECLARED]
"""Names of the arrays of all models, in order."""


class StepLayout:
    """Layout of a step's arrays in one piece of memory, the same on the host and on a device.

    Args:
        size: size of the step.
        blocks: number of blocks of the longest request, in each KV-cache group.
        num_groups: number of KV-cache groups.
        arrays: arrays that the model's blocks declare.
    """

    def __init__(
        self, size: StepSize, blocks: int, num_groups: int, arrays: Sequence[StepArray] = ()
    ) -> None:
        self.size = size
        self.nbytes = 0
        self._extra_dims = {array.name: array.dims for array in arrays}
        self._places: list[tuple[int, int, str, tuple[int, ...]]] = []
        lengths = {
            "tokens": size.tokens,
            "requests": size.requests,
            "samples": size.samples,
            "bounds": size.requests + 1,
            "groups": num_groups,
            "blocks": blocks,
        }
        declared = [(dtype, dims) for _, dtype, dims in _DECLARED]
        for dtype, dims in [*declared, *((array.dtype, array.dims) for array in arrays)]:
            shape = tuple(dim if isinstance(dim, int) else lengths[dim] for dim in dims)
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            self._places.append((self.nbytes, self.nbytes + nbytes, dtype, shape))
            self.nbytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def table(self, view: Callable[[int, int, str, tuple[int, ...]], Array]) -> StepTable[Array]:
        """Return the arrays.

        Args:
            view: returns one array, for its begin and end in bytes, its dtype and its shape.
        """
        views = [view(*place) for place in self._places]
        extra = dict(zip(self._extra_dims, views[len(_DECLARED) :], strict=True))
        return StepTable(*views[: len(_DECLARED)], extra=extra, extra_dims=self._extra_dims)


def input_batch_nbytes(
    size: StepSize,
    max_model_len: int,
    block_size: int,
    num_groups: int,
    arrays: Sequence[StepArray] = (),
    max_encoder_len: int = 0,
) -> int:
    """Return the bytes of `InputBatch`'s rows and of the largest step's arrays.

    Args:
        size: size of the largest step.
        max_model_len: longest context.
        block_size: number of tokens of a KV block.
        num_groups: number of KV-cache groups.
        arrays: arrays that the model's blocks declare.
        max_encoder_len: most rows of an encoder that the tokens of a request attend to.
    """
    blocks = -(-max(max_model_len, max_encoder_len) // block_size)
    rows = size.requests * 4 * (max_model_len + blocks * num_groups)
    return rows + StepLayout(size, blocks, num_groups, arrays).nbytes
