"""Kind of cache of layers with a recurrent state, which has the same size at every position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from octavo.layers.state_table import SNAPSHOT_SLOTS, STATE_SLOTS, STATE_SOURCES
from octavo.models.cache import Pages
from octavo.system.dtypes import DTYPE_NBYTES

if TYPE_CHECKING:
    from octavo.attention.base import AttentionBackend
    from octavo.layers.step_table import StepTable
    from octavo.system.tensor import Tensor

_ALIGNMENT = 64  # a cache line


@dataclass(frozen=True)
class StateCache:
    """Float32 arrays that summarize all tokens of a request up to a position.

    A state is in a slot. Each request has slots of its own, and the prefix cache keeps copies,
    the snapshots (`kv_cache/states.py`). All layers of a model use the same slots.
    """

    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the arrays."""

    rolls_back = True

    @property
    def nbytes(self) -> int:
        """Bytes of a slot of one layer."""
        return self._ends[-1] * DTYPE_NBYTES["float32"]

    @property
    def _ends(self) -> list[int]:
        """End of each array in a slot, in numbers; each array begins at a cache line."""
        line = _ALIGNMENT // DTYPE_NBYTES["float32"]
        return list(accumulate(-(-math.prod(shape) // line) * line for shape in self.shapes))

    def block_nbytes(self, block_size: int, dtype: str) -> int:
        """Implement `CacheSpec`: the bytes of a slot, whatever the type of the KV cache."""
        return self.nbytes

    def view(
        self, memory: Tensor, block_size: int, dtype: str, backend: AttentionBackend
    ) -> tuple[Tensor, ...]:
        """Return the arrays of all slots: float32 [slots, numbers of the array], flat."""
        numbers = backend.typed(memory[:, : self.nbytes], "float32")
        starts = [begin for begin, _ in pairwise([0, *self._ends])]
        sizes = map(math.prod, self.shapes)
        return tuple(
            numbers[:, begin : begin + size] for begin, size in zip(starts, sizes, strict=True)
        )

    def metadata(
        self, table: StepTable[Tensor], group: int, max_query_len: int, max_seq_len: int
    ) -> StateMetadata:
        """Implement `CacheSpec`."""
        return StateMetadata(
            table.query_start_loc,
            table.extra[STATE_SOURCES.name],
            table.extra[STATE_SLOTS.name],
            table.extra[SNAPSHOT_SLOTS.name],
        )

    def pages(self) -> Pages:
        """Implement `CacheSpec`: a slot is a page. Connectors cut it (`KVLayout.pieces`)."""
        return Pages(count=1, chunks=1)


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """Slots of a step's states.

    Attributes:
        query_start_loc: int32 [R + 1], first token of each request, and the end of the last one.
        sources: int32 [R], slot with the state before each request's first token; -1: zeros.
        slots: int32 [T], slot that receives the state after each token; -1: none.
        snapshots: int32 [T], second slot that receives the state after each token; -1: none.
    """

    query_start_loc: Tensor
    sources: Tensor
    slots: Tensor
    snapshots: Tensor
