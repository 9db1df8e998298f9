"""What a device has for an engine, and what steps take. Without torch: the memory plan reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceMemory:
    """A GPU's memory, measured with the model loaded.

    Attributes:
        total: bytes of the card.
        foreign: in use that the engine did not allocate itself: the CUDA context, libraries, other
            processes.
        weights: held once the model is loaded.
        step: what a step of the largest size takes beside weights and KV cache, at its peak, with
            what captured graphs will hold.
    """

    total: int
    foreign: int
    weights: int
    step: int


@dataclass(frozen=True)
class Scratch:
    """What steps on a CPU hold beside weights, rows and KV cache: found out before loading.

    Attributes:
        activations: bytes of the arena that the forward pass of the largest step fits exactly.
        logits: the same of its logits, with all that they are made from.
        kernels: what the kernels keep for themselves, at most.
    """

    activations: int
    logits: int
    kernels: int
