"""Messages between ranks."""

import os
import threading

import numpy as np
import pytest

from octavo.layers.step_table import StepSize
from octavo.plan.group_layout import GroupLayout
from octavo.system.distributed import GroupMemory, Rank
from octavo.worker.token_broadcast import TokenBroadcast


@pytest.fixture
def two():
    layout = GroupLayout(StepSize(8, 4, 6), 5, 3, Rank(0, 2), 0, [0])
    descriptor = GroupMemory.create(layout.nbytes)
    yield [
        TokenBroadcast(GroupMemory(descriptor, layout.nbytes, Rank(i, 2)), layout) for i in range(2)
    ]
    os.close(descriptor)


def test_tokens_and_drafts_of_many_steps(two):
    one, other = two
    for step in range(1, 50):
        kept = np.array([1, 2, 1][: 1 + step % 3])
        tokens = np.arange(kept.sum()) + 10 * step
        assert not other.has_tokens(step)
        one.post_tokens(step, tokens, kept)
        drafts = {"b": [step, 2], "d": [3]} if step % 2 else {}
        one.post_drafts(step, ["a", "b", "c", "d"], drafts)
        assert other.has_tokens(step)
        got = other.read_tokens(step, len(kept))
        assert [array.tolist() for array in got] == [tokens.tolist(), kept.tolist()]
        assert other.read_drafts(step, ["a", "b", "c", "d"]) == drafts


def test_what_is_not_there_is_waited_for(two):
    one, other = two
    got = []
    thread = threading.Thread(target=lambda: got.append(other.read_tokens(7, 1)[0].tolist()))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    one.post_tokens(7, np.array([42]), np.array([1]))
    thread.join(60)
    assert got == [[42]]
