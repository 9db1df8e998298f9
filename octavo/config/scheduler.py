"""Settings of the scheduler."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from octavo.config.section import PositiveInt, Section


class SchedulerConfig(Section, frozen=True):
    """Choice of the requests of each step, and of their numbers of tokens."""

    max_num_batched_tokens: Annotated[
        PositiveInt | None,
        Meta(
            description="Maximum number of tokens per step; default: 512 in a server, 8192 offline."
        ),
    ] = None
    max_num_seqs: Annotated[
        int, Meta(description="Maximum number of requests that run concurrently.", ge=1, le=4096)
    ] = 256
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        Meta(description="Order of requests: by arrival, or by priority and then arrival."),
    ] = "fcfs"
    enable_chunked_prefill: Annotated[
        bool, Meta(description="Split long prompts across several steps.")
    ] = True
    long_prefill_token_threshold: Annotated[
        int,
        Meta(
            description="Maximum number of prompt tokens of one request per step; 0: no limit.",
            ge=0,
        ),
    ] = 0
    preemption_mode: Annotated[
        Literal["auto", "swap", "recompute"],
        Meta(
            description="Restoration of the KV cache of preempted requests, with"
            " kv_transfer_config. swap: load it from the connector; recompute: compute it again;"
            " auto: the method that has been faster so far."
        ),
    ] = "auto"
    async_scheduling: Annotated[
        bool, Meta(description="Schedule the next step while the current one runs.")
    ] = True
