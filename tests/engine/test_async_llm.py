"""What the front end decides by itself; the rest is in tests/e2e."""

import asyncio
import os
import time
from functools import cached_property
from types import SimpleNamespace

import msgspec
import pytest

from octavo import device
from octavo.config import EngineConfig, ServerConfig
from octavo.engine import async_llm
from octavo.engine.async_llm import AsyncLLM, Health
from octavo.engine.wire import CoreReady
from octavo.engine_args import AsyncEngineArgs
from octavo.errors import ConfigError, EngineDeadError, QueueFullError, RequestError
from octavo.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerStats
from octavo.sampling_params import RequestOutputKind, SamplingParams


class Process:
    """An engine process that is not there."""

    def __init__(self, config, path, **settings):
        self.settings, self.pid = settings, os.getpid()


class Client:
    """What the engine process is asked, and a hand for what it says."""

    def __init__(self, process):
        self.process = process
        self.said = asyncio.Queue()
        self.sent, self.calls, self.core_ids = [], [], {}
        self.sleeps, self.sleep_answers = [], []
        self.stats = SchedulerStats()
        self.answers = asyncio.Event()
        self.answers.set()
        self.failed = None
        self.num_shutdowns = 0

    @cached_property
    def ready(self):
        return asyncio.get_running_loop().create_future()

    async def get_output(self):
        outputs = await self.said.get()
        if isinstance(outputs, Exception):
            raise outputs
        for output in outputs.outputs:
            output.request_id = self.core_ids[output.request_id]
        return outputs

    async def add_request(self, request):
        name = request.request_id.partition("#")[0]
        self.core_ids[name] = request.request_id
        self.sent.append(("add", name))

    async def abort_requests(self, request_ids):
        if request_ids:
            self.sent.append(("abort", [i.partition("#")[0] for i in request_ids]))

    async def call_utility(self, method, *args):
        self.calls.append(method)
        await self.answers.wait()
        if method in ("sleep", "wake_up"):
            self.sleeps.append((method, *args))
            return self.sleep_answers.pop(0) if self.sleep_answers else True
        return {
            "stats": list(msgspec.structs.astuple(self.stats)),
            "reset_prefix_cache": 1,
            "stop_profile": "/x",
        }.get(method)

    def fail_calls(self, error):
        self.failed = error
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()

    async def shutdown(self):
        self.num_shutdowns += 1

    def close(self):
        self.num_shutdowns += 1


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(async_llm, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def run(test, monkeypatch, config=None, **settings):
    """Runs a coroutine function with an engine whose process is a stand-in."""
    monkeypatch.setattr(async_llm, "AsyncMPClient", Client)
    monkeypatch.setattr(async_llm, "CoreProcess", Process)
    if settings.pop("quick", True):
        monkeypatch.setattr(async_llm, "_HEARTBEAT_INTERVAL", 0.002)

    async def main():
        engine = await AsyncLLM.start(EngineConfig.from_kwargs(**(config or {})), **settings)
        try:
            await test(engine, engine._client)
        finally:
            await engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 20))


async def heartbeats(client, count=3):
    """Waits until so many more have been sent."""
    seen = len(client.calls)
    while client.calls[seen:].count("stats") < count:
        await asyncio.sleep(0.001)


READY = CoreReady(2048, 100, 0.75)


def test_what_the_process_is_started_with(monkeypatch):
    monkeypatch.setattr(device, "num_cuda_devices", lambda: 0)

    async def defaults(engine, client):
        assert client.process.settings == {
            "default_batched_tokens": 512,
            "request_memory": 2**30,
            "log_level": "info",
            "log_format": "text",
        }
        assert engine.request_memory.limit == 2**30 == ServerConfig().request_memory_bytes

    run(defaults, monkeypatch)

    async def given(engine, client):
        assert client.process.settings["request_memory"] == engine.request_memory.limit == 2**20
        assert (client.process.settings["log_level"], client.process.settings["log_format"]) == (
            "debug",
            "json",
        )
        assert 'model_name="mine"' in engine.metrics.render().decode()

    run(
        given,
        monkeypatch,
        request_memory=2**20,
        served_name="mine",
        log_level="debug",
        log_format="json",
    )


