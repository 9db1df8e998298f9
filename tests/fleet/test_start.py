"""Start of the engine before the front end is there."""

import asyncio
from dataclasses import replace

import pytest

from octavo.config import BUILTIN_MODEL, EngineConfig
from octavo.errors import EngineDeadError
from octavo.fleet import data_parallel, start
from octavo.fleet.process import CoreProcess
from octavo.fleet.start import EngineProcesses, start_engines, start_loading
from octavo.models.hub import resolve_model
from octavo.observability.recording import RecordSettings
from tests.plan.plans import make_plan


@pytest.fixture
def processes():
    process = CoreProcess()
    yield EngineProcesses(process=process, warm_spare=False)
    process.shutdown(0.0)


def test_the_front_end_continues_with_an_engine_that_loads_already(processes):
    """The engine fails before the front end is there, which learns the reason nevertheless."""

    async def main():
        config = EngineConfig.from_kwargs(num_gpu_blocks_override=8, num_threads=1000)
        start_loading(config, processes)
        processes.process._process.wait(240)
        path = resolve_model(BUILTIN_MODEL)
        client = start_engines(config, path, path, processes, list, lambda recovery: None)
        assert client._process is processes.process
        with pytest.raises(EngineDeadError, match="num_threads=1000"):
            await client.get_output()
        await client.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("settings", "record"),
    [({"model": "org/name"}, None), ({"data_parallel_size": 2}, None), ({}, RecordSettings("f"))],
)
def test_what_must_precede_the_loading(settings, record, processes):
    start_loading(EngineConfig.from_kwargs(**settings), replace(processes, record=record))
    assert not processes.process.started
    start_loading(EngineConfig(), replace(processes, process=None))


def test_a_group_of_engines_beside_another(processes, monkeypatch):
    """It has the other's KV cache, and its share of the memory that is left."""
    made = []
    monkeypatch.setattr(start, "cpu_memory", lambda numa_node: (2**40, 1100))
    monkeypatch.setattr(start, "num_cpus", lambda: 6)
    monkeypatch.setattr(
        data_parallel, "DataParallelClient", lambda launcher, *_, **how: made.append(launcher)
    )
    settings = {"enable_expert_parallel": True, "enable_elastic_ep": True, "enable_eplb": True}
    settings |= {"data_parallel_size": 2, "gpu_memory_utilization": 0.9, "max_model_len": -1}
    config, path = EngineConfig.from_kwargs(**settings), resolve_model(BUILTIN_MODEL)
    client = start_engines(config, path, path, processes, list, lambda recovery: None)
    first = made[0].make_setup(None, 0)
    assert made[0]._spare is processes.process
    assert (first.memory_limit, first.config.device.num_threads) == (None, 3)
    client._make(3, make_plan(2048, 100), 100)
    setup = made[1].make_setup(None, 0)
    assert made[1]._spare is None
    assert setup.expert_memory not in ((), first.expert_memory)
    assert setup.memory_limit == 300
    assert setup.config.parallel.data_parallel_size == 3
    assert setup.config.device.num_threads == 2
    assert setup.config.device.enable_eplb
    assert (setup.config.model.max_model_len, setup.config.cache.num_gpu_blocks_override) == (
        2048,
        100,
    )
    client._make(1, make_plan(2048, 100), 2000)
    alone = made[2].make_setup(None, 0)
    assert (alone.memory_limit, alone.expert_memory) == (0, ())
    assert not alone.config.device.enable_eplb
