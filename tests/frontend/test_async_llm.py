"""Decisions of the front end alone; the rest is in tests/e2e."""

import asyncio
import os
import re
import time
from functools import cached_property

import pytest
from msgspec.structs import asdict

from octavo.config import EngineConfig, SchedulerConfig, ServerConfig
from octavo.config.engine_args import AsyncEngineArgs
from octavo.engine.core_messages import CoreReady
from octavo.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    FirstTokenError,
    QueueFullError,
    RequestError,
    ScalingBusyError,
    ScalingError,
    UnmetDeadlineError,
)
from octavo.fleet import data_parallel, start
from octavo.fleet.start import EngineProcesses
from octavo.fleet.supervisor import Recovery
from octavo.frontend import request_memory
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.health import Health
from octavo.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason
from octavo.observability.recording import RecordSettings, read_records
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.observability.view_events import label_of
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.system import device
from tests.collector import collector
from tests.plan.plans import make_plan


class Client:
    """Requests to the engine process, and answers that the test sends for it."""

    elastic = None

    def __init__(self, launcher, unfinished, **settings):
        self.launcher, self.unfinished, self.settings = launcher, unfinished, settings
        self.up = False
        self.missing, self.down = [], {}
        self.said = asyncio.Queue()
        self.sent, self.calls, self.core_ids = [], [], {}
        self.sleeps, self.sleep_answers = [], []
        self.answers = asyncio.Event()
        self.answers.set()
        self.failed = None
        self.num_shutdowns = 0

    @cached_property
    def ready(self):
        return asyncio.get_running_loop().create_future()

    def get_output_nowait(self):
        if self.said.empty() or isinstance(self.said._queue[0], Exception):
            return None
        return self.name(self.said.get_nowait())

    def family_of(self, index):
        return [os.getpid()]

    def engine_of(self, request_id):
        return 0

    def holder_of(self, request_id):
        return None

    async def pages(self):
        return []

    def become_ready(self, ready):
        self.up = True
        self.ready.set_result(ready)

    async def get_output(self):
        outputs = await self.said.get()
        if isinstance(outputs, Exception):
            raise outputs
        return self.name(outputs)

    def name(self, outputs):
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


def run(test, monkeypatch, config=None, **settings):
    """Run a coroutine function with an engine whose process is a stand-in."""
    monkeypatch.setattr(start, "Supervisor", Client)
    monkeypatch.setattr(start, "CoreLauncher", lambda config, path, **settings: settings)
    monkeypatch.setattr(request_memory, "_TRIM_INTERVAL", 0.002)

    async def main():
        processes = EngineProcesses(**settings)
        engine = await AsyncLLM.start(EngineConfig.from_kwargs(**(config or {})), processes)
        try:
            await test(engine, engine._client)
        finally:
            await engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 100))


async def looks(count=5):
    """Wait for `count` checks whether any request runs."""
    await asyncio.sleep(0.002 * count + 0.02)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.002)


READY = CoreReady(make_plan(2048, 100))


@pytest.mark.parametrize("name", ["0_x", "12__x", "_0_x"])
def test_an_id_like_that_of_one_of_several_answers_is_not_shown_as_one(name, monkeypatch):
    async def test(engine, client):
        client.become_ready(READY)
        for n, label in ((1, "0"), (2, "1-0")):
            params = SamplingParams(n=n, seed=0)
            answer = asyncio.ensure_future(anext(engine.generate([5], params, name)))
            await until(lambda: engine.num_unfinished_requests)
            live = next(iter(engine.live_answers()))
            assert (live.request_id, label_of(live.core_id)) == (name, label)
            answer.cancel()
            await until(lambda: not engine.num_unfinished_requests)

    run(test, monkeypatch)


def test_what_the_process_is_started_with(monkeypatch):
    monkeypatch.setattr(device, "num_cuda_devices", lambda: 0)

    async def defaults(engine, client):
        assert client.launcher == {
            "default_batched_tokens": 512,
            "request_memory": 2**30,
            "warm_spare": None,
            "memory_limit": None,
            "process": None,
            "log_level": "info",
            "log_format": "text",
            "record": None,
            "reports_steps": False,
        }
        assert engine.request_memory.limit == 2**30 == ServerConfig().request_memory_bytes
        del client.settings["on_recovery"]
        assert client.settings == {"max_restarts": 5, "progress_timeout": 60.0, "number": None}

    run(defaults, monkeypatch)

    async def given(engine, client):
        assert client.launcher["request_memory"] == engine.request_memory.limit == 2**20
        assert (client.launcher["log_level"], client.launcher["log_format"]) == (
            "debug",
            "json",
        )
        assert 'model_name="mine"' in engine.metrics.render().decode()

    run(
        given,
        monkeypatch,
        {"served_model_name": "mine"},
        request_memory=2**20,
        log_level="debug",
        log_format="json",
    )