def test_health_is_the_answer_to_a_heartbeat(monkeypatch, clock):
    async def test(engine, client):
        await asyncio.sleep(0.01)
        assert engine.health() == Health(True, "loading the model")
        assert client.calls == []  # nobody is asked before it can answer
        assert not engine.ready
        client.ready.set_result(READY)
        await engine.wait_ready()
        await heartbeats(client)
        assert engine.ready
        assert engine.health() == Health(True, "ok")
        clock[0] += 100.0  # answered: however long ago
        await heartbeats(client)
        assert engine.health() == Health(True, "ok")
        client.answers.clear()
        await heartbeats(client, 1)
        clock[0] += 7.0
        assert engine.health() == Health(True, "ok")
        clock[0] += 1.0
        assert engine.health() == Health(False, "the engine has not answered for 8 s")
        client.answers.set()
        await heartbeats(client)
        assert engine.health() == Health(True, "ok")

    run(test, monkeypatch, progress_timeout=7.0)


@pytest.mark.parametrize("state", [{"num_running_reqs": 1}, {"num_waiting_reqs": 2}])
def test_requests_for_which_no_step_is_made(monkeypatch, clock, state):
    async def test(engine, client):
        client.ready.set_result(READY)
        client.stats = SchedulerStats(**state, num_scheduled_tokens=5)
        await heartbeats(client)
        clock[0] += 7.0
        assert engine.health() == Health(True, "ok")
        await heartbeats(client)
        clock[0] += 1.0
        assert engine.health() == Health(False, "no step for 8 s although requests are waiting")
        client.stats = SchedulerStats(**state, num_scheduled_tokens=6)
        await heartbeats(client, 2)
        assert engine.health() == Health(True, "ok")
        clock[0] += 8.0
        await heartbeats(client)
        assert not engine.health().ok
        client.stats = SchedulerStats(num_scheduled_tokens=6)  # they have been aborted
        await heartbeats(client, 2)
        clock[0] += 100.0
        await heartbeats(client, 2)
        assert engine.health() == Health(True, "ok")

    run(test, monkeypatch, progress_timeout=7.0)


def test_a_short_time_to_answer_is_looked_at_often(monkeypatch):
    async def test(engine, client):
        client.ready.set_result(READY)
        started = time.monotonic()
        await heartbeats(client, 11)
        assert 0.15 < time.monotonic() - started < 1.5

    run(test, monkeypatch, quick=False, progress_timeout=0.08)


def test_memory_is_given_back_once_nothing_runs_any_more(monkeypatch):
    trims = []
    monkeypatch.setattr(async_llm, "trim_memory", lambda: trims.append(1))

    async def test(engine, client):
        client.ready.set_result(READY)
        await heartbeats(client)
        assert "trim_memory" not in client.calls  # nothing has run yet
        for times in (1, 2):
            with engine.request_memory.hold(100):
                await heartbeats(client)
                assert len(trims) == times - 1
            await heartbeats(client, 5)
            assert client.calls.count("trim_memory") == len(trims) == times

    run(test, monkeypatch)


def test_outputs_reach_their_request_and_stops_the_core(monkeypatch):
    params = SamplingParams(stop=["b"], output_kind=RequestOutputKind.DELTA, max_tokens=50)

    async def test(engine, client):
        client.ready.set_result(READY)
        encode = engine.tokenizer.encode
        stream = engine.generate("Once", params, "a")
        first = asyncio.ensure_future(anext(stream))
        while not client.sent:
            await asyncio.sleep(0.001)
        assert client.sent == [("add", "a")]
        assert engine.num_unfinished_requests == 1
        used = engine.request_memory.used
        assert used > 0
        stats = SchedulerStats(num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.5)
        token = encode("a", False)[-1]
        client.said.put_nowait(EngineCoreOutputs([EngineCoreOutput("a", [token])], stats, 1.0))
        assert (await first).outputs[0].token_ids == [token]
        assert engine.stats == stats
        text = engine.metrics.render().decode()
        for name, value in (("running", 3), ("waiting", 2)):
            labels = 'engine="0",model_name="octavo/stories"'
            assert f"octavo:num_requests_{name}{{{labels}}} {value}.0" in text
        stop = encode("b", False)[-1]
        client.said.put_nowait(EngineCoreOutputs([EngineCoreOutput("a", [stop])], None, 1.0))
        last = await anext(stream)
        assert (last.finished, last.outputs[0].stop_reason) == (True, "b")
        assert client.sent == [("add", "a"), ("abort", ["a"])]
        assert engine.stats == stats
        assert [item async for item in stream] == []
        assert engine.request_memory.used == engine.num_unfinished_requests == 0
        assert len(client.sent) == 2

    run(test, monkeypatch)


