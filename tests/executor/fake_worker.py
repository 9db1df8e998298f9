"""Workers for separate processes; the ids of a step's requests name their actions."""

import logging
import os
import time

from octavo.errors import (
    ConfigError,
    EngineDeadError,
    EngineStoppedError,
    ModelError,
    StepLostError,
)
from octavo.messages import ModelRunnerOutput
from octavo.plan.memory import MemoryBudget, MemoryItem


class Pending:
    def __init__(self, output, ready):
        self._output, self._ready = output, ready

    def ready(self):
        return self._ready

    def get(self):
        if not self._ready:
            time.sleep(0.2)
        return self._output


class FakeWorker:
    def __init__(self, setup, platform):
        self.setup, self.platform = setup, platform
        self.events = []

    def execute_model(self, work, announce):
        ids = [request.req_id for request in work.scheduled_reqs]
        self.events.append(["execute", work.total_num_scheduled_tokens, ids])
        self.work, rank = work, self.setup.rank.index
        if "fail early" in ids:
            raise ValueError("no drafts")
        announce({r.req_id: [7] * r.num_drafts for r in work.scheduled_reqs if r.num_drafts})
        if "fail" in ids or f"fail {rank}" in ids:
            raise ValueError("the forward pass broke")
        if "lost device" in ids:
            raise RuntimeError("illegal memory access")
        if "lost" in ids:
            raise StepLostError("an engine died")
        if f"ends {rank}" in ids:
            raise EngineStoppedError("an engine died")
        if "memory" in ids:
            raise MemoryError("no more")
        if f"exit {rank}" in ids:
            os._exit(3)
        if "wait" in ids:
            time.sleep(60)

    def sample_tokens(self, grammar):
        ids = [request.req_id for request in self.work.scheduled_reqs]
        self.events.append(["sample", None if grammar is None else grammar.req_ids])
        output = ModelRunnerOutput(ids, [[self.setup.rank.index, len(self.events)] for _ in ids])
        return Pending(output, "late" not in ids)

    def cause(self, error):
        return EngineDeadError("no GPU") if "illegal" in str(error) else error

    def measure_memory(self):
        return MemoryBudget("a test", 2**30, 2**29, (MemoryItem("runtime", self.setup.rank.index),))

    def initialize_kv_cache(self, kv_cache):
        self.events.append(["initialize", kv_cache.num_blocks, len(kv_cache.groups)])

    def history(self):
        events, self.events = self.events, []
        return events

    def describe(self, *args, **kwargs):
        return [
            self.setup.rank.index,
            self.setup.rank.size,
            self.setup.spec.architecture,
            args,
            kwargs,
        ]

    def environment(self, names):
        return [os.environ.get(name) for name in names]

    def ray_node(self):
        import ray

        return [ray.get_runtime_context().get_node_id()]

    def log(self, text):
        logging.getLogger("octavo.fake").warning(text)

    def rest(self, seconds):
        time.sleep(seconds)

    def give_object(self):
        return self

    def refuse(self):
        raise ConfigError("num_threads=0 is wrong")

    def shutdown(self):
        pass


class Refusing(FakeWorker):
    """Worker that cannot start as rank 1."""

    error: Exception = ConfigError("num_threads=4000 is too many")

    def __init__(self, setup, platform):
        if setup.rank.index == 1:
            raise self.error
        super().__init__(setup, platform)


class WithoutModel(Refusing):
    error = ModelError("config.json is gone")


class Broken(Refusing):
    error = ValueError("who knows")


class Crashing(FakeWorker):
    def __init__(self, setup, platform):
        os._exit(4)