def test_health_and_readiness(monkeypatch):
    async def test(engine, client):
        await asyncio.sleep(0.01)
        assert engine.health() == Health(True, "loading the model")
        assert client.calls == []  # no call before the engine can answer
        assert not engine.ready
        assert engine.loading
        client.become_ready(READY)
        await engine.wait_ready()
        assert engine.ready
        assert engine.health() == Health(True, "ok")
        client.up = False  # it has died
        assert not engine.ready
        assert not engine.loading
        assert engine.is_running
        assert engine.health() == Health(True, "starting the engine again")
        client.up = True
        assert engine.health() == Health(True, "ok")

    run(test, monkeypatch)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_deadlines_hold_while_there_is_no_engine(monkeypatch, kind):
    late = []

    async def test(engine, client):
        client.become_ready(READY)
        params = SamplingParams(max_tokens=9, n=2, output_kind=kind)
        end = time.monotonic() + (5.0 if late else 0.2)

        def ask(name, **limits):
            limits = dict.fromkeys(limits, end)
            stream = engine.generate({"prompt_token_ids": [5]}, params, name, **limits)

            async def read():
                async for _ in stream:
                    pass

            return asyncio.ensure_future(read())

        first = ask("a", first_token_deadline=True)
        whole = ask("b", deadline=True)
        begun = ask("c", first_token_deadline=True)
        await until(lambda: len(client.sent) == 3 or time.monotonic() > end)
        number = client.core_ids.get("c")
        client.core_ids |= {f"{i}_c": f"{i}_{number}" for i in range(2)}
        client.said.put_nowait(
            EngineCoreOutputs([EngineCoreOutput(f"{i}_c", [7]) for i in range(2)])
        )
        await until(client.said.empty)
        client.up = False
        if time.monotonic() > end and not late:  # on a busy machine; the test is repeated
            late.append(True)
            await asyncio.gather(first, whole, begun, return_exceptions=True)
            return
        with pytest.raises(FirstTokenError):
            await first
        with pytest.raises(DeadlineError, match="The deadline passed"):
            await whole
        aborted = [ids for what, ids in client.sent if what == "abort"]
        assert sorted(aborted) == [["0_a", "1_a"], ["0_b", "1_b"]]
        await asyncio.sleep(0.05)
        assert not begun.done()
        begun.cancel()
        await asyncio.wait({begun})
        assert engine.num_unfinished_requests == 0

    run(test, monkeypatch)
    if late:
        run(test, monkeypatch)


def test_a_trace_goes_on(monkeypatch):
    parent = f"00-{'a' * 32}-{'b' * 16}-01"

    async def test(engine, client):
        client.become_ready(READY)
        for name in "ab":
            given = {"traceparent": parent, "authorization": "secret"} if name == "a" else None
            stream = engine.generate([5], SamplingParams(), name, trace_headers=given)
            reading = asyncio.ensure_future(anext(stream))
            await until(lambda name=name: ("add", name) in client.sent)
            client.said.put_nowait(
                EngineCoreOutputs([EngineCoreOutput(name, [7], finish_reason=FinishReason.LENGTH)])
            )
            await reading

    with collector() as receiver:
        run(test, monkeypatch, {"otlp_traces_endpoint": receiver.url, "served_model_name": "mine"})
        spans = {s["attributes"]["gen_ai.request.id"]: s for s in receiver.spans}
    assert (spans["a"]["traceId"], spans["a"]["parentSpanId"]) == ("a" * 32, "b" * 16)
    assert "parentSpanId" not in spans["b"]
    assert spans["a"]["attributes"]["gen_ai.response.model"] == "mine"
    assert "secret" not in str(receiver.messages)