def test_a_name_may_be_used_again_at_once(monkeypatch):
    """What is still said of the first request is nothing of the second one's."""
    params = SamplingParams(stop=["b"], max_tokens=50)

    async def test(engine, client):
        client.ready.set_result(READY)
        stop, late = (engine.tokenizer.encode(text, False)[-1] for text in "bx")
        first = asyncio.ensure_future(anext(engine.generate([5], params, "a")))
        while len(client.sent) < 1:
            await asyncio.sleep(0.001)
        old = client.core_ids["a"]
        client.said.put_nowait(EngineCoreOutputs([EngineCoreOutput("a", [stop])], None, 1.0))
        assert (await first).finished
        second = asyncio.ensure_future(anext(engine.generate([5], params, "a")))
        while len(client.sent) < 3:
            await asyncio.sleep(0.001)
        client.core_ids["old"] = old
        outputs = [EngineCoreOutput("old", [late]), EngineCoreOutput("a", [stop])]
        client.said.put_nowait(EngineCoreOutputs(outputs, None, 1.0))
        assert (await second).outputs[0].token_ids == [stop]
        assert (await second).request_id == "a"

    run(test, monkeypatch)


def test_a_closed_stream_is_aborted_and_gives_its_memory_back(monkeypatch):
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=50, n=2)

    async def test(engine, client):
        stream = engine.generate([5, 6], params, "a")
        waiting = asyncio.ensure_future(anext(stream))
        while not client.sent:
            await asyncio.sleep(0.001)
        with pytest.raises(RequestError, match="'a' is already running"):
            await anext(engine.generate([5], SamplingParams(max_tokens=1), "a"))
        assert client.sent == [("add", "a")]
        # As much again does not fit: see below.
        with pytest.raises(QueueFullError):
            await anext(engine.generate([5, 6], params, "b"))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await stream.aclose()
        assert client.sent == [("add", "a"), ("abort", ["0_a", "1_a"])]
        assert engine.request_memory.used == engine.num_unfinished_requests == 0

    run(test, monkeypatch, request_memory=3 * (8192 + 50 * 112))


def test_a_failed_request_is_not_aborted(monkeypatch):
    async def test(engine, client):
        waiting = asyncio.ensure_future(anext(engine.generate([5], SamplingParams(), "a")))
        while not client.sent:
            await asyncio.sleep(0.001)
        failed = EngineCoreOutput(
            "a", [], finish_reason=FinishReason.ERROR, error="why", error_kind="RequestError"
        )
        client.said.put_nowait(EngineCoreOutputs([failed], None, 1.0))
        with pytest.raises(RequestError, match="why"):
            await waiting
        assert client.sent == [("add", "a")]

    run(test, monkeypatch)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineDeadError("killed"), "killed"),
        (ValueError("x"), "the output handler failed: ValueError('x')"),
    ],
)
def test_an_engine_that_died(monkeypatch, error, reason):
    async def test(engine, client):
        client.ready.set_result(READY)
        await heartbeats(client)
        waiting = asyncio.ensure_future(anext(engine.generate([5], SamplingParams(), "a")))
        while not client.sent:
            await asyncio.sleep(0.001)
        client.said.put_nowait(error)
        with pytest.raises(EngineDeadError) as caught:
            await waiting
        assert str(caught.value) == reason
        assert engine.health() == Health(False, f"the engine is dead: {reason}")
        assert not engine.ready
        assert str(client.failed) == reason
        with pytest.raises(EngineDeadError):
            await anext(engine.generate([5], SamplingParams(), "b"))
        assert client.sent == [("add", "a")]
        assert engine.num_unfinished_requests == engine.request_memory.used == 0
        await engine.shutdown()
        assert str(client.failed) == reason

    run(test, monkeypatch)


def test_a_model_that_cannot_be_loaded_is_never_ready(monkeypatch):
    async def test(engine, client):
        client.said.put_nowait(EngineDeadError("no memory"))
        with pytest.raises(EngineDeadError, match="no memory"):
            await engine.wait_ready()
        await asyncio.sleep(0.01)
        assert not engine.ready
        assert "cache_config_info" not in engine.metrics.render().decode()

    run(test, monkeypatch)


@pytest.mark.parametrize(("found", "fits"), [(2048, 2047), (100, 99), (64, 63)])
def test_the_context_that_came_out(monkeypatch, found, fits):
    async def test(engine, client):
        assert engine.max_model_len == 2048
        client.ready.set_result(CoreReady(found, 77, 1.254))
        await heartbeats(client)
        assert engine.max_model_len == found
        (info,) = [
            line
            for line in engine.metrics.render().decode().splitlines()
            if line.startswith("octavo:cache_config_info{")
        ]
        assert 'num_gpu_blocks="77"' in info
        assert 'block_size="16"' in info
        assert f'kv_cache_size_tokens="{int(found * 1.254)}"' in info
        assert 'kv_cache_max_concurrency="1.25"' in info
        assert info.endswith(" 1.0")
        params = SamplingParams(max_tokens=1)
        with pytest.raises(RequestError, match=f"context length is {found} tokens"):
            await anext(engine.generate([5] * (fits + 1), params, "a"))
        stream = asyncio.ensure_future(anext(engine.generate([5] * fits, params, "b")))
        while not client.sent:
            await asyncio.sleep(0.001)
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)

    run(test, monkeypatch, {"max_model_len": -1})


