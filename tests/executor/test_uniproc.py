"""The in-process executor: order, failures, and giving memory back."""

import gc
import threading
import weakref

import pytest

from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineDeadError
from octavo.executor import uniproc
from octavo.executor.base import get_executor_class
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


class RecordingWorker:
    def __init__(self, setup):
        self.calls = []
        self.threads = {threading.current_thread().name}

    def execute_model(self, scheduler_output):
        self.threads.add(threading.current_thread().name)
        self.calls.append(("execute", scheduler_output.total_num_scheduled_tokens))

    def sample_tokens(self):
        self.calls.append(("sample", None))
        return Pending(len(self.calls))

    def cause(self, error):
        return EngineDeadError("no GPU") if "illegal" in str(error) else error

    def shutdown(self):
        self.calls.append(("shutdown", None))


def test_steps_run_in_order_on_one_thread(monkeypatch):
    monkeypatch.setattr(uniproc, "Worker", RecordingWorker)
    executor = UniProcExecutor(None)
    futures = []
    for i in range(5):
        executor.execute_model(SchedulerOutput(total_num_scheduled_tokens=i))
        futures.append(executor.sample_tokens())
    assert [f.result() for f in futures] == [2, 4, 6, 8, 10]
    worker = executor._worker
    assert [n for kind, n in worker.calls if kind == "execute"] == [0, 1, 2, 3, 4]
    assert len(worker.threads) == 1
    assert threading.current_thread().name not in worker.threads
    executor.shutdown()
    executor.shutdown()
    assert worker.calls[-1] == ("shutdown", None)


def test_tokens_on_their_way_hold_up_no_step(monkeypatch):
    arrived = threading.Event()

    class Slow(Pending):
        def get(self):
            arrived.wait(10)
            return super().get()

    class Worker(RecordingWorker):
        def sample_tokens(self):
            super().sample_tokens()
            return Slow(len(self.calls), on_its_way=True)

    monkeypatch.setattr(uniproc, "Worker", Worker)
    executor = UniProcExecutor(None)
    first = executor.sample_tokens()
    executor.execute_model(SchedulerOutput()).result(10)
    assert not first.done()
    arrived.set()
    assert first.result(10) == 1
    executor.shutdown()


def test_shutdown_waits_for_the_step_under_way_only(monkeypatch):
    started, go_on = threading.Event(), threading.Event()

    class Worker(RecordingWorker):
        def execute_model(self, scheduler_output):
            started.set()
            go_on.wait(10)

    monkeypatch.setattr(uniproc, "Worker", Worker)
    executor = UniProcExecutor(None)
    first, second = (executor.execute_model(SchedulerOutput()) for _ in range(2))
    assert started.wait(10)
    second.add_done_callback(lambda _: go_on.set())
    executor.shutdown()
    assert second.cancelled()
    assert first.result(10) is None
    assert executor._worker.calls == [("shutdown", None)]


@pytest.mark.parametrize("on_its_way", [False, True])
def test_a_failure_reaches_the_caller(on_its_way, monkeypatch):
    class Worker(RecordingWorker):
        def sample_tokens(self):
            return Pending(ValueError("lost"), on_its_way)

    monkeypatch.setattr(uniproc, "Worker", Worker)
    executor = UniProcExecutor(None)
    with pytest.raises(ValueError, match="lost"):
        executor.sample_tokens().result(10)
    executor.shutdown()


def test_a_failure_to_ask_whether_tokens_have_come_reaches_the_caller(monkeypatch):
    class Broken(Pending):
        def ready(self):
            raise RuntimeError("illegal memory access")

    class Worker(RecordingWorker):
        def sample_tokens(self):
            return Broken(None)

        def execute_model(self, scheduler_output):
            raise RuntimeError("illegal memory access")

    monkeypatch.setattr(uniproc, "Worker", Worker)
    executor = UniProcExecutor(None)
    with pytest.raises(EngineDeadError, match="no GPU"):
        executor.sample_tokens().result(10)
    with pytest.raises(EngineDeadError, match="no GPU"):
        executor.execute_model(SchedulerOutput()).result(10)
    executor.shutdown()


def test_a_worker_that_cannot_start_says_why():
    with pytest.raises(ConfigError, match="num_threads=4000"):
        LLM(num_threads=4000)


def test_shutdown_gives_the_model_back():
    llm = LLM(max_model_len=128)
    llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)
    runner = weakref.ref(llm._core.executor._worker.runner)
    llm.shutdown()
    gc.collect()
    assert runner() is None


@pytest.mark.parametrize("collecting", [True, False])
def test_the_import_leaves_garbage_collection_as_it_was(collecting):
    try:
        if not collecting:
            gc.disable()
        assert get_executor_class(EngineConfig()) is UniProcExecutor
        assert gc.isenabled() == collecting
    finally:
        gc.enable()
