"""What the other ranks of a group must know that only rank 0 does: it samples and drafts.

They learn it when the next step begins, in the memory of the group. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from octavo.distributed import GroupMemory
from octavo.worker.step_table import StepSize

_ALIGNMENT = 64  # a cache line; what follows in the memory begins at one
LongArray = npt.NDArray[np.int64]


def news_nbytes(size: StepSize, max_num_drafts: int) -> int:
    """Bytes that they take, for the largest step."""
    numbers = 2 * size.requests + size.samples + max_num_drafts
    return -(-8 * numbers // _ALIGNMENT) * _ALIGNMENT


class News:
    """Tokens that the last step sampled, and drafts of the one that begins.

    Rank 0 writes them and the others read them behind the barrier of a step's beginning; they are
    written again only behind those of the step itself.

    Args:
        memory: of the group; these are at its beginning.
        size: of the largest step.
        max_num_drafts: of all requests in a step.
    """

    def __init__(self, memory: GroupMemory, size: StepSize, max_num_drafts: int) -> None:
        self.memory = memory
        lengths = size.requests, size.samples, size.requests, max_num_drafts
        numbers = memory.data[: 8 * sum(lengths)].view(np.int64)
        # By request that sampled; the tokens of all; by request of the step; the drafts of all.
        self._kept, self._tokens, self._counts, self._drafts = np.split(
            numbers, np.cumsum(lengths)[:-1]
        )

    def note_tokens(self, tokens: LongArray, kept: LongArray) -> None:
        """Rank 0: what a step sampled, int64 [sum of kept], so many for each request that did."""
        self._kept[: len(kept)] = kept
        self._tokens[: len(tokens)] = tokens

    def publish(self, req_ids: Sequence[str], drafts: Mapping[str, Sequence[int]]) -> None:
        """Rank 0: the drafts of the requests of a step that begins; waits until all begin it."""
        at = 0
        for i, req_id in enumerate(req_ids):
            tokens = drafts.get(req_id, ())
            self._counts[i] = len(tokens)
            self._drafts[at : at + len(tokens)] = tokens
            at += len(tokens)
        self.memory.barrier()

    def receive(
        self, num_sampling: int, req_ids: Sequence[str]
    ) -> tuple[LongArray, LongArray, dict[str, list[int]]]:
        """The others: waits for what rank 0 knows.

        Args:
            num_sampling: requests of the last step that sampled.
            req_ids: of the step that begins.

        Returns:
            Tokens and kept as in `note_tokens`, and the drafts.
        """
        self.memory.barrier()
        kept = self._kept[:num_sampling].copy()
        drafts: dict[str, list[int]] = {}
        at = 0
        for req_id, count in zip(req_ids, self._counts.tolist(), strict=False):
            if count:
                drafts[req_id] = self._drafts[at : at + count].tolist()
                at += count
        return self._tokens[: kept.sum()].copy(), kept, drafts
