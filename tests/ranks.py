"""Ranks of a group as threads of this process, for tests."""

import os
from dataclasses import replace

import msgspec

from octavo.engine.assemble import make_engine_core
from octavo.executor.base import Executor
from octavo.executor.uniproc import UniProcExecutor
from octavo.frontend import llm_engine
from octavo.system.distributed import GroupMemory, Rank


class _Step:
    def __init__(self, handles, teller):
        self.handles, self.teller = handles, teller

    def drafts(self):
        return self.handles[self.teller].drafts()

    def sample(self, grammar=None):
        futures = [handle.sample(grammar) for handle in self.handles]
        return futures[self.teller]


class RanksExecutor(Executor):
    """Executor with a `UniProcExecutor` for each rank; all receive the same steps."""

    def __init__(self, setup, platform):
        size, stages = setup.rank.size, setup.rank.num_stages
        self.num_stages = stages
        self.descriptors = self.open_memories(setup)
        ranks = [Rank.of(number, setup.config.device) for number in range(size * stages)]
        self.ranks = [
            UniProcExecutor(replace(setup, rank=rank, group=self.descriptors[rank.stage]), platform)
            for rank in ranks
        ]
        (self.teller,) = (rank.number for rank in ranks if rank.samples)
        self.max_in_flight = self.ranks[0].max_in_flight

    def open_memories(self, setup):
        """Return the descriptor of each stage's memory."""
        return [GroupMemory.create(setup.group_nbytes, self.num_stages)] * self.num_stages

    def measure_memory(self):
        raise NotImplementedError

    def initialize_kv_cache(self, kv_cache):
        for rank in self.ranks:
            rank.initialize_kv_cache(kv_cache)

    def register_transfer_callback(self, callback):
        for rank in self.ranks:
            rank.register_transfer_callback(callback)

    def register_adapter_callback(self, callback):
        for rank in self.ranks:
            rank.register_adapter_callback(callback)

    def execute(self, work):
        return _Step([rank.execute(work) for rank in self.ranks], self.teller)

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        calls = [rank.collective_rpc(method, timeout, args, kwargs) for rank in self.ranks]
        return [result for results in calls for result in results]

    def shutdown(self):
        for descriptor in self.descriptors:
            GroupMemory.end(descriptor, self.num_stages)
        for rank in self.ranks:
            rank.shutdown()
        for descriptor in {*self.descriptors}:
            os.close(descriptor)
        self.descriptors = []


def use_ranks(
    monkeypatch,
    size,
    stages=1,
    layers=None,
    mode="exact",
    splits_rows=False,
    splits_experts=False,
    executor=RanksExecutor,
):
    """Run every later engine in the given numbers of ranks and stages."""

    def make(config, *args, **kwargs):
        device = msgspec.structs.replace(
            config.device,
            tensor_parallel_size=size,
            pipeline_parallel_size=stages,
            pipeline_layers=layers,
            tensor_parallel_mode=mode,
            enable_sequence_parallel=splits_rows,
            enable_expert_parallel=splits_experts,
        )
        config = msgspec.structs.replace(config, device=device)
        return make_engine_core(config, *args, make_executor=executor, **kwargs)

    monkeypatch.setattr(llm_engine, "make_engine_core", make)
