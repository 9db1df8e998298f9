"""Broadcast of sampled tokens and of drafts to all ranks of a model, through shared memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from octavo.plan.group_layout import GroupLayout
from octavo.system.distributed import COUNTER_NBYTES, GroupMemory

LongArray = npt.NDArray[np.int64]


class _Ring:
    """Two rows of numbers for each of the last steps; one rank writes, all others read."""

    def __init__(
        self, memory: GroupMemory, begin: int, num_slots: int, first: int, numbers: int
    ) -> None:
        self._counter = memory.counter(begin)
        begin += COUNTER_NBYTES
        data = memory.data[begin : begin + 8 * num_slots * numbers].view(np.int64)
        self._slots, self._first = data.reshape(num_slots, numbers), first

    def slot(self, step: int) -> tuple[LongArray, LongArray]:
        """Return the rows of a step."""
        slot = self._slots[step % len(self._slots)]
        return slot[: self._first], slot[self._first :]

    def post(self, step: int) -> None:
        """Mark the rows of a step as written."""
        self._counter.post(step)

    def reached(self, step: int) -> bool:
        """Return True if the rows of a step are written."""
        return self._counter.reached(step)

    def wait(self, step: int) -> None:
        """Wait until the rows of a step are written."""
        self._counter.wait(step)


class TokenBroadcast:
    """Sampled tokens and drafts of the last steps. Steps are numbered from 1.

    Args:
        memory: memory of all ranks.
        layout: its layout.

    Raises:
        GroupError: in all methods that wait; see `GroupMemory.barrier`.
    """

    def __init__(self, memory: GroupMemory, layout: GroupLayout) -> None:
        slots, requests = layout.num_slots, layout.size.requests
        self._tokens = _Ring(memory, layout.tokens, slots, requests, layout.token_numbers)
        self._drafts = _Ring(memory, layout.drafts, slots, requests, layout.draft_numbers)

    def post_tokens(self, step: int, tokens: LongArray, kept: LongArray) -> None:
        """Write a step's tokens, int64 [sum of kept]: `kept` for each request that sampled."""
        counts, numbers = self._tokens.slot(step)
        counts[: len(kept)] = kept
        numbers[: len(tokens)] = tokens
        self._tokens.post(step)

    def has_tokens(self, step: int) -> bool:
        """Return True if `read_tokens` will not wait."""
        return self._tokens.reached(step)

    def read_tokens(self, step: int, num_sampling: int) -> tuple[LongArray, LongArray]:
        """Return a step's tokens and `kept`; wait for them.

        Args:
            step: a step that samples.
            num_sampling: number of its requests that sample.
        """
        self._tokens.wait(step)
        counts, numbers = self._tokens.slot(step)
        kept = counts[:num_sampling].copy()
        return numbers[: kept.sum()].copy(), kept

    def post_drafts(
        self, step: int, req_ids: Sequence[str], drafts: Mapping[str, Sequence[int]]
    ) -> None:
        """Write the drafts of the requests of a step that begins."""
        counts, numbers = self._drafts.slot(step)
        at = 0
        for i, req_id in enumerate(req_ids):
            tokens = drafts.get(req_id, ())
            counts[i] = len(tokens)
            numbers[at : at + len(tokens)] = tokens
            at += len(tokens)
        self._drafts.post(step)

    def read_drafts(self, step: int, req_ids: Sequence[str]) -> dict[str, list[int]]:
        """Return the drafts of the requests of a step that begins; wait for them."""
        self._drafts.wait(step)
        counts, numbers = self._drafts.slot(step)
        drafts: dict[str, list[int]] = {}
        at = 0
        for req_id, count in zip(req_ids, counts.tolist(), strict=False):
            if count:
                drafts[req_id] = numbers[at : at + count].tolist()
                at += count
        return drafts