def test_the_cache_is_empty_after(monkeypatch):
    """A new engine, a reset, and a sleep that gives up the KV cache; a pause keeps it."""

    async def test(engine, client):
        async def emptied_by(call):
            before, engine._states.cache_emptied_at = engine._states.cache_emptied_at, None
            if (made := call()) is not None:
                await made
            found, engine._states.cache_emptied_at = engine._states.cache_emptied_at, before
            return found

        assert engine._states.cache_emptied_at is None
        assert await emptied_by(lambda: engine.pause_generation(clear_cache=False)) is None
        await engine.resume_generation()
        for call in (
            lambda: client.settings["on_recovery"](Recovery("killed", 3, 0.5)),
            engine.reset_prefix_cache,
            engine.sleep,
        ):
            begin = time.monotonic()
            assert begin <= await emptied_by(call) <= time.monotonic()

    run(test, monkeypatch)


def test_recoveries_are_counted(monkeypatch):
    async def test(engine, client):
        client.settings["on_recovery"](Recovery("killed", 3, 0.5))
        client.settings["on_recovery"](Recovery("killed", 2, 0.25))
        text = engine.metrics.render().decode()
        labels = '{engine="0",model_name="octavo/stories"}'
        assert f"octavo:engine_restarts_total{labels} 2.0" in text
        assert f"octavo:requests_recovered_total{labels} 5.0" in text
        assert f"octavo:recovery_seconds_sum{labels} 0.75" in text

    run(test, monkeypatch)


def test_what_is_recorded(monkeypatch, tmp_path):
    """Requests, their ends, and each death: also the last one."""
    path = tmp_path / "run.rec"

    async def test(engine, client):
        client.settings["on_recovery"](Recovery("killed", 0, 0.5))
        params = SamplingParams(max_tokens=3)
        stream = engine.generate({"prompt_token_ids": [5, 6]}, params, "a")
        asking = asyncio.ensure_future(anext(stream))
        while not client.sent:
            await asyncio.sleep(0.001)
        await client.said.put(EngineCoreOutputs([EngineCoreOutput("a", [7, 8])]))
        await asking
        await stream.aclose()
        await client.said.put(EngineDeadError("gone"))
        while not engine.errored:
            await asyncio.sleep(0.001)

    run(test, monkeypatch, record=RecordSettings(str(path), "hash"))
    head, killed, arrival, outputs, ended, gone = read_records(path)
    assert (head.prompts, head.config["scheduler"]) == ("hash", asdict(SchedulerConfig()))
    assert (killed.reason, gone.reason) == ("killed", "gone")
    assert arrival.request.prompt_token_ids == []
    assert arrival.params.max_tokens == 3
    assert arrival.request.sampling_params.seed != 0  # the chosen one
    assert outputs.outputs[0].new_token_ids == [7, 8]
    assert (ended.request_id, ended.num_tokens) == (arrival.request.request_id, 2)
    assert ended.reason == FinishReason.ABORT
    assert path.with_name("run.rec.crash-2").exists()


def test_memory_is_given_back_once_nothing_runs_any_more(monkeypatch):
    trims = []
    monkeypatch.setattr(request_memory, "trim_memory", lambda: trims.append(1))

    async def test(engine, client):
        client.become_ready(READY)
        await looks()
        assert "trim_memory" not in client.calls  # no request has run yet
        for times in (1, 2):
            with engine.request_memory.hold(100):
                await looks()
                assert len(trims) == times - 1
            await looks(5)
            assert client.calls.count("trim_memory") == len(trims) == times

    run(test, monkeypatch)


def test_outputs_reach_their_request_and_stops_the_core(monkeypatch):
    params = SamplingParams(stop=["b"], output_kind=RequestOutputKind.DELTA, max_tokens=50)

    async def test(engine, client):
        client.become_ready(READY)
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


def test_a_step_is_counted_before_its_tokens_reach_the_request(monkeypatch):
    async def test(engine, client):
        async def slow_abort(request_ids):
            await asyncio.sleep(0.05)

        client.become_ready(READY)
        client.abort_requests = slow_abort
        stream = engine.generate("Once", SamplingParams(stop=["b"]), "a")
        answer = asyncio.ensure_future(anext(stream))
        while not client.sent:
            await asyncio.sleep(0.001)
        stats = SchedulerStats(num_running_reqs=3)
        stop = engine.tokenizer.encode("b", False)[-1]
        client.said.put_nowait(EngineCoreOutputs([EngineCoreOutput("a", [stop])], stats, 1.0))
        assert (await answer).finished
        assert engine.stats == stats
        counted = re.findall(
            r"octavo:(\w+)\{.*\} 3.0|octavo:(iteration_tokens_total_count)\{.*\} 1.0",
            engine.metrics.render().decode(),
        )
        assert {"num_requests_running", "iteration_tokens_total_count"} <= set(sum(counted, ()))

    run(test, monkeypatch)


