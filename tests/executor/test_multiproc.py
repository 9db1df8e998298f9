"""Workers in processes: every rank receives every message; failures of workers."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from octavo.checkpoints.registry import open_checkpoint
from octavo.config import BUILTIN_MODEL, EngineConfig
from octavo.errors import (
    ConfigError,
    EngineDeadError,
    EngineStoppedError,
    ModelError,
    StepLostError,
    UnsupportedError,
)
from octavo.executor import multiproc
from octavo.executor.multiproc import MultiprocExecutor
from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups
from octavo.messages import GrammarOutput, ScheduledRequest, SchedulerOutput
from octavo.models.hub import resolve_model
from octavo.models.registry import read_spec
from octavo.plan.memory import Scratch
from octavo.plan.setup import WorkerSetup
from octavo.platforms.cpu import CPUPlatform
from octavo.system.distributed import Rank

PATH = resolve_model(BUILTIN_MODEL)
SPEC = read_spec(open_checkpoint(PATH))
FAKES = "tests.executor.fake_worker"


def make_setup(**settings):
    config = EngineConfig.from_kwargs(distributed_executor_backend="mp", **settings)
    return WorkerSetup(config, SPEC, PATH, "float32", 64, 32)


def make(world_size=2, worker="FakeWorker"):
    setup = make_setup(tensor_parallel_size=world_size)
    setup = replace(setup, rank=Rank(0, world_size), scratches=(Scratch(0, 0, 0),))
    return MultiprocExecutor(setup, CPUPlatform(), worker_cls=f"{FAKES}.{worker}")


def work(*ids, tokens=1, drafts=0):
    requests = [ScheduledRequest(i, 1 + drafts, num_drafts=drafts) for i in ids]
    return SchedulerOutput(requests, tokens)


def run(executor, *args, **kwargs):
    return executor.execute(work(*args, **kwargs)).sample().result(100)


def run_until_it_fails(executor, *ids):
    """Run a step in which one rank fails, and others, because rank 0 may be faster."""
    run(executor, *ids)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        run(executor, "a")
        time.sleep(0.02)


def _is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids, seconds=60.0):
    """Return whether all processes end in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(map(_is_alive, pids)):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def four():
    executor = make(4)
    yield executor
    pids = executor.pids
    executor.shutdown()
    executor.shutdown()
    assert not any(map(psutil.pid_exists, pids))


@pytest.fixture(scope="module")
def one():
    executor = make(1)
    yield executor
    executor.shutdown()


def check_messages(executor, num_workers):
    """Check that every rank gets every message in order, and that rank 0 answers."""
    executor.initialize_kv_cache(KVCacheConfig(9, 16, make_kv_cache_groups(SPEC.caches)))
    steps = []
    for i in range(40):
        steps.append(executor.execute(work("a", str(i), tokens=i)))
        steps[-1] = steps[-1].sample(GrammarOutput([str(i)], bytes(300_000)) if i % 2 else None)
    outputs = [step.result(20) for step in steps]
    assert [output.req_ids for output in outputs] == [["a", str(i)] for i in range(40)]
    assert {tokens[0] for output in outputs for tokens in output.sampled_token_ids} == {0}
    expected = [["initialize", 9, 1]]
    for i in range(40):
        expected += [["execute", i, ["a", str(i)]], ["sample", [str(i)] if i % 2 else None]]
    assert executor.collective_rpc("history") == [expected] * num_workers


