"""Memory that processes share, and the barrier in it."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from octavo import _native
from octavo.config import DeviceConfig
from octavo.errors import ConfigError
from octavo.system.distributed import GroupMemory, Rank

CHILD = """
import sys, numpy as np
from octavo.system.distributed import GroupMemory, Rank
memory = GroupMemory(int(sys.argv[1]), 4096, Rank(1, 2))
data = memory.data.view(np.int64)
for step in range(200):
    data[1] = step
    memory.barrier()
    assert data[0] == step, (step, data[0])
    memory.barrier()
"""


@pytest.fixture
def descriptor():
    descriptor = GroupMemory.create(4096)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("n", [1, 7, 64, 100])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_are_all_there_is_once(n, size):
    shares = [Rank(index, size).share(n) for index in range(size)]
    assert [i for begin, end in shares for i in range(begin, end)] == list(range(n))
    assert max(end - begin for begin, end in shares) == shares[0][1]


def test_processes_see_what_others_wrote_before_a_barrier(descriptor):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(descriptor)], pass_fds=[descriptor])
    memory = GroupMemory(descriptor, 4096, Rank(0, 2))
    data = memory.data.view(np.int64)
    try:
        for step in range(200):
            data[0] = step
            memory.barrier()
            assert data[1] == step
            memory.barrier()
        assert child.wait(100) == 0
    finally:
        child.kill()
        child.wait()


def test_who_does_not_come_ends_the_waiting_of_all(descriptor):
    memories = [GroupMemory(descriptor, 4096, Rank(0, 3), timeout=0.2) for _ in range(2)]
    errors = []

    def wait(memory):
        try:
            memory.barrier()
        except _native.GroupError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wait, args=[memory]) for memory in memories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 2
    assert memories[0].broken
    with pytest.raises(_native.GroupError):  # nor later
        memories[0].barrier()


def test_a_broken_group_wakes_who_sleeps(descriptor):
    memory, other = (GroupMemory(descriptor, 4096, Rank(0, 2)) for _ in range(2))
    timer = threading.Timer(0.1, other.break_)
    timer.start()
    with pytest.raises(_native.GroupError, match="another"):
        memory.barrier()
    timer.join()


def test_whoever_has_the_descriptor_ends_the_waiting(descriptor):
    memory = GroupMemory(descriptor, 4096, Rank(0, 2))
    timer = threading.Timer(0.05, GroupMemory.end, [descriptor, 1])
    timer.start()
    with pytest.raises(_native.GroupError, match="another"):
        memory.barrier()
    timer.join()


def test_a_barrier_is_recorded(descriptor):
    memory, plan = GroupMemory(descriptor, 4096, Rank(0, 2), timeout=0.01), _native.Plan()
    plan.begin()
    memory.barrier()
    plan.end()
    assert len(plan) == 1
    with pytest.raises(_native.GroupError):
        plan.run(1, 1, 1)


def test_other_memory_is_refused(descriptor):
    with pytest.raises(ConfigError, match="do not compute the same model"):
        GroupMemory(descriptor, 8192, Rank(0, 2))


def test_processes_are_numbered_stage_by_stage():
    device = DeviceConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    ranks = [Rank.of(number, device) for number in range(6)]
    assert [rank.number for rank in ranks] == list(range(6))
    assert [(rank.stage, rank.index) for rank in ranks] == [
        (s, i) for s in range(3) for i in (0, 1)
    ]
    assert [rank.drafts for rank in ranks] == [True, False, False, False, False, False]
    assert [rank.samples for rank in ranks] == [False, False, False, False, True, False]
    assert Rank(0, 1).drafts
    assert Rank(0, 1).samples


def test_stages_have_barriers_of_their_own_and_break_together():
    descriptor = GroupMemory.create(64, num_stages=20)  # more than a page of barriers
    try:
        first, last = (GroupMemory(descriptor, 64, Rank(0, 1, stage, 20)) for stage in (0, 19))
        first.barrier()
        last.barrier()
        assert first.data.any() == last.data.any() == False  # noqa: E712
        last.break_()
        assert first.broken
        with pytest.raises(_native.GroupError):
            first.barrier()
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("begin", [0, 2**32 - 100, 2**33 - 3])
def test_counters_are_waited_for(descriptor, begin):
    """The test includes the overflow of 32 bits."""
    memory = GroupMemory(descriptor, 4096, Rank(0, 2))
    counter, data = memory.counter(0), memory.data[256:].view(np.int64)
    counter.post(begin)
    seen = []

    def follow():
        own = GroupMemory(descriptor, 4096, Rank(1, 2)).counter(0)
        for value in range(begin + 1, begin + 201):
            own.wait(value)
            seen.append(int(data[value % 256]) == value)

    thread = threading.Thread(target=follow)
    thread.start()
    for value in range(begin + 1, begin + 201):
        data[value % 256] = value
        counter.post(value)
        if value % 50 == 0:
            time.sleep(0.002)  # it sleeps meanwhile
    thread.join(60)
    assert seen == [True] * 200
    assert counter.reached(begin + 200)
    assert not counter.reached(begin + 201)


def test_a_broken_group_wakes_who_waits_for_a_counter(descriptor):
    memory, other = (GroupMemory(descriptor, 4096, Rank(i, 2)) for i in range(2))
    timer = threading.Timer(0.05, other.break_)
    timer.start()
    with pytest.raises(_native.GroupError, match="another"):
        memory.counter(128).wait(1)
    timer.join()
