"""In-process executor: order, failures, and release of memory."""

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, EngineDeadError
from octavo.executor import uniproc
from octavo.executor.uniproc import UniProcExecutor
from octavo.messages import SchedulerOutput


class Pending:
    def __init__(self, output, on_its_way=False):
        self.output, self.on_its_way = output, on_its_way
        self.thread = None

    def ready(self):
        return not self.on_its_way

    def get(self):
        self.thread = threading.current_thread().name
        if isinstance(self.output, Exception):
            raise self.output
        return self.output


def make_executor(async_scheduling=True):
    return UniProcExecutor(
        SimpleNamespace(max_in_flight=1 + async_scheduling, expert_memory=()), None
    )


class RecordingWorker:
    def __init__(self, setup, platform):
        self.calls = []
        self.threads = {threading.current_thread().name}

    def execute_model(self, scheduler_output, announce):
        self.threads.add(threading.current_thread().name)
        self.calls.append(("execute", scheduler_output.total_num_scheduled_tokens))

    def sample_tokens(self, grammar):
        self.calls.append(("sample", grammar))
        return Pending(len(self.calls))

    def cause(self, error):
        return EngineDeadError("no GPU") if "illegal" in str(error) else error

    def shutdown(self):
        self.calls.append(("shutdown", None))


def test_steps_run_in_order_on_one_thread(monkeypatch):
    monkeypatch.setattr(uniproc, "Worker", RecordingWorker)
    executor = make_executor()
    futures = []
    for i in range(5):
        step = executor.execute(SchedulerOutput(total_num_scheduled_tokens=i))
        futures.append(step.sample(f"grammar {i}"))
    assert [f.result() for f in futures] == [2, 4, 6, 8, 10]
    worker = executor._worker
    assert [n for kind, n in worker.calls if kind == "execute"] == [0, 1, 2, 3, 4]
    assert [g for kind, g in worker.calls if kind == "sample"] == [f"grammar {i}" for i in range(5)]
    assert len(worker.threads) == 1
    assert threading.current_thread().name not in worker.threads
    executor.shutdown()
    executor.shutdown()
    assert worker.calls[-1] == ("shutdown", None)


def test_tokens_on_their_way_hold_up_no_step(monkeypatch):
    arrived = threading.Event()

    class Slow(Pending):
        def get(self):
            arrived.wait(60)
            return super().get()

    class Worker(RecordingWorker):
        def sample_tokens(self, grammar):
            super().sample_tokens(grammar)
            return Slow(len(self.calls), on_its_way=True)

    monkeypatch.setattr(uniproc, "Worker", Worker)
    executor = make_executor()
    first = executor.execute(SchedulerOutput()).sample()
    executor.execute(SchedulerOutput())._forward.result(60)
    assert not first.done()
    arrived.set()
    assert first.result(60) == 2
    executor.shutdown()


def test_shutdown_waits_for_the_step_under_way_only(monkeypatch):
    started, go_on = threading.Event(), threading.Event()

    class Worker(RecordingWorker):
        def execute_model(self, scheduler_output, announce):
            started.set()
            go_on.wait(60)

    monkeypatch.setattr(uniproc, "Worker", Worker)
    executor = make_executor()
    first, second = (executor.execute(SchedulerOutput())._forward for _ in range(2))
    assert started.wait(60)
    second.add_done_callback(lambda _: go_on.set())
    executor.shutdown()
    assert second.cancelled()
    assert first.result(60) is None
    assert executor._worker.calls == [("shutdown", None)]


@pytest.mark.parametrize("on_its_way", [False, True])
def test_a_failure_reaches_the_caller(on_its_way, monkeypatch):
    class Worker(RecordingWorker):
        def sample_tokens(self, grammar):
            return Pending(ValueError("lost"), on_its_way)

    monkeypatch.setattr(uniproc, "Worker", Worker)
    executor = make_executor()
    with pytest.raises(ValueError, match="lost"):
        executor.execute(SchedulerOutput()).sample().result(60)
    executor.shutdown()


@pytest.mark.parametrize("message", ["the forward pass broke", "illegal memory access"])
def test_a_forward_pass_that_failed_is_the_cause_and_what_it_left_is_let_go(message, monkeypatch):
    class Worker(RecordingWorker):
        def execute_model(self, scheduler_output, announce):
            raise ValueError(message)

        def sample_tokens(self, grammar):
            super().sample_tokens(grammar)
            raise AssertionError("there is nothing to sample")

    monkeypatch.setattr(uniproc, "Worker", Worker)
    executor = make_executor()
    failure = executor.execute(SchedulerOutput()).sample().exception(10)
    if "illegal" in message:
        assert isinstance(failure, EngineDeadError)
    else:
        assert str(failure) == message
    assert executor._worker.calls == [("sample", None)]
    executor.shutdown()


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_in_flight(ahead, monkeypatch):
    monkeypatch.setattr(uniproc, "Worker", RecordingWorker)
    executor = make_executor(async_scheduling=ahead)
    assert executor.max_in_flight == 1 + ahead
    executor.shutdown()


def test_a_failure_to_ask_whether_tokens_have_come_reaches_the_caller(monkeypatch):
    class Broken(Pending):
        def ready(self):
            raise RuntimeError("illegal memory access")

    class Worker(RecordingWorker):
        def sample_tokens(self, grammar):
            return Broken(None)

    monkeypatch.setattr(uniproc, "Worker", Worker)
    executor = make_executor()
    with pytest.raises(EngineDeadError, match="no GPU"):
        executor.execute(SchedulerOutput()).sample().result(60)
    executor.shutdown()


def test_a_worker_that_cannot_start_says_why():
    with pytest.raises(ConfigError, match="num_threads=4000"):
        LLM(num_threads=4000)


def test_shutdown_gives_the_model_back():
    llm = LLM(max_model_len=128)
    llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)
    runner = weakref.ref(llm._client.core.executor._worker.runner)
    llm.shutdown()
    gc.collect()
    assert runner() is None