class TestFourWorkers:
    def test_every_rank_gets_every_message_in_order_and_rank_0_answers(self, four):
        assert four.max_in_flight == 2
        check_messages(four, 4)

    def test_methods_are_called_by_name(self, four):
        answers = four.collective_rpc("describe", args=(1, "a"), kwargs={"b": [None, 2.5]})
        rest = [4, SPEC.architecture, [1, "a"], {"b": [None, 2.5]}]
        assert answers == [[rank, *rest] for rank in range(4)]
        assert four.measure_memory().nbytes("runtime") == 3, "the one with least room"
        with pytest.raises(ConfigError, match="num_threads=0 is wrong"):
            four.collective_rpc("refuse")

    def test_what_cannot_travel_is_refused(self, four):
        for method, args in (
            (lambda worker: 1, ()),
            ("_private", ()),
            ("no_such", ()),
            ("give_object", ()),
            ("describe", (object(),)),
            ("describe", (2**70,)),
        ):
            with pytest.raises(UnsupportedError):
                four.collective_rpc(method, args=args)
        assert len(four.collective_rpc("describe")) == 4

    def test_a_call_may_take_too_long(self, four):
        with pytest.raises(TimeoutError):
            four.collective_rpc("rest", 0.1, (0.5,))
        assert len(four.collective_rpc("describe", 20)) == 4


class TestOneWorker:
    def test_drafts_come_when_the_step_begins(self, one):
        step = one.execute(work("a", "wait a little", drafts=2))
        assert step.drafts() == {"a": [7, 7], "wait a little": [7, 7]}
        assert step.sample().result(20).req_ids == ["a", "wait a little"]
        step = one.execute(work("a"))
        assert step.drafts() == {}
        step.sample().result(100)

    def test_tokens_on_their_way_hold_up_no_step(self, one):
        late, next_one = one.execute(work("late")).sample(), one.execute(work("b")).sample()
        assert next_one.result(20).req_ids == ["b"]
        assert not late.done()
        assert late.result(20).req_ids == ["late"]

    def test_a_step_that_fails_is_only_that(self, one):
        for i in range(3):
            with pytest.raises(ValueError, match="the forward pass broke"):
                run(one, "fail", str(i))
            assert run(one, str(i)).req_ids == [str(i)]
        with pytest.raises(MemoryError):
            run(one, "memory")
        with pytest.raises(EngineDeadError, match="no GPU"):
            run(one, "lost device")
        step = one.execute(work("fail early", drafts=1))
        with pytest.raises(ValueError, match="no drafts"):
            step.drafts()
        with pytest.raises(ValueError, match="no drafts"):
            step.sample().result(100)
        assert run(one, "a").req_ids == ["a"]


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, r"worker 1 \(pid \d+\) was killed by SIGKILL.*last submitted step was 2"),
        (signal.SIGSTOP, r"worker 1 \(pid \d+\) is stopped by a signal"),
    ],
)
def test_a_worker_that_is_gone_or_stopped_is_found_and_named(number, reason):
    executor, told = make(), []
    pids = executor.pids
    executor.register_failure_callback(told.append)
    run(executor, "a")
    step = executor.execute(work("wait", drafts=1))
    result = step.sample()
    os.kill(pids[1], number)
    with pytest.raises(EngineDeadError, match=reason) as caught:
        result.result(50)  # less than the step takes
    assert isinstance(caught.value, EngineStoppedError) == (number == signal.SIGSTOP)
    for call in (
        lambda: executor.execute(work("b")),
        step.sample,
        lambda: executor.collective_rpc("describe"),
    ):
        with pytest.raises(EngineDeadError, match=reason):
            call()
    assert gone(pids), "the others have ended, too"
    executor.register_failure_callback(told.append)
    assert len(told) == 2
    executor.shutdown()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("exit 1", r"worker 1 \(pid \d+\) ended with status 3; the last submitted step was 1"),
        ("fail 1", r"worker 1 .*failed in step 1: ValueError: the forward pass broke"),
        ("fail 0", r"worker 0 .*failed in step 1: ValueError: the forward pass broke"),
    ],
)
def test_workers_that_may_differ_are_the_engine_s_end(name, reason):
    executor = make()

    with pytest.raises(EngineDeadError, match=reason):
        run_until_it_fails(executor, name, "wait" if name.startswith("exit") else "a")
    executor.shutdown()