def test_what_cannot_be_met_is_refused(monkeypatch):
    """Steps take 10 s; a deadline of 5 s for a token, or of 80 s for 9 tokens, cannot be met."""

    async def test(engine, client):
        async def ask(request_id, limit=None, answer=None, **params):
            now = time.monotonic()
            stream = engine.generate(
                [1] * 4,
                SamplingParams(**params),
                request_id,
                first_token_deadline=limit and now + limit,
                deadline=answer and now + answer,
            )
            return await anext(stream)

        running = asyncio.create_task(ask("running"))
        await until(lambda: client.sent)
        for step in range(1, 7):
            stats = SchedulerStats(num_running_reqs=1, num_steps=step, num_scheduled_tokens=step)
            client.said.put_nowait(EngineCoreOutputs([], stats, timestamp=10.0 * step))
        await until(lambda: engine.stats.num_steps == 6)
        with pytest.raises(UnmetDeadlineError) as caught:
            await ask("late", limit=5.0)
        assert caught.value.param == "max_ttft_ms"
        assert 6 <= caught.value.retry_after <= 10  # the first one, if no time passes meanwhile
        with pytest.raises(UnmetDeadlineError, match="deadline_ms"):
            await ask("long", answer=80.0, max_tokens=9, ignore_eos=True)
        assert b'reason="deadline_unmet"} 2.0' in engine.metrics.render()
        assert client.sent == [("add", "running")]
        # One that may stop at once, and one that has time.
        waiting = [
            asyncio.create_task(ask("short", answer=80.0, max_tokens=9)),
            asyncio.create_task(ask("patient", limit=1000.0)),
        ]
        await until(lambda: len(client.sent) == 3)
        for task in (running, *waiting):
            task.cancel()
        await asyncio.gather(running, *waiting, return_exceptions=True)

    run(test, monkeypatch)


def test_a_name_may_be_used_again_at_once(monkeypatch):
    """Late outputs of the first request are not assigned to the second one."""
    params = SamplingParams(stop=["b"], max_tokens=50)

    async def test(engine, client):
        client.become_ready(READY)
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
        # The same amount again does not fit: see below.
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
        client.become_ready(READY)
        await looks()
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
        client.become_ready(CoreReady(make_plan(found, 77)))
        await until(lambda: b"octavo:cache_config_info{" in engine.metrics.render())
        assert engine.max_model_len == found
        (info,) = [
            line
            for line in engine.metrics.render().decode().splitlines()
            if line.startswith("octavo:cache_config_info{")
        ]
        assert 'num_gpu_blocks="77"' in info
        assert 'block_size="16"' in info
        assert f'kv_cache_size_tokens="{found * 76}"' in info
        assert 'kv_cache_max_concurrency="76.0"' in info
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
        client.become_ready(READY)
        await looks()
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


def test_an_engine_that_dies_asleep_falls_asleep_again(monkeypatch):
    async def test(engine, client):
        await engine.sleep(2)
        client.settings["on_recovery"](Recovery("killed", 0, 0.5))
        while len(client.sleeps) < 2:
            await asyncio.sleep(0.001)
        assert client.sleeps == [("sleep", 2, "abort"), ("sleep", 2, "keep")]
        await engine.wake_up()
        client.settings["on_recovery"](Recovery("killed", 0, 0.5))
        await looks()
        assert len(client.sleeps) == 3

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


def test_an_engine_may_be_made_before_there_is_an_event_loop(monkeypatch):
    monkeypatch.setattr(start, "Supervisor", Client)
    monkeypatch.setattr(start, "CoreLauncher", lambda config, path, **settings: settings)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs())
    client = engine._client
    assert client.launcher["log_level"] == "warning"

    async def ask():
        engine._client.become_ready(READY)
        await engine.wait_ready()
        await engine.abort("r")

    asyncio.run(ask())
    for call in (engine.wait_ready, engine.reset_prefix_cache):
        with pytest.raises(ConfigError, match="event loop"):
            asyncio.run(call())
    engine.shutdown()
    assert client.num_shutdowns == 1
    with pytest.raises(EngineDeadError, match="shut down"):
        asyncio.run(engine.check_health())

    async def end():
        await engine.shutdown()

    asyncio.run(end())
    assert client.num_shutdowns == 2


