"""Engine core in its own process: failures, the parent's death, utility calls."""

import asyncio
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import msgspec
import psutil
import pytest
import zmq

from octavo.checkpoints.registry import open_checkpoint
from octavo.config import BUILTIN_MODEL, EngineConfig
from octavo.config.engine_args import AsyncEngineArgs
from octavo.engine.core_messages import CoreProcessSetup, CoreReady
from octavo.engine.core_process import _BusyLoop
from octavo.errors import (
    EngineDeadError,
    ModelError,
    OctavoError,
    ProfilerError,
    RequestError,
    StepFailedError,
)
from octavo.fleet.core_launcher import CoreLauncher
from octavo.fleet.mp_client import AsyncMPClient
from octavo.fleet.start import EngineProcesses
from octavo.frontend.async_llm import AsyncLLM
from octavo.messages import GrammarSpec
from octavo.models.hub import resolve_model
from octavo.models.registry import read_spec
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from octavo.system.device import SWITCH_INTERVAL
from tests.plan.plans import make_plan

CONFIG = {"max_model_len": 256, "kv_cache_memory_bytes": "8M", "max_num_seqs": 8}


async def start(progress_timeout: float = 60.0, restarts: int = 5, **settings: object) -> AsyncLLM:
    return await AsyncLLM.start(
        EngineConfig.from_kwargs(**{**CONFIG, **settings}),
        EngineProcesses(progress_timeout, restarts, warm_spare=False),
    )


def run(test, **settings):
    """Run a coroutine function with a dedicated engine, just started."""

    async def main():
        engine = await start(**settings)
        try:
            return await test(engine)
        finally:
            await engine.shutdown()

    return asyncio.run(main())


@pytest.fixture(scope="module")
def run_shared():
    """Run a coroutine function with the engine that tests share if they restore its state."""

    async def end():
        await engine.shutdown()

    with asyncio.Runner() as runner:
        engine = runner.run(start(progress_timeout=600.0))  # no test listens between the tests
        yield lambda test: runner.run(test(engine))
        runner.run(end())


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


def test_a_closed_stream_stops_the_request(run_shared):
    async def test(engine):
        stream = engine.generate("The", SamplingParams(max_tokens=200, ignore_eos=True), "a")
        await anext(stream)
        await stream.aclose()
        assert engine.num_unfinished_requests == 0
        assert await collect(engine, "b", max_tokens=3)
        assert engine.stats.num_used_blocks == 0

    run_shared(test)


