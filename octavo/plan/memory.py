"""Memory of a device and of steps, for the memory plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal


@dataclass(frozen=True)
class Scratch:
    """Memory of steps on a CPU besides weights, rows and KV cache, computed before loading.

    Attributes:
        activations: exact bytes of the arena for the forward pass of the largest step.
        logits: exact bytes of the arena for its logits and their intermediate results.
        kernels: upper bound of the bytes that the kernels keep.
        shared: bytes of the buffers that all ranks share.
        exchanged: bytes of the rows that engines with divided experts exchange, and of experts that
            move among them.
        adapter: bytes of an adapter of the largest rank that changes all modules it may.
        norms: bytes that the norms of changed weights need while an adapter is read.
        encoder_arena: exact bytes of the arena for the largest run of an encoder.
        encoders: other bytes of the runs of encoders: keys and values, and an upper bound of the
            arrays of the items.
    """

    activations: int
    logits: int
    kernels: int
    shared: int = 0
    exchanged: int = 0
    adapter: int = 0
    norms: int = 0
    encoder_arena: int = 0
    encoders: int = 0

    @classmethod
    def most(cls, found: Sequence[Scratch]) -> Scratch:
        """Return the maximum of each field: a rank with smaller buffers may have larger gaps."""
        return cls(*map(max, zip(*map(astuple, found), strict=True)))


@dataclass(frozen=True)
class MemoryItem:
    """Memory of one purpose."""

    name: str
    nbytes: int
    when: Literal["always", "step", "sampling", "loading", "serving"] = "always"
    """Time at which the memory is used. "step" and "loading" never coincide. "sampling": a part of
    a step that is freed at its end. "serving": memory of requests and other processes. The last
    three are outside of the engine's steady state."""
    note: str = ""
    """End of the line in the report."""


def sum_nbytes(items: Sequence[MemoryItem], name: str) -> int:
    """Return the bytes of the items with a name."""
    return sum(item.nbytes for item in items if item.name == name)


@dataclass(frozen=True)
class MemoryBudget:
    """A device's memory, and the items that an engine needs besides the KV cache.

    A platform estimates it before the model is loaded or measures it afterwards.

    Attributes:
        source: name of the memory for users, e.g. "what is free".
        available: its bytes; the engine uses the share `gpu_memory_utilization` of them.
        most_kv_cache: most bytes of a KV cache without a configured size.
        items: memory besides the KV cache.
        scratches: source of the items "activations" and "logits", of each stage, if they are
            estimated.
        draft_scratch: the same of the draft model.
    """

    source: str
    available: int
    most_kv_cache: int
    items: tuple[MemoryItem, ...]
    scratches: tuple[Scratch, ...] = ()
    draft_scratch: Scratch | None = None

    def nbytes(self, name: str) -> int:
        """Return the bytes of the items with a name."""
        return sum_nbytes(self.items, name)