def test_calls_of_the_operator(monkeypatch):
    async def test(engine, client):
        assert await engine.reset_prefix_cache() is True
        await engine.start_profile()
        assert await engine.stop_profile() == "/x"
        assert client.calls == ["reset_prefix_cache", "start_profile", "stop_profile"]

    run(test, monkeypatch)


def test_the_end(monkeypatch):
    async def test(engine, client):
        client.ready.set_result(READY)
        await heartbeats(client)
        waiting = asyncio.ensure_future(anext(engine.generate([5], SamplingParams(), "a")))
        while not client.sent:
            await asyncio.sleep(0.001)
        await engine.shutdown()
        await engine.shutdown()
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            await waiting
        assert client.num_shutdowns == 2
        assert str(client.failed) == "the engine was shut down"
        count = len(client.calls)
        await asyncio.sleep(0.02)
        assert len(client.calls) == count

    run(test, monkeypatch)


def test_falling_asleep_waits_for_the_last_requests(monkeypatch):
    async def test(engine, client):
        client.sleep_answers = [False, False, True, False, True]
        await engine.sleep(2, "wait")
        assert client.sleeps == [("sleep", 2, "wait")] * 3
        assert engine.asleep
        assert await engine.wake_up(["weights"]) is False
        assert engine.asleep
        assert await engine.wake_up() is True
        assert not engine.asleep
        assert client.sleeps[3:] == [("wake_up", ["weights"]), ("wake_up", None)]

    run(test, monkeypatch)


def test_a_sleep_that_nobody_waits_for_is_given_up(monkeypatch):
    async def test(engine, client):
        client.sleep_answers = [False] * 1000
        task = asyncio.create_task(engine.sleep(1, "wait"))
        while len(client.sleeps) < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert client.sleeps[-1] == ("wake_up", None)
        assert not engine.asleep

    run(test, monkeypatch)


def test_an_engine_that_wakes_up_slowly_is_healthy(monkeypatch, clock):
    async def test(engine, client):
        client.ready.set_result(READY)
        await heartbeats(client)
        client.answers.clear()
        task = asyncio.create_task(engine.wake_up())
        while "wake_up" not in client.calls:
            await asyncio.sleep(0.001)
        clock[0] += 1000
        assert engine.health() == Health(True, "falling asleep or waking up")
        client.answers.set()
        await task
        assert engine.health().ok

    run(test, monkeypatch)


def test_a_dead_engine_neither_sleeps_nor_wakes_up(monkeypatch):
    async def test(engine, client):
        await client.said.put(EngineDeadError("gone"))
        while not engine.errored:
            await asyncio.sleep(0.001)
        for call in (engine.sleep, engine.wake_up, engine.is_sleeping):
            with pytest.raises(EngineDeadError, match="gone"):
                await call()
        assert client.sleeps == []

    run(test, monkeypatch)


class Sync(Process):
    """A process that notes its end."""

    num_shutdowns = 0

    def shutdown(self):
        self.num_shutdowns += 1


def test_an_engine_may_be_made_before_there_is_an_event_loop(monkeypatch):
    monkeypatch.setattr(async_llm, "AsyncMPClient", Client)
    monkeypatch.setattr(async_llm, "CoreProcess", Sync)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs())
    client = engine._client
    process = client.process
    assert process.settings["log_level"] == "warning"

    async def ask():
        engine._client.ready.set_result(READY)
        await engine.wait_ready()
        await engine.abort("r")

    asyncio.run(ask())
    for call in (engine.wait_ready, engine.reset_prefix_cache):
        with pytest.raises(ConfigError, match="event loop"):
            asyncio.run(call())
    engine.shutdown()
    assert process.num_shutdowns == client.num_shutdowns == 1
    with pytest.raises(EngineDeadError, match="shut down"):
        asyncio.run(engine.check_health())

    async def end():
        await engine.shutdown()

    asyncio.run(end())
    assert client.num_shutdowns == 2


def test_an_engine_that_is_never_asked_ends(monkeypatch):
    monkeypatch.setattr(async_llm, "AsyncMPClient", Client)
    monkeypatch.setattr(async_llm, "CoreProcess", Sync)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs())
    assert engine._client.process.settings["log_level"] == "error"
    engine.shutdown()
    assert engine._client.process.num_shutdowns == engine._client.num_shutdowns == 1
