"""Engines that divide experts: they step together, and survive each other's deaths."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo.errors import ConfigError, EngineDeadError, EngineStoppedError, StepLostError
from octavo.layers.expert_exchange import ExpertExchange
from octavo.plan.group_layout import ExpertGroupLayout
from octavo.system.distributed import GroupMemory, Rank
from octavo.worker.expert_group import LOST, ExpertGroup, ExpertWave


class DeadError(BaseException):
    """The end of an engine's thread, in the middle of a step."""


class Engine:
    """Engine with three barriers in a step, of which it may die at one."""

    def __init__(self, path, index, size=3, repeats=True):
        self.exchange = ExpertExchange(Rank(index, size), 4, "float32")
        self.exchange.reserve(8, 2, 4)
        self.group = ExpertGroup(str(path), self.exchange, lost=None if repeats else LOST)
        self.wave = ExpertWave([str(path)], Rank(index, size))
        self.begun = self.done = 0

    def step(self, dies_at=3):
        self.begun += 1
        for barrier in range(3):
            if barrier == dies_at:
                raise DeadError
            self.exchange.join()
        self.done += 1
        return self.done

    def serve_until(self, end):
        while not end.is_set():
            if self.wave.wanted:
                self.group.serve(self.step)


def memory_of(path, offset):
    """Return a function that reads a counter."""
    begin = GroupMemory.size(offset)
    return lambda: int.from_bytes(path.read_bytes()[begin : begin + 4], "little")


@pytest.fixture
def memory(tmp_path):
    path = tmp_path / "memory"
    path.touch()
    return path


def test_engines_without_work_take_part(memory):
    engines, end = [Engine(memory, index) for index in range(3)], threading.Event()
    assert not any(engine.wave.wanted for engine in engines)
    woken = threading.Event()
    engines[2].wave.watch(woken.set)
    engines[2].wave.sleep()
    with ThreadPoolExecutor(3) as threads:
        waiting = threads.submit(engines[0].group.run, engines[0].step)
        assert woken.wait(60)
        others = [threads.submit(engine.serve_until, end) for engine in engines[1:]]
        assert waiting.result(60) == 1
        assert [engines[0].group.run(engines[0].step) for _ in range(50)] == list(range(2, 52))
        end.set()
        for other in others:
            other.result(60)
    assert [engine.done for engine in engines] == [51] * 3
    assert not any(engine.wave.wanted for engine in engines)
    engines[2].wave.sleep()
    woken.clear()
    assert not woken.wait(0.3)
    engines[2].wave.shutdown()


def test_who_waits_for_whom_is_in_the_shared_memory(memory):
    """As the server reads it, in order to kill the engine that hangs, and not one that waits."""
    layout, goes_on = ExpertGroupLayout(2), threading.Event()

    def behind():
        return layout.behind(memory.read_bytes()[GroupMemory.size(0) :][: layout.nbytes])

    def hang():
        engines[1].exchange.join()
        assert goes_on.wait(60)
        engines[1].exchange.join()
        engines[1].exchange.join()

    assert behind() == []
    engines = [Engine(memory, index, 2) for index in range(2)]
    with ThreadPoolExecutor(2) as threads:
        waits = threads.submit(engines[0].group.run, engines[0].step)
        while behind() != [1]:  # it has not come to the generation
            time.sleep(0.001)
        hangs = threads.submit(engines[1].group.run, hang)
        arrivals = memory_of(memory, layout.arrivals(0))
        while arrivals() < 2:
            time.sleep(0.001)
        assert behind() == [1]
        goes_on.set()
        assert waits.result(60) == 1
        hangs.result(60)
        assert behind() == []


def test_an_engine_that_fails_holds_no_barrier(memory):
    """Its next step, already queued, does not meet the others in the middle of their step."""
    engines, end = [Engine(memory, index, 2) for index in range(2)], threading.Event()

    def fail():
        engines[0].exchange.join()
        raise ValueError("no memory")

    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(engines[1].serve_until, end)
        with pytest.raises(EngineDeadError, match="ValueError: no memory"):
            engines[0].group.run(fail)
        assert engines[0].group.run(engines[0].step) == 1
        end.set()
        other.result(60)
    assert engines[1].done == 1, "the step that failed is not complete"


@pytest.mark.parametrize("barrier", range(3))
def test_a_step_that_was_cut_off_is_repeated(memory, barrier):
    """An engine dies in a step, and its replacement dies at once, or comes to stay."""
    engines, end = [Engine(memory, index) for index in range(3)], threading.Event()
    with ThreadPoolExecutor(4) as threads:
        others = [threads.submit(engine.serve_until, end) for engine in engines[:1]]
        runs = threads.submit(lambda: [engines[1].group.run(engines[1].step) for _ in range(9)])
        for _ in range(2):
            with pytest.raises(DeadError):
                engines[2].group.run(lambda: engines[2].step(barrier))
            engines[2] = Engine(memory, 2)
        others.append(threads.submit(engines[2].serve_until, end))
        assert runs.result(60) == list(range(1, 10))
        end.set()
        for other in others:
            other.result(60)
    assert engines[1].begun > 9
    assert engines[0].done >= engines[1].done


def test_a_step_that_cannot_be_repeated_is_lost(memory):
    engines, end = [Engine(memory, index, 2) for index in range(2)], threading.Event()
    with ThreadPoolExecutor(2) as threads:
        lost = threads.submit(engines[0].group.run, engines[0].step, repeats=False)
        with pytest.raises(DeadError):
            engines[1].group.run(lambda: engines[1].step(2))
        engines[1] = Engine(memory, 1, 2)
        other = threads.submit(engines[1].serve_until, end)
        with pytest.raises(StepLostError):
            lost.result(60)
        assert engines[0].group.run(engines[0].step) == 1
        end.set()
        other.result(60)
    assert engines[1].done == 1


