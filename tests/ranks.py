"""Ranks of a group as threads of this process, or as processes, for tests."""

import os
import pickle
import subprocess
import sys
import threading
from dataclasses import replace

from octavo.distributed import GroupMemory, Rank
from octavo.executor.base import Executor
from octavo.executor.uniproc import UniProcExecutor


class _Step:
    def __init__(self, handles):
        self.handles = handles

    def drafts(self):
        return self.handles[0].drafts()

    def sample(self, grammar=None):
        futures = [handle.sample(grammar) for handle in self.handles]
        return futures[0]


class RanksExecutor(Executor):
    """A `UniProcExecutor` for each rank; all are given the same steps."""

    def __init__(self, setup, platform):
        self.descriptor = GroupMemory.create(setup.group_nbytes)
        size = setup.rank.size
        self.ranks = [
            UniProcExecutor(replace(setup, rank=Rank(index, size), group=self.descriptor), platform)
            for index in range(size)
        ]
        self.max_in_flight = self.ranks[0].max_in_flight

    def measure_memory(self):
        raise NotImplementedError

    def initialize_kv_cache(self, kv_cache):
        for rank in self.ranks:
            rank.initialize_kv_cache(kv_cache)

    def execute(self, work):
        return _Step([rank.execute(work) for rank in self.ranks])

    def collective_rpc(self, call, timeout=None):
        return [result for rank in self.ranks for result in rank.collective_rpc(call, timeout)]

    def shutdown(self):
        for rank in self.ranks:
            rank.shutdown()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


_FOLLOWER = """
import pickle, sys
from octavo.platforms.cpu import CPUPlatform
from octavo.worker.worker import Worker
load = lambda: pickle.load(sys.stdin.buffer)
worker = Worker(load(), CPUPlatform())
worker.initialize_kv_cache(load())
while True:
    try:
        work = load()
    except EOFError:
        break
    worker.execute_model(work, lambda drafts: None)
    worker.sample_tokens()
"""


class ProcessesExecutor(UniProcExecutor):
    """Rank 0 in this process; each of the others in one that gets the same steps by a pipe.

    When one of these ends, the group is broken.
    """

    def __init__(self, setup, platform):
        self.descriptor = GroupMemory.create(setup.group_nbytes)
        self.memory = GroupMemory(self.descriptor, setup.group_nbytes, setup.rank.size)
        self.followers = []
        for index in range(1, setup.rank.size):
            process = subprocess.Popen(
                [sys.executable, "-c", _FOLLOWER],
                stdin=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[self.descriptor],
            )
            self.followers.append(process)
            rank = replace(setup, rank=Rank(index, setup.rank.size), group=self.descriptor)
            self._send(process, rank)
            threading.Thread(target=self._watch, args=[process], daemon=True).start()
        super().__init__(replace(setup, group=self.descriptor), platform)

    def _watch(self, process):
        process.wait()
        self.memory.break_()

    def _send(self, process, message):
        try:
            pickle.dump(message, process.stdin)
            process.stdin.flush()
        except BrokenPipeError:
            self.memory.break_()

    def initialize_kv_cache(self, kv_cache):
        for process in self.followers:
            self._send(process, kv_cache)
        super().initialize_kv_cache(kv_cache)

    def execute(self, work):
        for process in self.followers:
            self._send(process, work)
        return super().execute(work)

    def shutdown(self):
        for process in self.followers:
            process.stdin.close()
            process.wait(30)
        super().shutdown()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
