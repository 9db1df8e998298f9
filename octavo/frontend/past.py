"""Recent past of an engine, from which a simulation tells what other settings had changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from octavo.config import EngineConfig
from octavo.models.spec import ModelSpec
from octavo.observability.steps import StepRecord

MOST_SECONDS = 60.0
"""Seconds of steps before the end of a request that are simulated at most."""
SECONDS_BEFORE = 10.0
"""Seconds of them before its arrival."""


@dataclass(frozen=True)
class Past:
    """Steps of one engine, and what a simulation needs to know about it.

    Attributes:
        config: the engine's settings.
        spec: the model.
        num_blocks: number of blocks of its KV cache.
        max_model_len: maximum tokens of a request.
        max_num_batched_tokens: token budget of a step.
        steps: the steps in order.
        core_id: the request in question.
    """

    config: EngineConfig
    spec: ModelSpec
    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    steps: Sequence[StepRecord]
    core_id: str


WhatIf: TypeAlias = Callable[[Past, Sequence[str]], Mapping[str, float]]
"""Function from a past and names of settings to the seconds that twice their values would have
saved; a setting is missing if no estimate is possible. It may take a second."""