def test_an_engine_with_several_stages_ends_with_its_generation(memory):
    engines = [Engine(memory, index, 2, repeats=False) for index in range(2)]
    lost, ended = threading.Event(), threading.Event()
    engines[0].wave.watch_stages(lost.set)
    with ThreadPoolExecutor(2) as threads:
        steps = [threads.submit(engine.group.run, engine.step) for engine in engines]
        assert [step.result(60) for step in steps] == [1, 1]
        assert not engines[0].wave.is_lost
        cut_off = threads.submit(engines[0].group.run, engines[0].step)
        new = Engine(memory, 1, 2, repeats=False)
        runs = threads.submit(new.group.run, new.step)
        with pytest.raises(EngineStoppedError, match="while stages were in different steps"):
            cut_off.result(60)
        assert lost.wait(60)  # also known without a step
        engines[0].wave.shutdown()
        assert not new.wave.is_lost
        engines[0] = Engine(memory, 0, 2, repeats=False)
        engines[0].wave.watch_stages(ended.set)
        assert engines[0].wave.wanted
        assert engines[0].group.run(engines[0].step) == runs.result(60) == 1
    assert not ended.wait(0.3)
    engines[0].wave.shutdown()


class Process(Engine):
    """One of an engine's two processes, which also meet each other within a step."""

    def __init__(self, path, engine, index, peers):
        self.index, rank = index, Rank(2 * engine + index, 4)
        self.exchange = ExpertExchange(rank, 4, "float32", 2)
        self.exchange.reserve(8, 2, 4)
        self.peers = GroupMemory(peers, 128, Rank(index, 2))
        self.group = ExpertGroup(str(path), self.exchange, peers=self.peers)
        self.wave = ExpertWave([str(path)], Rank(2 * engine, 4), 2)
        self.begun = self.done = 0

    def step(self, dies_at=2):
        self.begun += 1
        for barrier in range(2):
            self.meet()
            if barrier == dies_at:
                raise DeadError
            self.exchange.join()
        self.meet()
        self.done += 1
        return self.done

    def meet(self):
        steps = self.peers.data.view("int64")[:2]
        steps[self.index] = self.done
        self.peers.barrier()
        assert steps[0] == steps[1], "the processes compute different steps"
        self.peers.barrier()


@pytest.mark.parametrize("barrier", range(2))
def test_the_processes_of_an_engine_repeat_a_step_together(memory, barrier):
    def start(engine):
        peers = GroupMemory.create(128)
        processes = [Process(memory, engine, index, peers) for index in range(2)]
        os.close(peers)
        return processes

    def call(function, processes):
        futures = [threads.submit(function, process) for process in processes]
        return [future.result(60) for future in futures]

    def serve_until(processes):
        while not end.is_set():
            if processes[0].wave.wanted:
                call(lambda process: process.group.serve(process.step), processes)

    stays, dies, end = start(0), start(1), threading.Event()
    with ThreadPoolExecutor(6) as threads:
        runs = threads.submit(
            lambda: [call(lambda p: p.group.run(p.step), stays) for _ in range(9)]
        )
        for _ in range(2):
            with pytest.raises(DeadError):
                call(lambda p: p.group.run(lambda: p.step(barrier)), dies)
            dies = start(1)
        serving = threads.submit(serve_until, dies)
        assert runs.result(60) == [[n, n] for n in range(1, 10)]
        end.set()
        serving.result(60)
    assert stays[0].begun > 9
    assert stays[1].begun > 9
    assert [process.done for process in dies] == [9, 9]


def test_an_engine_dies_while_all_are_idle(memory):
    engines, end = [Engine(memory, index, 2) for index in range(2)], threading.Event()
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(engines[1].serve_until, end)
        assert engines[0].group.run(engines[0].step) == 1
        while engines[1].done < 1:  # it may still be leaving the last barrier
            time.sleep(0.001)
        engines[0] = Engine(memory, 0, 2)
        assert engines[0].wave.wanted  # the other one must learn of it
        assert engines[0].group.run(engines[0].step) == 1
        end.set()
        other.result(60)
    assert engines[1].done == 2


# Engine 0 of two, in its own process: it completes two steps.
LEAVING = """
import sys
from tests.worker.test_expert_group import Engine

engine = Engine(sys.argv[1], 0, 2)
for _ in range(2):
    engine.group.run(engine.step)
print(engine.begun, engine.done)
"""


def test_a_barrier_is_broken_while_another_engine_leaves_it(memory):
    """The other one has completed the step, dies, and is replaced, before this one runs on.

    The step is complete for this one, too. The new one takes part in the next step.
    """
    command = [sys.executable, "-c", LEAVING, str(memory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        end = threading.Event()
        other = Engine(memory, 1, 2)

        def step():
            for _ in range(2):
                other.exchange.join()
            arrived = other.group._memory._bytes[:4].view("int32")
            while arrived[0] == 0:  # the process has not come to the last barrier
                time.sleep(0.001)
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            other.exchange.join()

        with ThreadPoolExecutor(1) as thread:
            other.group.run(step)  # complete
            new = Engine(memory, 1, 2)
            serving = thread.submit(new.serve_until, end)
            while not new.group._memory.broken:
                time.sleep(0.001)
            os.kill(process.pid, signal.SIGCONT)
            assert process.communicate(timeout=100)[0].split() == ["2", "2"]
            end.set()
            serving.result(60)
    assert new.done == 1


def test_other_models_are_refused(memory):
    Engine(memory, 0)
    other = ExpertExchange(Rank(1, 3), 4, "float32")
    other.reserve(16, 2, 4)
    with pytest.raises(ConfigError, match="do not compute the same model"):
        ExpertGroup(str(memory), other)
