"""What a device has for an engine, and what steps take. Without torch: the memory plan reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass


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
class MemoryBudget:
    """A device's memory, and what the engine takes of it beside the KV cache, in bytes.

    A platform estimates it before the model is loaded or measures it afterwards.

    Attributes:
        source: whose memory, for people: "what is free".
        available: what there is; the engine gets `gpu_memory_utilization` of it.
        most_kv_cache: of the KV cache, without a size from the user.
        runtime: taken already, or by what is no model: libraries, and on a GPU the CUDA context and
            other processes.
        weights: held once the model is loaded.
        activations: what the forward pass of a step of the largest size takes; where it is
            measured, with all else that a step takes, and what captured graphs will hold.
        logits: logits and what sampling does with them.
        loading: the largest weight as it is read, beside the packed ones; gone before a step is
            run.
        rows: token histories, block tables and sampling state of the running requests, where they
            are in the same memory.
        draft: weights, activations, logits and rows of the model that drafts.
        scratches: what `activations` and `logits` come from, of each stage, where they are
            estimated.
        draft_scratch: the same of the model that drafts.
    """

    source: str
    available: int
    most_kv_cache: int
    runtime: int
    weights: int
    activations: int
    logits: int = 0
    loading: int = 0
    rows: int = 0
    draft: int = 0
    scratches: tuple[Scratch, ...] = ()
    draft_scratch: Scratch | None = None
