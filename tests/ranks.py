"""Ranks of a group as threads of this process, for tests."""

import os
from dataclasses import replace

import msgspec

from octavo.distributed import GroupMemory, Rank
from octavo.engine import llm_engine
from octavo.engine.assemble import make_engine_core
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

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        calls = [rank.collective_rpc(method, timeout, args, kwargs) for rank in self.ranks]
        return [result for results in calls for result in results]

    def shutdown(self):
        for rank in self.ranks:
            rank.shutdown()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def use_ranks(monkeypatch, size):
    """Has every engine from now on computed by so many ranks."""

    def make(config, *args, **kwargs):
        device = msgspec.structs.replace(config.device, tensor_parallel_size=size)
        config = msgspec.structs.replace(config, device=device)
        return make_engine_core(config, *args, make_executor=RanksExecutor, **kwargs)

    monkeypatch.setattr(llm_engine, "make_engine_core", make)
