"""State and counters of the scheduler, and their Prometheus metrics."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec


class SchedulerStats(msgspec.Struct, array_like=True):
    """State and counters of the scheduler; counters never decrease."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    """Share of KV blocks that live requests hold, 0 to 1."""
    num_used_blocks: int = 0
    num_total_blocks: int = 0
    prefix_cache_queries: int = 0
    """Number of tokens looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Number of tokens found in the prefix cache."""
    num_preemptions: int = 0
    num_steps: int = 0
    """Steps executed since start."""
    num_scheduled_tokens: int = 0
    """Tokens computed since start."""
    num_drafts: int = 0
    """Times that a request had drafts in a step."""
    num_draft_tokens: int = 0
    """Drafts verified."""
    num_accepted_tokens_per_pos: list[int] = []
    """Number of accepted drafts, by their place after the last known token."""
    num_held_reqs: int = 0
    """Number of waiting requests that wait for something other than their turn, such as their
    grammar."""
    external_prefix_cache_queries: int = 0
    """Tokens looked up with the KV connector, after the prefix cache."""
    external_prefix_cache_hits: int = 0
    """Number of tokens found by the KV connector."""
    num_failed_loads: int = 0
    """Number of requests with blocks that could not be loaded."""
    num_expired_transfers: int = 0
    """Number of requests with blocks that no engine fetched in time."""
    num_snapshots: int = 0
    """Number of recurrent states that the prefix cache keeps."""
    num_snapshot_evictions: int = 0
    """Number of these given up for other states."""
    drafting_paused: int = 0
    """1 while drafts do not pay at the current load; for several engines, the number of these."""
    num_experts: int = 0
    """Most experts of a layer; 0 without experts, or if they are not counted."""
    expert_tokens: list[int] = []
    """Choices of all experts of a layer together, by layer; 0 for a layer without experts."""
    most_expert_tokens: list[int] = []
    """Choices of the most chosen expert of each layer."""
    num_expert_rearrangements: int = 0
    """Number of changes of the place of a layer's experts, to balance the loads of processes."""
    mean_process_tokens: float = 0.0
    """Mean of the choices that a process computes, summed over all layers, in the last window of
    the balancing."""
    most_process_tokens: float = 0.0
    """Largest number of these choices of a process in each layer, summed over all layers."""

    expert_cache_hits: int = 0
    """Experts that a layer used and found in memory."""
    expert_cache_misses: int = 0
    """Experts that a layer used and waited for, since they were read from the file."""
    expert_cache_bytes_read: int = 0
    """Bytes of the experts that were read."""
    expert_cache_fetched_ahead: int = 0
    """Experts that were read, or partly read, before a layer asked for them."""
    expert_cache_fetched_ahead_used: int = 0
    """Those of them that the layer used then."""
    num_encoder_cache_rows: int = 0
    """Number of rows that the encoder cache holds; 0: the model has no encoder."""
    num_used_encoder_cache_rows: int = 0
    """Number of these that requests use."""
    mm_cache_queries: int = 0
    """Number of items, such as pictures, that steps needed."""
    mm_cache_hits: int = 0
    """Number of these with rows in the encoder cache."""

    @property
    def num_ready_reqs(self) -> int:
        """Number of waiting requests that wait only for their turn."""
        return self.num_waiting_reqs - self.num_held_reqs

    @property
    def encoder_cache_usage(self) -> float:
        """Share of the rows of the encoder cache that requests use, 0 to 1."""
        rows = self.num_encoder_cache_rows
        return self.num_used_encoder_cache_rows / rows if rows else 0.0

    @property
    def num_accepted_tokens(self) -> int:
        """Number of accepted drafts."""
        return sum(self.accepted_tokens_by_position)

    @property
    def accepted_tokens_by_position(self) -> list[int]:
        """Number of accepted drafts by their place; empty before the first draft."""
        return self.num_accepted_tokens_per_pos if self.num_drafts else []

    @property
    def expert_max_shares(self) -> list[float]:
        """Share of the most chosen expert in the choices of each layer; 0 without choices."""
        pairs = zip(self.most_expert_tokens, self.expert_tokens, strict=True)
        return [most / tokens if tokens else 0.0 for most, tokens in pairs]

    @property
    def expert_balancedness(self) -> list[float]:
        """Mean of the experts' loads over the largest load of each layer: 1 is perfect."""
        return [
            1 / (share * self.num_experts) if share else 0.0 for share in self.expert_max_shares
        ]

    @property
    def eplb_balancedness(self) -> float:
        """Mean load of a process over the largest one: 1 is perfect; 0 if it is unknown."""
        most = self.most_process_tokens
        return self.mean_process_tokens / most if most else 0.0

    @staticmethod
    def join(parts: Sequence[SchedulerStats]) -> SchedulerStats:
        """Return the stats of several engines as if they were one."""
        total = SchedulerStats()
        for name in SchedulerStats.__struct_fields__:
            values = [getattr(part, name) for part in parts]
            if isinstance(values[0], list):
                columns = itertools.zip_longest(*values, fillvalue=0)
                setattr(total, name, [sum(column) for column in columns])
            elif name == "num_experts":
                total.num_experts = max(values)
            else:
                setattr(total, name, sum(values))
        if total.num_total_blocks:
            total.kv_cache_usage = total.num_used_blocks / total.num_total_blocks
        return total