@pytest.mark.parametrize(("live_n", "other_n"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_an_id_in_use_is_refused_and_the_live_request_goes_on(live_n, other_n, run_shared):
    async def test(engine):
        params = SamplingParams(
            max_tokens=30, ignore_eos=True, output_kind=RequestOutputKind.DELTA, n=live_n
        )
        live = engine.generate("The", params, "a")
        counts = [0] * live_n

        def count(output):
            for answer in output.outputs:
                counts[answer.index] += len(answer.token_ids)

        count(await anext(live))
        for _ in range(3):
            with pytest.raises(RequestError, match="'a'") as caught:
                await anext(engine.generate("Another", SamplingParams(n=other_n), "a"))
            assert caught.value.param == "request_id"
        async for output in live:
            count(output)
        assert counts == [30] * live_n
        assert await collect(engine, "a", max_tokens=3)  # free again

    run_shared(test)


def test_a_late_consumer_does_not_end_the_next_request_of_its_id(run_shared):
    async def test(engine):
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        late = engine.generate("The", params, "a")
        await anext(late)
        while engine.num_unfinished_requests:
            await asyncio.sleep(0.01)
        longer = SamplingParams(max_tokens=30, ignore_eos=True)
        second = engine.generate("The", longer, "a")
        await anext(second)
        await late.aclose()  # never took its last output
        async for output in second:
            last = output
        assert len(last.outputs[0].token_ids) == 30
        assert last.outputs[0].finish_reason == "length"

    run_shared(test)


def test_a_stop_text_ends_the_request_in_the_core_too():
    async def test(engine):
        params = {"stop": ["e"], "max_tokens": 200, "ignore_eos": True}
        await collect(engine, "a", **params)
        stats = SchedulerStats(*await engine._client.call_utility("stats"))
        assert (stats.num_running_reqs, stats.num_waiting_reqs) == (0, 0)
        assert stats.num_scheduled_tokens < 100

    run(test)


def test_a_request_whose_engine_dies_while_it_is_prepared_fails():
    async def test(engine):
        await engine.wait_ready()
        started, go_on = threading.Event(), threading.Event()
        process = engine._input_processor.process

        def slow(*args, **kwargs):
            started.set()
            assert go_on.wait(60)
            return process(*args, **kwargs)

        engine._input_processor.process = slow
        prompt = "word " * 10_000  # long: prepared on a thread
        params = SamplingParams(truncate_prompt_tokens=5)
        request = asyncio.ensure_future(anext(engine.generate(prompt, params, "a")))
        await asyncio.to_thread(started.wait, 60)
        os.kill(engine._client.pid, signal.SIGKILL)
        while engine.health().ok:
            await asyncio.sleep(0.01)
        go_on.set()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await asyncio.wait_for(request, 60)

    run(test, restarts=0)


def test_a_context_that_came_out_shorter_counts_for_requests():
    async def test(engine):
        await engine.wait_ready()
        assert engine.max_model_len < 2048
        prompt = list(range(100, 100 + engine.max_model_len + 50))
        params = SamplingParams(max_tokens=3, truncate_prompt_tokens=-1, ignore_eos=True)
        async for output in engine.generate(prompt, params, "a"):
            last = output
        assert last.prompt_token_ids == prompt[-(engine.max_model_len - 3) :]
        assert len(last.outputs[0].token_ids) == 3

    run(test, max_model_len=-1, kv_cache_memory_bytes="4M")


@pytest.mark.parametrize(("restarts", "error"), [(0, EngineDeadError), (1, StepFailedError)])
def test_calls_that_wait_fail_with_the_engine(restarts, error):
    async def test(engine):
        await engine.wait_ready()
        os.kill(engine._client.pid, signal.SIGSTOP)
        call = asyncio.ensure_future(engine.reset_prefix_cache())
        await asyncio.sleep(0.05)
        assert not call.done()
        os.kill(engine._client.pid, signal.SIGKILL)
        with pytest.raises(error):
            await asyncio.wait_for(call, 60)
        assert engine.is_running == bool(restarts)

    run(test, restarts=restarts)


def test_a_call_that_nobody_waits_for_any_more_harms_nothing(run_shared):
    async def test(engine):
        await engine.wait_ready()
        call = asyncio.ensure_future(engine.reset_prefix_cache())
        await asyncio.sleep(0)  # it is sent
        call.cancel()
        assert await engine.reset_prefix_cache()  # answered after the other one
        assert len(await collect(engine, "a", max_tokens=3)) > 0
        assert engine.health().ok

    run_shared(test)


def test_a_death_while_the_model_loads_is_told_to_who_waits_for_it():
    async def test(engine):
        waiting = asyncio.ensure_future(engine.wait_ready())
        os.kill(engine._client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await asyncio.wait_for(waiting, 60)

    run(test)


def launcher(config):
    return CoreLauncher(
        config,
        resolve_model(BUILTIN_MODEL),
        default_batched_tokens=512,
        request_memory=2**30,
        warm_spare=None,
        log_level="info",
        log_format="text",
    )


def test_the_last_words_of_a_process_that_ended_are_heard():
    """Its message may arrive after one look at the socket and before one at the process."""

    async def main():
        config = EngineConfig.from_kwargs(**{**CONFIG, "num_threads": 1000})
        client = AsyncMPClient(launcher(config).launch(None))
        receive, looks = client._channel.receive, []

        async def receive_but_the_first(seconds):
            looks.append(seconds)
            if len(looks) == 1:
                await asyncio.to_thread(client.process._process.wait)
                return None
            return await receive(seconds or 1.0)  # the sent data is in transit

        client._channel.receive = receive_but_the_first
        with pytest.raises(EngineDeadError, match="num_threads=1000"):
            await client.get_output()
        await client.shutdown()

    asyncio.run(main())


def test_messages_are_handled_between_two_steps():
    class Core:
        handled = 0
        steps: ClassVar[list[int]] = []

        def has_work(self):
            return len(self.steps) < 2

        def step(self):
            self.steps.append(self.handled)

        def abort_requests(self, request_ids):
            self.handled += 1

        def check_integrity(self):
            pass

        def seconds_to_deadline(self):
            return None

    inputs: queue.SimpleQueue[object] = queue.SimpleQueue()
    for _ in range(5):
        inputs.put(["a"])
    core, outputs = Core(), queue.SimpleQueue()
    loop = _BusyLoop(core, inputs, outputs)
    core.check_integrity = lambda: inputs.put(None)  # idle: end
    loop.run()
    assert core.steps == [5, 5]


def test_a_deadline_in_a_far_future_ends_nobody(run_shared):
    async def test(engine):
        far = time.monotonic() + 2**53 / 1000
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        async for _ in engine.generate("The", params, "a", deadline=far):
            pass
        await engine._client.call_utility("stats")  # afterwards the loop is idle again
        assert await collect(engine, "b", max_tokens=3)

    run_shared(test)


@pytest.mark.parametrize("seconds", [0.05, 1e13])
def test_a_wait_is_no_longer_than_a_thread_can_wait(seconds):
    class Core:
        def has_work(self):
            return False

        def seconds_to_deadline(self):
            inputs.put(None)
            return seconds

        def check_integrity(self):
            pass

    inputs = queue.SimpleQueue()
    _BusyLoop(Core(), inputs, queue.SimpleQueue()).run()


def test_while_nothing_can_be_done_the_loop_sleeps_until_a_deadline():
    class Core:
        """Core with a request, whose deadline passes after a tenth of a second."""

        asked = 0
        ends = time.monotonic() + 0.1
        stepped = False

        def has_work(self):
            self.asked += 1
            return not self.stepped and time.monotonic() >= self.ends

        def seconds_to_deadline(self):
            return None if self.stepped else max(0.0, self.ends - time.monotonic())

        def step(self):
            self.stepped = True
            inputs.put(None)  # the last message

        def abort_requests(self, request_ids):
            assert not request_ids

        def check_integrity(self):
            pass

    inputs, core = queue.SimpleQueue(), Core()
    _BusyLoop(core, inputs, queue.SimpleQueue()).run()
    assert core.stepped
    assert core.asked < 10, "it spins"


def test_a_grammar_that_is_compiled_wakes_the_idle_engine():
    grammars = {
        "good": GrammarSpec("choice", '["yes, please", "no, thank you"]'),
        "bad": GrammarSpec("regex", "(a"),
    }

    async def test(engine):
        process = engine._input_processor.process

        def with_grammar(request_id, *args, **kwargs):
            request, text = process(request_id, *args, **kwargs)
            request.sampling_params = msgspec.structs.replace(
                request.sampling_params, grammar=grammars[request_id]
            )
            return request, text

        engine._input_processor.process = with_grammar
        assert await collect(engine, "good", max_tokens=30) in ("yes, please", "no, thank you")
        with pytest.raises(RequestError, match=r"has an unclosed \("):
            await collect(engine, "bad")
        assert await collect(engine, "good", max_tokens=30)
        assert engine.health().ok

    run(test)


def test_an_engine_that_is_killed_fails_its_requests_with_the_cause():
    async def test(engine):
        await engine.wait_ready()
        # Long: on a busy machine the engine makes many tokens before it is killed.
        stream = engine.generate("The", SamplingParams(max_tokens=2000, ignore_eos=True), "a")
        await anext(stream)
        os.kill(engine._client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            async for _ in stream:
                pass
        assert not engine.health().ok
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await anext(engine.generate("The", SamplingParams(), "b"))

    run(test, restarts=0, max_model_len=2048)


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

    before = set(psutil.Process().children())
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        asyncio.run(main())
    started = set(psutil.Process().children()) - before
    assert not [c for c in started if "octavo.engine.core_process" in c.cmdline()]


KINDS = [
    {"temperature": 0.0},
    {"n": 3, "stop": [" the"]},
    {"prompt_logprobs": 3, "presence_penalty": 1.0, "repetition_penalty": 1.3},
    {"bad_words": ["was"], "min_tokens": 40, "ignore_eos": False},
    {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{80}")},
]


async def answers(engine: AsyncLLM, deaths: list[signal.Signals]):
    """Return the last outputs of all kinds of request, while the engine dies in the middle."""
    deaths, num_deaths = deaths.copy(), len(deaths)

    async def answer(number: int):
        params = {"max_tokens": 60, "ignore_eos": True, "seed": 5, "logprobs": 2, **KINDS[number]}
        name = f"{number}-{time.monotonic()}"
        async for last in engine.generate("Once upon a time", SamplingParams(**params), name):
            due = 5 + 20 * (num_deaths - len(deaths))
            if number == 0 and deaths and len(last.outputs[0].token_ids) >= due:
                os.kill(engine._client.pid, deaths.pop())
        return last

    return await asyncio.gather(*map(answer, range(len(KINDS))))


def test_answers_are_the_same_when_engines_die():
    async def test(engine):
        wanted = await answers(engine, [])
        found = await answers(engine, [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV])
        for was, is_ in zip(wanted, found, strict=True):
            assert was.prompt_logprobs == is_.prompt_logprobs
            for a, b in zip(was.outputs, is_.outputs, strict=True):
                assert (a.text, a.token_ids, a.logprobs) == (b.text, b.token_ids, b.logprobs)
                assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
                assert a.cumulative_logprob == b.cumulative_logprob
        page = engine.metrics.render().decode()
        [count] = re.findall(r"engine_restarts_total{.*} (.*)", page)
        assert float(count) >= 3  # on a busy machine a process may seem stopped for this time, too

    run(test, progress_timeout=4.0)  # an engine may wait for a second on a busy machine


def test_a_bad_folder_is_refused_before_a_process_starts(tmp_path):
    async def main():
        await AsyncLLM.start(EngineConfig.from_kwargs(model=str(tmp_path)))

    with pytest.raises(ModelError, match=r"config\.json"):
        asyncio.run(main())


STAND_IN = """
import gc, json, signal, sys
from types import SimpleNamespace
from octavo.system import clock
from octavo.engine import core_process
from tests.plan.plans import make_plan

class Core:
    executor = SimpleNamespace(pids=[7], wave=None, register_failure_callback=lambda callback: None)
    def has_work(self):
        return False
    def check_integrity(self):
        pass
    def seconds_to_deadline(self):
        return None
    def shutdown(self):
        print(json.dumps({"frozen": gc.get_freeze_count() > 0}), flush=True)

def make_engine_core(config, spec, path, *, wake, **settings):
    signals = [signal.getsignal(n) == signal.SIG_IGN for n in (signal.SIGINT, signal.SIGTERM)]
    facts = {"path": str(path), "settings": settings, "interval": sys.getswitchinterval()}
    facts["epoch"] = clock.epoch()
    print(json.dumps({**facts, "ignored": signals, "layers": len(spec.layers)}), flush=True)
    return Core(), make_plan(5, 7)

core_process.make_engine_core = make_engine_core
core_process.main()
"""


def test_what_the_process_makes_of_itself(tmp_path):
    folder, model = tmp_path / "sockets", resolve_model(BUILTIN_MODEL)
    folder.mkdir()
    setup = msgspec.msgpack.encode(
        CoreProcessSetup(
            config=EngineConfig(),
            model_path=str(model),
            default_batched_tokens=512,
            request_memory=1000,
            warm_spare=None,
            input_address=f"ipc://{folder}/input",
            output_address=f"ipc://{folder}/output",
            log_level="info",
            log_format="text",
            engine_index=2,
            clock_epoch=-5.0,
        )
    )
    with zmq.Context() as context, context.socket(zmq.PULL) as output:
        output.bind(f"ipc://{folder}/output")
        process = subprocess.Popen(
            [sys.executable, "-c", STAND_IN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        process.stdin.write(len(setup).to_bytes(4, "little") + setup)
        process.stdin.flush()
        assert output.poll(60_000)
        assert output.recv_multipart() == [
            b"R",
            msgspec.msgpack.encode(CoreReady(make_plan(5, 7), [7])),
        ]
        said, _ = process.communicate(timeout=60)  # end of file: it must stop
        output.close(linger=0)
    assert process.returncode == 0
    assert not folder.exists()
    started, ended = map(json.loads, said.splitlines())
    assert started == {
        "path": str(model),
        "layers": len(read_spec(open_checkpoint(model)).layers),
        "settings": {
            "default_batched_tokens": 512,
            "request_memory": 1000,
            "warm_spare": None,
            "engine_index": 2,
            "memory_limit": None,
            "expert_memory": [],
            "machine": None,
            "listeners": [],
        },
        "interval": pytest.approx(SWITCH_INTERVAL),
        "epoch": -5.0,  # the parent's: the wall clock may have been set since
        "ignored": [True, True],  # a Ctrl-C in the terminal is for the parent
    }
    assert ended == {"frozen": True}


def test_the_engine_ends_with_its_parent():
    code = """
import asyncio
import contextlib
from octavo.config import EngineConfig
from octavo.system.device import SWITCH_INTERVAL
from octavo.frontend.async_llm import AsyncLLM
async def main():
    engine = await AsyncLLM.start(EngineConfig.from_kwargs(max_model_len=128))
    await engine.wait_ready()
    client = engine._client
    print(client.pid, client._launcher._spare.pid, client._client.process._folder.path, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    *numbers, folder = parent.stdout.readline().split()
    children = list(map(int, numbers))
    assert len(children) == 2
    assert Path(folder).exists()
    assert all(map(psutil.pid_exists, children))
    os.kill(children[0], signal.SIGSTOP)  # it sees nothing until it is continued
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while any(map(psutil.pid_exists, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, children))
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
            pid = engine._client.pid
        finally:
            await engine.shutdown()
        assert path == str(tmp_path / f"octavo-{pid}-1.trace.json")
        names = {e["name"] for e in json.loads(Path(path).read_text())["traceEvents"]}
        assert {"schedule", "forward", "attention", "update_from_output", "send_outputs"} <= names

    asyncio.run(test())


def test_without_a_folder_a_profile_is_refused(run_shared):
    async def test(engine):
        with pytest.raises(ProfilerError, match="profiler_dir"):
            await engine.start_profile()
        assert await collect(engine, "a", max_tokens=2)

    run_shared(test)


def test_an_unknown_utility_is_refused(run_shared):
    async def test(engine):
        with pytest.raises(OctavoError, match="utility method 'fly' does not exist"):
            await engine._client.call_utility("fly")

    run_shared(test)


def test_a_process_that_is_not_wanted_while_it_loads_ends_without_a_word(tmp_path, capfd):
    process = launcher(EngineConfig.from_kwargs(**CONFIG)).launch(None)
    process.shutdown()
    assert process.describe_exit() == "the engine process ended with status 1"
    assert capfd.readouterr().err == ""


def test_what_ended_an_engine_before_there_was_an_event_loop_is_said():
    args = AsyncEngineArgs(**CONFIG, num_threads=1000)
    engine = AsyncLLM.from_engine_args(args)
    while engine._client._client.process.describe_exit() is None:
        time.sleep(0.02)

    async def ask():
        with pytest.raises(EngineDeadError, match="num_threads=1000"):
            await collect(engine, "a", max_tokens=2)

    asyncio.run(ask())
    engine.shutdown()


def test_a_spare_that_imports_ends_with_its_parent_at_once(tmp_path):
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)\n")
    code = """
import time
from octavo.config import EngineConfig
from octavo.fleet.process import CoreProcess
spare = CoreProcess(warm=EngineConfig())
print(spare.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    with parent:
        spare = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.5)  # it may import its own modules still
        parent.kill()
    end = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):
        while spare.status() != psutil.STATUS_ZOMBIE:  # it may not have been reaped yet
            assert time.monotonic() < end
            time.sleep(0.02)
