"""What a device has for an engine. Imports no torch, so that the memory plan can read it."""

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