class SchedulerMetric(NamedTuple):
    """Prometheus metric with a value from `SchedulerStats`."""

    kind: Literal["counter", "gauge"]
    name: str
    help: str
    field: str
    """Attribute of `SchedulerStats`."""
    labels: Mapping[str, str] = {}
    """Labels in addition to those of every metric. For a list, the label with an empty value gets
    the index of each item."""


SCHEDULER_METRICS = (
    SchedulerMetric(
        "gauge", "num_requests_running", "Requests that are being computed.", "num_running_reqs"
    ),
    SchedulerMetric(
        "gauge", "num_requests_waiting", "Requests that wait to be computed.", "num_waiting_reqs"
    ),
    SchedulerMetric(
        "gauge",
        "num_requests_waiting_by_reason",
        "Requests that wait for their turn (capacity) or for something else (deferred).",
        "num_ready_reqs",
        {"reason": "capacity"},
    ),
    SchedulerMetric(
        "gauge", "num_requests_waiting_by_reason", "", "num_held_reqs", {"reason": "deferred"}
    ),
    SchedulerMetric(
        "gauge",
        "kv_cache_usage_perc",
        "Share of the KV cache in use; 1 is all of it.",
        "kv_cache_usage",
    ),
    SchedulerMetric(
        "counter",
        "prefix_cache_queries",
        "Tokens looked up in the prefix cache.",
        "prefix_cache_queries",
    ),
    SchedulerMetric(
        "counter", "prefix_cache_hits", "Tokens found in the prefix cache.", "prefix_cache_hits"
    ),
    SchedulerMetric(
        "counter",
        "prompt_tokens_cached_by_source",
        "Tokens found in the prefix cache, by its location.",
        "prefix_cache_hits",
        {"source": "device"},
    ),
    SchedulerMetric(
        "gauge",
        "encoder_cache_usage_perc",
        "Share of the encoder cache in use; 1 is all of it.",
        "encoder_cache_usage",
    ),
    SchedulerMetric(
        "counter",
        "mm_cache_queries",
        "Pictures and sounds looked up in the encoder cache.",
        "mm_cache_queries",
    ),
    SchedulerMetric(
        "counter",
        "mm_cache_hits",
        "Pictures and sounds found in the encoder cache.",
        "mm_cache_hits",
    ),
    SchedulerMetric(
        "gauge",
        "state_snapshots",
        "Recurrent states that the prefix cache keeps.",
        "num_snapshots",
    ),
    SchedulerMetric(
        "counter",
        "state_snapshot_evictions",
        "Recurrent states that the prefix cache gave up for others.",
        "num_snapshot_evictions",
    ),
    SchedulerMetric(
        "counter",
        "expert_cache_hits",
        "Experts that a step used in a layer and found in memory (expert_cache).",
        "expert_cache_hits",
    ),
    SchedulerMetric(
        "counter",
        "expert_cache_misses",
        "Experts that a step used in a layer and waited for: they were read from the disk"
        " (expert_cache).",
        "expert_cache_misses",
    ),
    SchedulerMetric(
        "counter",
        "expert_cache_read_bytes",
        "Bytes of experts that were read from the disk (expert_cache).",
        "expert_cache_bytes_read",
    ),
    SchedulerMetric(
        "counter",
        "expert_cache_fetched_ahead",
        "Experts that were fetched before their layer needed them, by a guess (expert_cache).",
        "expert_cache_fetched_ahead",
    ),
    SchedulerMetric(
        "counter",
        "expert_cache_fetched_ahead_used",
        "Experts that were fetched ahead and that their layer used then (expert_cache).",
        "expert_cache_fetched_ahead_used",
    ),
    SchedulerMetric(
        "counter", "num_preemptions", "Preemptions of running requests.", "num_preemptions"
    ),
    SchedulerMetric(
        "counter",
        "external_prefix_cache_queries",
        "Tokens looked up with the KV connector, after the prefix cache.",
        "external_prefix_cache_queries",
    ),
    SchedulerMetric(
        "counter",
        "external_prefix_cache_hits",
        "Tokens found by the KV connector.",
        "external_prefix_cache_hits",
    ),
    SchedulerMetric(
        "counter",
        "kv_failed_loads",
        "Requests with KV blocks that could not be loaded.",
        "num_failed_loads",
    ),
    SchedulerMetric(
        "counter",
        "kv_expired_reqs",
        "Requests with KV blocks that no engine fetched in time.",
        "num_expired_transfers",
    ),
    SchedulerMetric(
        "counter", "spec_decode_num_drafts", "Times that tokens were drafted.", "num_drafts"
    ),
    SchedulerMetric(
        "counter", "spec_decode_num_draft_tokens", "Tokens drafted.", "num_draft_tokens"
    ),
    SchedulerMetric(
        "counter",
        "spec_decode_num_accepted_tokens",
        "Accepted drafts.",
        "num_accepted_tokens",
    ),
    SchedulerMetric(
        "counter",
        "spec_decode_num_accepted_tokens_per_pos",
        "Accepted drafts, by their place in the draft.",
        "accepted_tokens_by_position",
        {"position": ""},
    ),
    SchedulerMetric(
        "gauge",
        "spec_decode_drafting_paused",
        "1 while drafting is paused because it does not pay at this load.",
        "drafting_paused",
    ),
    SchedulerMetric(
        "counter",
        "expert_tokens",
        "Choices of the experts of a layer by tokens.",
        "expert_tokens",
        {"layer": ""},
    ),
    SchedulerMetric(
        "gauge",
        "expert_max_share",
        "Share of the most chosen expert in all choices of a layer since the start.",
        "expert_max_shares",
        {"layer": ""},
    ),
    SchedulerMetric(
        "gauge",
        "expert_balancedness",
        "Mean of the experts' loads over the largest one of a layer since the start.",
        "expert_balancedness",
        {"layer": ""},
    ),
    SchedulerMetric(
        "gauge",
        "eplb_balancedness",
        "Mean load of a process over the largest one, in the last window of enable_eplb.",
        "eplb_balancedness",
    ),
    SchedulerMetric(
        "counter",
        "eplb_rearrangements",
        "Changes of the place of a layer's experts by enable_eplb.",
        "num_expert_rearrangements",
    ),
)
"""Metrics of the scheduler; a new one needs a field of `SchedulerStats` and a row here."""
