"""Where in their memory the ranks of a model find what they share. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.layers.step_table import StepSize
from octavo.system.distributed import COUNTER_NBYTES, Rank

_ALIGNMENT = 64  # a cache line; all that is in the memory begins at one
HANDED_SLOTS = 2
"""How far a stage may be ahead of the next one, in steps."""
SLOT_HEAD_NBYTES = _ALIGNMENT
"""What a stage hands on begins with its size in bytes, int64: a relay sends no more than that."""


@dataclass(frozen=True)
class GroupLayout:
    """Tokens, drafts, what stages hand on, and the buffers of each stage, in this order."""

    size: StepSize
    """Of the largest step."""
    max_num_drafts: int
    """Of all requests in a step."""
    num_slots: int
    """Steps of which tokens and drafts are there: one more than can be in flight, so that none is
    overwritten that somebody has not read. Who begins a step has read what belongs to those whose
    results were there when it was handed in."""
    rank: Rank
    """One of them."""
    handed_nbytes: int
    """What a stage hands to the next one, of a token."""
    buffers: Sequence[int]
    """Bytes of each stage's."""

    @property
    def token_numbers(self) -> int:
        """Of a step: how many tokens each request got, and these."""
        return self.size.requests + self.size.samples

    @property
    def draft_numbers(self) -> int:
        """Of a step: how many drafts each request has, and these."""
        return self.size.requests + self.max_num_drafts

    @property
    def tokens(self) -> int:
        """The first byte of the tokens."""
        return 0

    @property
    def drafts(self) -> int:
        """That of the drafts."""
        return self._ring_nbytes(self.token_numbers)

    @property
    def slot_nbytes(self) -> int:
        """What a stage hands on in a step, at most."""
        return SLOT_HEAD_NBYTES + _aligned(self.size.tokens * self.handed_nbytes)

    def handed(self, stage: int, index: int) -> int:
        """The first byte of what the rank of that index in a stage hands on."""
        begin = self.drafts + self._ring_nbytes(self.draft_numbers)
        return begin + (stage * self.rank.size + index) * self._channel_nbytes

    def buffers_of(self, stage: int) -> int:
        """The first byte of a stage's buffers."""
        return self.handed(self.rank.num_stages - 1, 0) + sum(map(_aligned, self.buffers[:stage]))

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.buffers_of(self.rank.num_stages)

    @property
    def _channel_nbytes(self) -> int:
        return 2 * COUNTER_NBYTES + HANDED_SLOTS * self.slot_nbytes

    def _ring_nbytes(self, numbers: int) -> int:
        return COUNTER_NBYTES + _aligned(8 * numbers * self.num_slots)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