def test_a_step_that_all_workers_have_lost_is_lost_alone():
    executor = make()
    steps = [executor.execute(work(name)).sample() for name in ("a", "lost", "a")]
    with pytest.raises(StepLostError, match="an engine died"):
        steps[1].result(20)
    assert steps[2].result(20).req_ids == ["a"]
    executor.shutdown()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_ends_with_another_engine_blames_no_request(rank):
    executor = make()

    with pytest.raises(EngineStoppedError, match=rf"worker {rank} .* ended: an engine died"):
        run_until_it_fails(executor, f"ends {rank}")
    executor.shutdown()


@pytest.mark.parametrize(
    ("worker", "error", "reason"),
    [
        ("Refusing", ConfigError, "^num_threads=4000 is too many$"),
        ("WithoutModel", ModelError, "^config.json is gone$"),
        ("Broken", EngineDeadError, r"worker 1 \(pid \d+\) could not start: ValueError: who knows"),
        ("Crashing", EngineDeadError, r"worker \d .* ended with status 4"),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(worker, error, reason):
    gc.collect()  # objects of earlier tests
    before, children = set(os.listdir("/proc/self/fd")), psutil.Process().children()
    with pytest.raises(error, match=reason):
        make(2, worker)
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before
    assert psutil.Process().children() == children


def test_logs_tell_the_rank(capfd):
    executor = make()
    executor.collective_rpc("log", args=("hello",))
    executor.shutdown()
    lines = [line.partition("WARNING ")[2] for line in capfd.readouterr().err.splitlines()]
    assert sorted(lines) == ["hello rank=0", "hello rank=1"]


def test_no_room_for_a_process_leaves_nothing(monkeypatch):
    popen, before = subprocess.Popen, set(os.listdir("/proc/self/fd"))
    started = []

    def refuse(*args, **kwargs):
        if started:
            raise OSError(12, "no room")
        started.append(popen(*args, **kwargs))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(OSError, match="no room"):
        make()
    assert started[0].poll() is not None
    del started[:]
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


def test_spare_processes_are_used_unless_they_are_dead_or_stopped():
    before = set(os.listdir("/proc/self/fd"))
    multiproc.make_spares(4)
    spares = [spare.popen.pid for spare in multiproc._spares]
    os.kill(spares[-1], signal.SIGSTOP)
    os.kill(spares[-2], signal.SIGKILL)
    os.waitid(os.P_PID, spares[-1], os.WSTOPPED | os.WNOWAIT)
    os.waitid(os.P_PID, spares[-2], os.WEXITED | os.WNOWAIT)
    executor = make(3)
    assert executor.pids[:2] == [spares[1], spares[0]]
    assert not any(map(psutil.pid_exists, spares[2:]))
    assert run(executor, "a").sampled_token_ids
    executor.shutdown()
    del executor
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


def test_shutdown_lets_go_of_a_worker_that_computes(monkeypatch):
    monkeypatch.setattr("octavo.executor.multiproc._END_SECONDS", 0.3)
    executor = make(1)
    pids, threads = executor.pids, threading.active_count()
    result = executor.execute(work("wait")).sample()
    executor.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        result.result(0)
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.execute(work("b"))
    assert gone(pids, 0.1)
    assert threading.active_count() == threads - 1


def test_an_executor_that_is_forgotten_ends_its_workers():
    executor = make(1)
    pids = executor.pids
    del executor
    gc.collect()
    assert gone(pids)


PARENT = """
import os, signal, sys, time
from tests.executor.test_multiproc import make, work
executor = make(2)
executor.execute(work("wait"))
if sys.argv[1] == "stopped":
    os.kill(executor.pids[1], signal.SIGSTOP)
print(*executor.pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("state", ["computing", "stopped"])
def test_workers_go_with_their_parent(state):
    done = subprocess.run(
        [sys.executable, "-c", PARENT, state],
        stdout=subprocess.PIPE,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert gone(pids)
