"""What a device has for an engine, and what steps take. Without torch: the memory plan reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal


@dataclass(frozen=True)
class Scratch:
    """What steps on a CPU hold beside weights, rows and KV cache: found out before loading.

    Attributes:
        activations: bytes of the arena that the forward pass of the largest step fits exactly.
        logits: the same of its logits, with all that they are made from.
        kernels: what the kernels keep for themselves, at most.
        shared: what ranks fill together, once for all of them.
    """

    activations: int
    logits: int
    kernels: int
    shared: int = 0

    @classmethod
    def most(cls, found: Sequence[Scratch]) -> Scratch:
        """What suffices for each of several: who has smaller buffers may leave larger gaps."""
        return cls(*map(max, zip(*map(astuple, found), strict=True)))


@dataclass(frozen=True)
class MemoryItem:
    """Memory of one purpose."""

    name: str
    nbytes: int
    when: Literal["always", "step", "loading", "serving"] = "always"
    """Time at which the memory is used: always; in a step, or while the model is loaded, which
    never coincide; or, not in the engine's own steady state, by requests and other processes."""
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
        source: name of the memory, for people: "what is free".
        available: bytes of it; the engine gets `gpu_memory_utilization` of them.
        most_kv_cache: most bytes of a KV cache without a configured size.
        items: memory besides the KV cache.
        scratches: origin of the items "activations" and "logits", of each stage, where they are
            estimated.
        draft_scratch: the same of the model that drafts.
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
