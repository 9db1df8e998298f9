"""The engine core in its own process: failures, the parent's death, utility calls."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from octavo.config import BUILTIN_MODEL, EngineConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.errors import EngineDeadError, ModelError, OctavoError, ProfilerError
from octavo.models.hub import resolve_model
from octavo.sampling_params import RequestOutputKind, SamplingParams

CONFIG = {"max_model_len": 256, "kv_cache_memory_bytes": "8M", "max_num_seqs": 8}


def run(test):
    """Runs a coroutine function with a started engine."""

    async def main():
        engine = await AsyncLLM.start(EngineConfig.from_kwargs(**CONFIG))
        try:
            return await test(engine)
        finally:
            await engine.shutdown()

    return asyncio.run(main())


async def collect(engine: AsyncLLM, request_id: str, **params) -> str:
    text = ""
    kind = RequestOutputKind.DELTA
    async for output in engine.generate(
        "Once upon a time", SamplingParams(output_kind=kind, **params), request_id
    ):
        text += output.outputs[0].text
    return text


def test_requests_made_while_the_model_loads_are_served():
    async def test(engine):
        assert not engine.ready
        assert engine.health().ok
        texts = await asyncio.gather(*(collect(engine, str(i), seed=7) for i in range(4)))
        assert len(set(texts)) == 1
        assert engine.ready
        assert engine.num_unfinished_requests == 0
        assert await engine.reset_prefix_cache()

    run(test)


def test_a_closed_stream_stops_the_request():
    async def test(engine):
        stream = engine.generate("The", SamplingParams(max_tokens=200, ignore_eos=True), "a")
        await anext(stream)
        await stream.aclose()
        assert engine.num_unfinished_requests == 0
        assert await collect(engine, "b", max_tokens=3)
        assert engine.stats.num_used_blocks == 0

    run(test)


def test_an_engine_that_is_killed_fails_its_requests_with_the_cause():
    async def test(engine):
        await engine.wait_ready()
        stream = engine.generate("The", SamplingParams(max_tokens=200, ignore_eos=True), "a")
        await anext(stream)
        os.kill(engine._client.process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            async for _ in stream:
                pass
        assert not engine.health().ok
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await anext(engine.generate("The", SamplingParams(), "b"))

    run(test)


def test_a_start_failure_is_reported_with_its_root_cause(tmp_path):
    async def main():
        config = EngineConfig.from_kwargs(**{**CONFIG, "num_threads": 1000})
        engine = await AsyncLLM.start(config)
        with pytest.raises(EngineDeadError, match="num_threads=1000"):
            await engine.wait_ready()
        await engine.shutdown()
        await engine.shutdown()

    asyncio.run(main())


def test_a_bad_tokenizer_is_refused_before_a_process_starts(tmp_path):
    for file in resolve_model(BUILTIN_MODEL).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{")

    async def main():
        await AsyncLLM.start(EngineConfig.from_kwargs(model=str(tmp_path)))

    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        asyncio.run(main())
    children = psutil.Process().children()
    assert not [c for c in children if "octavo.engine.core_process" in c.cmdline()]


def test_health_is_progress():
    async def main():
        config = EngineConfig.from_kwargs(**CONFIG)
        engine = await AsyncLLM.start(config, progress_timeout=1.0)
        try:
            await engine.wait_ready()
            os.kill(engine._client.process.pid, signal.SIGSTOP)
            stream = engine.generate("The", SamplingParams(max_tokens=5), "a")
            waiting = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.05)
            assert engine.health().ok
            await asyncio.sleep(1.3)
            assert not engine.health().ok
            os.kill(engine._client.process.pid, signal.SIGCONT)
            await waiting
            assert engine.health().ok
            await stream.aclose()
        finally:
            os.kill(engine._client.process.pid, signal.SIGCONT)
            await engine.shutdown()

    asyncio.run(main())


def test_a_bad_folder_is_refused_before_a_process_starts(tmp_path):
    async def main():
        await AsyncLLM.start(EngineConfig.from_kwargs(model=str(tmp_path)))

    with pytest.raises(ModelError, match=r"config\.json"):
        asyncio.run(main())


def test_the_engine_ends_with_its_parent():
    code = """
import asyncio
from octavo.config import EngineConfig
from octavo.engine.async_llm import AsyncLLM
async def main():
    engine = await AsyncLLM.start(EngineConfig.from_kwargs(max_model_len=128))
    await engine.wait_ready()
    print(engine._client.process.pid, engine._client._folder, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    number, folder = parent.stdout.readline().split()
    child = int(number)
    assert Path(folder).exists()
    assert psutil.pid_exists(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(child)
    assert not Path(folder).exists()


def test_profiles_of_the_engine_process(tmp_path):
    async def test():
        config = EngineConfig.from_kwargs(**CONFIG, profiler_dir=str(tmp_path))
        engine = await AsyncLLM.start(config)
        try:
            with pytest.raises(ProfilerError, match="start one first"):
                await engine.stop_profile()
            await engine.start_profile()
            with pytest.raises(ProfilerError, match="already"):
                await engine.start_profile()
            await collect(engine, "a", max_tokens=4, ignore_eos=True)
            path = await engine.stop_profile()
            pid = engine._client.process.pid
        finally:
            await engine.shutdown()
        assert path == str(tmp_path / f"octavo-{pid}-1.trace.json")
        names = {e["name"] for e in json.loads(Path(path).read_text())["traceEvents"]}
        assert {"schedule", "forward", "attention", "update_from_output", "send_outputs"} <= names

    asyncio.run(test())


def test_without_a_folder_a_profile_is_refused():
    async def test(engine):
        with pytest.raises(ProfilerError, match="profiler_dir"):
            await engine.start_profile()
        assert await collect(engine, "a", max_tokens=2)

    run(test)


def test_an_unknown_utility_is_refused():
    async def test(engine):
        with pytest.raises(OctavoError, match="no utility method 'fly'"):
            await engine._client.call_utility("fly")

    run(test)
