"""Grammar processes: their allocation to tenants, and the reasons of their end."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace

import pytest

from octavo.errors import GrammarBusyError, GrammarError
from octavo.messages import GrammarSpec
from octavo.structured_output import compiler as module
from octavo.structured_output.client import PROCESS_NBYTES
from octavo.structured_output.compiler import GrammarCompiler, Placed, Ready, grammar_memory
from tests.structured_output.toys import ThreadHelper, ThreadProcess, ToyBackend, spec


def test_memory_counts_installed_backends_only():
    light, both = (
        grammar_memory(50_000, backends)
        for backends in (["llguidance"], ["llguidance", "xgrammar"])
    )
    assert light < 300 * 2**20
    assert both > light + 200 * 2**20


class Compilers:
    """Compiler with the toy backend, and its results."""

    def __init__(self):
        self.backend, self.results = ToyBackend(), queue.SimpleQueue()
        self.helper = ThreadHelper(self.backend, 40)
        self.compiler = GrammarCompiler(lambda name: self.helper, ["toy"], self.results.put)

    def begin(self, *texts, tenant=None, is_wanted=lambda: True, alone=True):
        for text in texts:
            self.compiler.compile((tenant, spec(text)), is_wanted, alone)

    def next(self):
        while not isinstance(ready := self.results.get(timeout=60), Ready):
            assert ready.fed is None  # a process has ended
        return ready

    def compiled(self, text, tenant=None, alone=True):
        self.begin(text, tenant=tenant, alone=alone)
        placed = self.next().result
        assert isinstance(placed, Placed), placed
        placed.process.live.discard(placed.hold)
        return placed.process

    def is_there(self, process):
        return self.compiler.use(process, 0)


@pytest.fixture
def grammars():
    found = Compilers()
    yield found
    found.backend.go.set()
    found.compiler.shutdown()
    found.helper.close()


def running(grammars, count):
    """Wait until `count` processes compile."""
    for _ in range(count):
        assert grammars.backend.running.acquire(timeout=60)


def test_a_tenants_grammars_delay_nobody_else(grammars):
    grammars.begin(*[f"slow {i}" for i in range(2, 9)], tenant="greedy")
    running(grammars, 2)
    for tenant in ("a", "b", None):
        assert grammars.compiled("3", tenant=tenant)
    assert len(grammars.backend.compiled) == 3  # of the greedy tenant two are running, five wait
    grammars.backend.go.set()
    assert {grammars.next().key[0] for _ in range(7)} == {"greedy"}


def test_many_tenants_keep_places_free(grammars):
    for i in range(4):
        grammars.begin("slow 2", "slow 3", tenant=str(i))
    running(grammars, 4)
    assert grammars.compiled("3", tenant="late")


def test_what_takes_too_long_is_killed(grammars):
    grammars.begin("slow 2")
    running(grammars, 1)
    [process] = grammars.helper.processes
    process.seconds = module.COMPILE_SECONDS + 1
    ready = grammars.next()
    assert type(ready.result) is GrammarError
    assert "more than 5 s of processor time to compile" in ready.result.message
    assert process.status is not None


def test_what_never_gets_its_turn_is_told_to_come_again(grammars, monkeypatch):
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.1)
    grammars.begin("slow 2", "slow 3", "4")
    errors = [grammars.next().result for _ in range(3)]
    assert [type(error) for error in errors] == [GrammarBusyError] * 3
    assert (errors[0].status, errors[0].retry_after) == (503, 5)


def test_the_start_of_a_helper_is_no_wait_for_a_turn(grammars, monkeypatch):
    watched, watch = [], GrammarCompiler._watch

    def noted(self, now):
        watch(self, now)
        watched.append(now)

    def wait_for_a_watch():
        count = len(watched)
        while len(watched) < count + 2:
            assert grammars.results.empty(), "a grammar was given up"
            time.sleep(0.001)

    monkeypatch.setattr(GrammarCompiler, "_watch", noted)
    monkeypatch.setattr(module, "START_SECONDS", 1e6)
    message = grammars.helper.socket.recv(2**16)  # it has not started yet
    grammars.begin("slow 2", "slow 3", "4")
    wait_for_a_watch()
    for job in (*grammars.compiler._running, *grammars.compiler._queues[None]):
        job.arrived -= 2 * module.WAIT_SECONDS
    wait_for_a_watch()
    grammars.helper._theirs.send(message)
    running(grammars, 2)
    wait_for_a_watch()
    grammars.backend.go.set()
    assert all(isinstance(grammars.next().result, Placed) for _ in range(3))


def test_a_machine_that_was_stopped_is_no_wait_for_a_turn(grammars, monkeypatch):
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    monkeypatch.setattr(module, "time", clock)
    grammars.begin("slow 2", "slow 3", "slow 4")
    running(grammars, 2)
    passed[0] = 10 * module.WAIT_SECONDS
    now = clock.monotonic()
    while grammars.compiler._watched < now:
        time.sleep(0.001)
    grammars.backend.go.set()
    assert all(isinstance(grammars.next().result, Placed) for _ in range(3))


def test_a_helper_that_does_not_start(grammars, monkeypatch):
    monkeypatch.setattr(module, "START_SECONDS", 0.1)
    grammars.helper.socket.recv(2**16)
    grammars.begin("2", "3", "4")
    assert [type(grammars.next().result) for _ in range(3)] == [GrammarBusyError] * 3


def test_what_no_request_waits_for_is_ended_or_never_begun(grammars):
    wanted = threading.Event()
    wanted.set()
    grammars.begin("slow 2", "slow 3", "4", is_wanted=wanted.is_set)
    running(grammars, 2)
    wanted.clear()
    assert [grammars.next().result for _ in range(3)] == [None] * 3
    assert all(process.status is not None for process in grammars.helper.processes)
    assert grammars.backend.compiled == []


def test_idle_grammars_make_room(grammars, monkeypatch):
    monkeypatch.setattr(module, "TOTAL_NBYTES", 3 * PROCESS_NBYTES)
    kept = [grammars.compiled(str(i)) for i in range(2, 5)]
    assert grammars.is_there(kept[0])  # it is used now
    grammars.compiled("5")
    assert [grammars.is_there(process) for process in kept] == [True, False, True]
    grammars.begin("6")  # all but that of "5" are in use now
    assert isinstance(grammars.next().result, Placed)


def test_the_idle_grammars_of_who_has_most_end_first(grammars, monkeypatch):
    monkeypatch.setattr(module, "MAX_IDLE", 3)
    monkeypatch.setattr(module, "_IDLE_WATCH_SECONDS", 0.02)
    one = grammars.compiled("3", tenant="modest")
    many = [grammars.compiled(str(i), tenant="greedy") for i in range(2, 7)]
    deadline = time.monotonic() + 60
    while sum(process.status is None for process in many) > 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert one.status is None
    assert [process.status is None for process in many] == [False, False, False, True, True]


def test_a_tenant_whose_memory_is_full_waits_and_others_do_not(grammars, monkeypatch):
    monkeypatch.setattr(module, "TENANT_NBYTES", 2 * PROCESS_NBYTES)
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.5)
    for text in ("3", "4"):
        assert grammars.is_there(grammars.compiled(text, tenant="full"))
    grammars.begin("5", tenant="full")
    assert grammars.compiled("5", tenant="other")
    assert isinstance(grammars.next().result, GrammarBusyError)


@pytest.mark.parametrize("limit", ["TENANT_NBYTES", "TOTAL_NBYTES"])
def test_memory_is_bounded_by_the_largest_of_who_has_most(grammars, monkeypatch, limit):
    grammars.begin("slow 2", "slow 3", tenant="greedy")
    grammars.begin("slow 2", tenant="modest")
    running(grammars, 3)
    monkeypatch.setattr(module, limit, 64 * PROCESS_NBYTES)
    by_size = sorted(grammars.helper.processes, key=lambda process: process.tenant)
    sizes = (20, 50, 40 if limit == "TENANT_NBYTES" else 3)
    for process, blocks in zip(by_size, sizes, strict=True):
        process.nbytes = blocks * PROCESS_NBYTES
    ready = grammars.next()
    assert ready.key[0] == "greedy"
    assert "too much memory to compile" in ready.result.message
    assert [process.status is None for process in by_size] == [True, False, True]


def test_memory_of_matching_is_bounded(grammars, monkeypatch):
    monkeypatch.setattr(module, "_IDLE_WATCH_SECONDS", 0.02)
    small, large = grammars.compiled("3"), grammars.compiled("4")
    for process in (small, large):
        assert grammars.is_there(process)
    killed = queue.SimpleQueue()
    monkeypatch.setattr(ThreadProcess, "kill", lambda process, reason: killed.put(process))
    large.nbytes = module.TOTAL_NBYTES
    assert killed.get(timeout=60) is large


def test_a_helper_that_fails_is_not_started_for_every_grammar(grammars, monkeypatch):
    starts = []

    def fail(name):
        starts.append(name)
        raise OSError("no room")

    grammars.compiler._start_helper = fail
    for text in ("3", "4"):
        grammars.compiler.compile((None, GrammarSpec("grammar", text)), lambda: True)
        error = grammars.next().result
        assert (type(error).__name__, error.status) == ("StepFailedError", 500)
    assert len(starts) == 2  # a system without room may have some later


def test_small_grammars_of_a_tenant_share_a_process(grammars, monkeypatch):
    monkeypatch.setattr(module, "_MAX_SHARED", 3)
    first = [grammars.compiled(str(i), alone=False) for i in range(2, 6)]
    assert first[0] is first[1] is first[2] is not first[3]  # it was full
    assert grammars.compiled("2", tenant="a", alone=False) not in first
    assert grammars.compiled("6", alone=True) not in first
    monkeypatch.setattr(ThreadProcess, "seconds", 0.2)
    large = grammars.compiled("7", alone=False)
    assert large not in first
    assert large.num_grammars == 1
    left = [p for p in grammars.helper.processes if p.status is None]
    assert len(left) == 5  # those that only tried have ended


def test_a_grammar_stays_where_it_is_if_the_shared_process_ends(grammars):
    shared = grammars.compiled("3", alone=False)
    grammars.begin("slow 4", alone=False)
    running(grammars, 2)  # the second time for this one
    grammars.helper.backend.go.set()
    [placed] = [grammars.next().result]
    assert placed.process is shared
    shared.kill("too slow")
    assert isinstance(grammars.results.get(timeout=60), module.FeedResult)
    again = grammars.compiled("5", alone=False)
    assert again is not shared
