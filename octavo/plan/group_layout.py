"""Layout of the memory that the ranks of a model share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.layers.step_table import StepSize
from octavo.system.distributed import CACHE_LINE, COUNTER_NBYTES, Rank, aligned

HANDED_SLOTS = 2
"""Number of steps that a stage may be ahead of the next one."""
SLOT_HEAD_NBYTES = CACHE_LINE
"""Size of the head of a stage's output: two numbers, int64. The first is the size of what follows
in bytes, for relays; the second is the size of the errors at its end."""
ERRORS_NBYTES = 4096
"""Most bytes of the errors of a step's requests, as msgpack, after a stage's output."""


@dataclass(frozen=True)
class GroupLayout:
    """Layout: tokens, drafts, outputs and buffers of stages, counts, and memory for the balancing
    of experts, in this order."""

    size: StepSize
    """Size of the largest step."""
    max_num_drafts: int
    """Most drafts of all requests in a step."""
    num_slots: int
    """Number of steps with stored tokens and drafts: one more than can be in flight, so that no
    rank overwrites data that another rank has not read. A rank that begins a step has read the data
    of all steps that were finished when the step was submitted."""
    rank: Rank
    """Any rank of the model."""
    handed_nbytes: int
    """Bytes of a stage's output for one token."""
    buffers: Sequence[int]
    """Bytes of each stage's buffers."""
    balancing: Sequence[int] = ()
    """Bytes of each stage's memory for the balancing of experts, if they are balanced."""

    @property
    def token_numbers(self) -> int:
        """Numbers stored for a step's tokens: a count for each request, and the tokens."""
        return self.size.requests + self.size.samples

    @property
    def draft_numbers(self) -> int:
        """Numbers stored for a step's drafts: a count for each request, and the drafts."""
        return self.size.requests + self.max_num_drafts

    @property
    def tokens(self) -> int:
        """Offset of the tokens."""
        return 0

    @property
    def drafts(self) -> int:
        """Offset of the drafts."""
        return self._ring_nbytes(self.token_numbers)

    @property
    def slot_nbytes(self) -> int:
        """Most bytes of a stage's output of a step, with its head and its errors."""
        output = aligned(self.size.tokens * self.handed_nbytes)
        return SLOT_HEAD_NBYTES + output + ERRORS_NBYTES

    def handed(self, stage: int, index: int) -> int:
        """Return the offset of the output of the rank with an index in a stage."""
        begin = self.drafts + self._ring_nbytes(self.draft_numbers)
        return begin + (stage * self.rank.size + index) * self._channel_nbytes

    def buffers_of(self, stage: int) -> int:
        """Return the offset of a stage's buffers."""
        return self.handed(self.rank.num_stages - 1, 0) + sum(map(aligned, self.buffers[:stage]))

    @property
    def nbytes(self) -> int:
        """Size of the whole memory in bytes."""
        return self.balancing_of(self.rank.num_stages)

    def balancing_of(self, stage: int) -> int:
        """Return the offset of a stage's memory for the balancing of experts."""
        begin = self.expert_counts + self.rank.world_size * CACHE_LINE
        return begin + sum(self.balancing[:stage])

    @property
    def expert_counts(self) -> int:
        """Offset of the counts of expert caches, a cache line of int64 for each rank."""
        return self.buffers_of(self.rank.num_stages)

    @property
    def _channel_nbytes(self) -> int:
        return 2 * COUNTER_NBYTES + HANDED_SLOTS * self.slot_nbytes

    def _ring_nbytes(self, numbers: int) -> int:
        return COUNTER_NBYTES + aligned(8 * numbers * self.num_slots)


@dataclass(frozen=True)
class ExpertGroupLayout:
    """Layout of the counters of engines that divide experts.

    One counter belongs to all ranks, which are the processes of all engines, and four belong to
    each rank. A generation is a set of ranks that step together; see `ExpertGroup`.
    """

    ranks: int
    per_engine: int = 1
    """Number of successive ranks that are an engine's."""

    @property
    def begun(self) -> int:
        """Offset of the number of the last step that a rank has begun in this generation."""
        return 0

    def came(self, rank: int) -> int:
        """Return the offset of the generation that a rank has come to."""
        return (1 + rank) * COUNTER_NBYTES

    def mended(self, rank: int) -> int:
        """Return the offset of the generation for which a rank has mended the barriers."""
        return (1 + self.ranks + rank) * COUNTER_NBYTES

    def arrivals(self, rank: int) -> int:
        """Return the offset of a rank's number of arrivals at the barrier in a generation."""
        return (1 + 2 * self.ranks + rank) * COUNTER_NBYTES

    def steps(self, rank: int) -> int:
        """Return the offset of the number of steps that a rank has begun in a generation."""
        return (1 + 3 * self.ranks + rank) * COUNTER_NBYTES

    @property
    def nbytes(self) -> int:
        """Size of all counters in bytes."""
        return (1 + 4 * self.ranks) * COUNTER_NBYTES

    def behind(self, counters: bytes) -> list[int]:
        """Return the indices of the engines that others wait for.

        Args:
            counters: bytes of the counters; fewer than `nbytes` before an engine has made them.
        """
        if len(counters) < self.nbytes:
            return []

        def progress(rank: int) -> tuple[int, int, int]:
            came, mended = _value(counters, self.came(rank)), _value(counters, self.mended(rank))
            # Until the rank has mended the barriers, its arrivals are of an earlier generation.
            arrivals = _value(counters, self.arrivals(rank)) if came == mended else 0
            return came, mended, arrivals

        first = progress(0)
        # Compare differences, since a counter begins at 0 again after 2**32.
        found = [
            [(n - m + 2**31) % 2**32 for n, m in zip(progress(rank), first, strict=True)]
            for rank in range(self.ranks)
        ]
        late = [rank // self.per_engine for rank, its in enumerate(found) if its < max(found)]
        return list(dict.fromkeys(late))

    def newest_step(self, counters: bytes) -> int:
        """Return the number of the last step that a rank has begun; see `behind`."""
        return max(_value(counters, self.steps(rank)) for rank in range(self.ranks))


def _value(counters: bytes, offset: int) -> int:
    return int.from_bytes(counters[offset : offset + 4], "little")
