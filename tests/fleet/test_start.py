"""Start of the engine before the front end is there."""

import asyncio
from dataclasses import replace

import pytest

from octavo.config import BUILTIN_MODEL, EngineConfig
from octavo.errors import EngineDeadError
from octavo.fleet.process import CoreProcess
from octavo.fleet.start import EngineProcesses, start_engines, start_loading
from octavo.models.hub import resolve_model
from octavo.observability.recording import RecordSettings


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
        processes.process._process.wait(60)
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
