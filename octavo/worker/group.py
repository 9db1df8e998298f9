"""A worker's place among the ranks that compute one model together."""

from __future__ import annotations

import torch

from octavo.distributed import GroupMemory
from octavo.layers.shared import SharedBuffers
from octavo.worker.news import News, news_nbytes
from octavo.worker.setup import WorkerSetup


def make_buffers(setup: WorkerSetup) -> SharedBuffers | None:
    """What the blocks of a rank's part reserve their buffers in; None: there is one rank only."""
    if setup.rank.size == 1:
        return None
    tokens, samples = setup.max_num_batched_tokens, setup.largest_step.samples
    names = "heads", "mixer", "inner", "feed_forward", "all_q", "all_k"
    most_rows = dict.fromkeys(names, tokens)
    most_rows |= {"logits": samples, "prompt_logits": setup.prompt_logprobs_rows}
    return SharedBuffers(setup.rank, most_rows, getattr(torch, setup.dtype))


class Group:
    """What ranks share.

    Args:
        setup: has rank and descriptor.
        buffers: of the model that has been built.

    Raises:
        ConfigError: the others do not compute the same model.
    """

    def __init__(self, setup: WorkerSetup, buffers: SharedBuffers) -> None:
        assert setup.group is not None, "the executor has made no memory for the group"
        size, drafts = setup.largest_step, setup.max_num_drafts
        self.memory = GroupMemory(setup.group, setup.group_nbytes, setup.rank.size)
        self.news = News(self.memory, size, drafts)
        buffers.attach(self.memory, news_nbytes(size, drafts))