def test_an_engine_that_is_never_asked_ends(monkeypatch):
    monkeypatch.setattr(start, "Supervisor", Client)
    monkeypatch.setattr(start, "CoreLauncher", lambda config, path, **settings: settings)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs())
    assert engine._client.launcher["log_level"] == "error"
    engine.shutdown()
    assert engine._client.num_shutdowns == 1


class Several(Client):
    """Stand-in for several engines, whose number can be changed."""

    scaling = False
    elastic = property(lambda self: self)

    def __init__(self, launcher, unfinished, *, config, model, **settings):
        super().__init__(launcher, unfinished, **settings)
        self.sizes, self.may_go_on = [], asyncio.Event()

    def family_of(self, index):
        return [-1]

    async def scale(self, size):
        await self.may_go_on.wait()
        if size > 4:
            raise ScalingError("There is no room.")
        self.sizes.append(size)


def test_the_number_of_engines_is_changed_though_nobody_waits_for_it(monkeypatch):
    monkeypatch.setattr(data_parallel, "DataParallelClient", Several)

    async def test(engine, client):
        client.ready.set_result(READY)
        asking = asyncio.create_task(engine.scale(3))
        await until(lambda: len(engine._engines) == 3)
        asking.cancel()
        await asyncio.wait({asking})
        client.may_go_on.set()
        await until(lambda: client.sizes == [3])
        with pytest.raises(ScalingError, match="no room"):
            await engine.scale(5)
        assert len(engine._engines) == 3
        await engine.scale(1)
        assert len(engine._engines) == 1

    run(test, monkeypatch, {"enable_elastic_ep": True})


def test_engines_do_not_pause_while_their_number_changes(monkeypatch):
    """New engines would not know of it."""
    monkeypatch.setattr(data_parallel, "DataParallelClient", Several)

    async def test(engine, client):
        client.ready.set_result(READY)
        scaling = asyncio.create_task(engine.scale(3))
        await until(lambda: len(engine._engines) == 3)
        client.scaling = True
        with pytest.raises(ScalingBusyError):
            await engine.scale(2)
        client.scaling = False
        pausing = asyncio.create_task(engine.pause_generation(mode="keep", clear_cache=False))
        for _ in range(20):
            await asyncio.sleep(0)
        assert client.sleeps == []
        client.may_go_on.set()
        await scaling
        await pausing
        assert client.sleeps == [("sleep", 0, "keep")]
        with pytest.raises(ScalingError, match="wake them up first"):
            await engine.scale(2)
        assert client.sizes == [3]

    run(test, monkeypatch, {"enable_elastic_ep": True})


def test_the_number_of_engines_is_fixed(monkeypatch):
    async def test(engine, client):
        client.ready.set_result(READY)
        with pytest.raises(ScalingError, match="--enable-elastic-ep"):
            await engine.scale(2)

    run(test, monkeypatch)


def test_who_is_behind_catches_up(monkeypatch):
    """Available outputs of several steps are read at once, and none is lost."""

    async def test(engine, client):
        client.become_ready(READY)
        params = SamplingParams(max_tokens=100, output_kind=RequestOutputKind.DELTA)
        chunks = []

        async def read():
            async for output in engine.generate({"prompt_token_ids": [97]}, params, "r"):
                chunks.append(list(output.outputs[0].token_ids))

        reading = asyncio.create_task(read())
        await until(lambda: client.sent)
        for token in range(97, 117):
            client.said.put_nowait(EngineCoreOutputs([EngineCoreOutput("r", [token])], None, 1.0))
        end = EngineCoreOutput("r", [117], finish_reason=FinishReason.LENGTH)
        client.said.put_nowait(EngineCoreOutputs([end], None, 1.0))
        client.said.put_nowait(EngineDeadError("it died"))
        await reading
        assert [token for chunk in chunks for token in chunk] == list(range(97, 118))
        assert len(chunks) <= 3  # of 8, 8 and 5 steps
        await until(lambda: engine.errored)

    run(test, monkeypatch)
