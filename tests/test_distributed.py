"""Memory that processes share, and the barrier in it."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from octavo import _native
from octavo.distributed import GroupMemory, Rank
from octavo.errors import ConfigError

CHILD = """
import sys, numpy as np
from octavo.distributed import GroupMemory
memory = GroupMemory(int(sys.argv[1]), 4096, 2)
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
    memory = GroupMemory(descriptor, 4096, 2)
    data = memory.data.view(np.int64)
    try:
        for step in range(200):
            data[0] = step
            memory.barrier()
            assert data[1] == step
            memory.barrier()
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.wait()


def test_who_does_not_come_ends_the_waiting_of_all(descriptor):
    memories = [GroupMemory(descriptor, 4096, 3, timeout=0.2) for _ in range(2)]
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
        thread.join(10)
    assert len(errors) == 2
    assert memories[0].broken
    with pytest.raises(_native.GroupError):  # nor later
        memories[0].barrier()


def test_a_broken_group_wakes_who_sleeps(descriptor):
    memory, other = (GroupMemory(descriptor, 4096, 2) for _ in range(2))
    timer = threading.Timer(0.1, other.break_)
    timer.start()
    start = time.monotonic()
    with pytest.raises(_native.GroupError, match="another"):
        memory.barrier()
    assert time.monotonic() - start < 10
    timer.join()


def test_a_barrier_is_recorded(descriptor):
    memory, plan = GroupMemory(descriptor, 4096, 2, timeout=0.01), _native.Plan()
    plan.begin()
    memory.barrier()
    plan.end()
    assert len(plan) == 1
    with pytest.raises(_native.GroupError):
        plan.run(1, 1, 1)


def test_other_memory_is_refused(descriptor):
    with pytest.raises(ConfigError, match="do not compute the same model"):
        GroupMemory(descriptor, 8192, 2)
