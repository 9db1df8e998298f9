"""Engines that divide the experts of a model: they step together, in waves.

A wave begins when one of the engines has a step. Until the wave ends, each engine takes part in
every step, with or without tokens of its own. Counters in shared memory have the number of steps
that each process has begun. They wake the other engines, and the barriers of `ExpertExchange` keep
all of them together.

An engine may have several processes, which compute its steps together. All processes of all engines
are *ranks* of the group. The engine's core decides when the engine takes part without tokens, and
tells all its ranks. So they take part in the same steps.

When an engine dies, the others wait for the engine that replaces it. Ranks that have come together
are a generation. Each generation begins with all ranks between two steps. An engine whose step was
cut off computes this step again from its inputs, which gives the same bits. A step changes
recurrent states: with these, the scheduler repeats the requests from their tokens instead. If
experts have moved, a generation begins with the newest placement that a rank has used; see
`ExpertBalancer.settle`.

A step is cut off in all ranks of an engine, or in none: it ends with a barrier of the engine's
ranks. The rank that leaves the step early breaks this barrier, so that its peers leave, too.

If the engines have several stages, the ranks of each stage are a group with memory of its own. In
each of these groups the n-th step of a generation is the same step, so the stages never wait for
each other in a circle. In a new generation they could, since the stages of an engine may be in
different steps when another engine dies. So such an engine belongs to one generation only, and ends
with it: it is started again.

If the engines are on several machines, the ranks of each machine are a group with memory of its
own. Its last rank is a relay (`ExpertRelay`), which stands for the ranks of the other machines. The
engines of all machines are started together, with new memory and new connections. They belong to
one generation only, too.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from octavo import _native
from octavo.errors import EngineDeadError, EngineStoppedError, StepLostError
from octavo.layers.expert_exchange import ExpertExchange
from octavo.plan.group_layout import ExpertGroupLayout
from octavo.plan.setup import WorkerSetup
from octavo.system.distributed import (
    STAGE_TIMEOUT,
    Counter,
    GroupMemory,
    Rank,
    group_failure,
)
from octavo.worker.expert_balancer import ExpertBalancer

T = TypeVar("T")

LOST = "another engine died that has a part of the experts, while stages were in different steps"
"""Reason of the end of an engine with several stages."""
LOST_MACHINE = "another machine with a part of the experts is lost, or an engine there died"
"""Reason of the end of an engine, if the engines are on several machines."""

# Interval at which an idle engine looks for changes that do not wake it.
_LOOK_SECONDS = 0.1
# Interval at which an engine looks for the others while they come together.
_MEET_SECONDS = 0.002


def make_exchange(setup: WorkerSetup) -> ExpertExchange | None:
    """Return the exchange of an engine's mixtures; None if it has all experts."""
    if setup.expert_rank.size == 1:
        return None
    tokens, size = setup.max_num_batched_tokens, setup.rank.size
    meeting = None if setup.machine is None else setup.meeting_rank
    return ExpertExchange(setup.expert_rank, tokens, setup.dtype, size, meeting)


def make_wave(setup: WorkerSetup) -> ExpertWave | None:
    """Return the wave of an engine whose ranks are ready; None if it has all experts.

    Raises:
        OSError: the memory of the group cannot be opened.
    """
    if not setup.expert_memory:
        return None
    return ExpertWave(setup.expert_memory, setup.meeting_rank, setup.rank.size)


def reason_of_end(setup: WorkerSetup) -> str | None:
    """Return why an engine ends when another one dies; None: it waits for the other one."""
    if setup.machine is not None:
        return LOST_MACHINE
    return LOST if setup.rank.num_stages > 1 else None


class ExpertWave:
    """Steps of the engines, as an engine's core sees them: it implements `Wave`.

    Args:
        paths: file with the memory of each stage's group; the ranks of this engine have opened it.
        rank: first rank of the engine in each group.
        per_engine: number of successive ranks that are an engine's.

    Raises:
        OSError: the memory cannot be opened.
    """

    def __init__(self, paths: Sequence[str], rank: Rank, per_engine: int = 1) -> None:
        layout = ExpertGroupLayout(rank.size)
        memories = [_open(path, rank) for path in paths]
        self._memory, ranks = memories[0], range(rank.size)
        self._begun = self._memory.counter(layout.begun)
        self._steps = [self._memory.counter(layout.steps(i)) for i in ranks]
        self._came = [[memory.counter(layout.came(i)) for i in ranks] for memory in memories]
        self._mended = [[memory.counter(layout.mended(i)) for i in ranks] for memory in memories]
        self._own = range(rank.index, rank.index + per_engine)
        self._came_before = [[came[i].value for i in self._own] for came in self._came]
        """Generations of the processes that this engine's ranks have replaced."""
        self._idle = threading.Event()
        self._threads: list[threading.Thread] = []
        self._is_over = False

    @property
    def wanted(self) -> bool:
        """True if others wait for this engine, while no step of this engine is in flight.

        The counters of the first stage show it: later stages take part in the same steps.
        """
        first, came = self._own[0], self._came[0]
        if came[first].value == self._came_before[0][0]:
            return max(counter.value for counter in came) > 0
        following = self._steps[first].value + 1
        return self._memory.broken or any(steps.reached(following) for steps in self._steps)

    @property
    def is_lost(self) -> bool:
        """True if a rank of this engine belongs to a generation that has ended."""
        for came, mended, before in zip(self._came, self._mended, self._came_before, strict=True):
            newest = max(counter.value for counter in came)
            for i, old in zip(self._own, before, strict=True):
                generation = came[i].value
                if generation not in (old, newest) and generation == mended[i].value:
                    return True
        return False

    def watch_stages(self, on_loss: Callable[[], object]) -> None:
        """Start a thread that calls `on_loss` once, when the generation has ended.

        A stage without a step does not learn of the end, and others may wait for it.
        """
        self._start(self._watch_stages, on_loss)

    def watch(self, wake: Callable[[], object]) -> None:
        """Start a thread that calls `wake` when others want this engine after a call of `sleep`."""
        self._start(self._watch, wake)

    def shutdown(self) -> None:
        """End the threads. May be called twice."""
        self._is_over = True
        self._idle.set()
        for thread in self._threads:
            thread.join()

    def sleep(self) -> None:
        """Note that this engine has nothing to do: the thread of `watch` must wake it."""
        self._idle.set()

    def _start(
        self, run: Callable[[Callable[[], object]], None], call: Callable[[], object]
    ) -> None:
        thread = threading.Thread(target=run, args=(call,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _watch_stages(self, on_loss: Callable[[], object]) -> None:
        while not self._is_over:
            if self.is_lost:
                on_loss()
                return
            time.sleep(_LOOK_SECONDS)

    def _watch(self, wake: Callable[[], object]) -> None:
        while not self._is_over:
            self._idle.wait()
            self._idle.clear()
            while not (self.wanted or self._is_over):
                following = self._steps[self._own[0]].value + 1
                with contextlib.suppress(_native.GroupError):  # too late, or broken
                    self._begun.wait(following, timeout=_LOOK_SECONDS)
            wake()


class ExpertGroup:
    """This rank's place in the group. All methods are for one thread.

    Args:
        path: file with the memory of the group; the first rank finds it empty.
        exchange: exchange of the built model's mixtures.
        balancer: balances the experts of the ranks; None: they stay where they are.
        peers: memory of the engine's ranks, if there are several.
        lost: reason of the engine's end when another engine dies, if this one cannot repeat a step.
            None: it can.

    Raises:
        ConfigError: the other engines do not compute the same model.
        ModelError: experts that have moved to this rank cannot be read.
        OSError: the memory cannot be opened.
    """

    def __init__(
        self,
        path: str,
        exchange: ExpertExchange,
        balancer: ExpertBalancer | None = None,
        peers: GroupMemory | None = None,
        *,
        lost: str | None = None,
    ) -> None:
        rank = exchange.meeting
        counters = ExpertGroupLayout(rank.size)
        header = counters.nbytes
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            nbytes = header + exchange.nbytes
            nbytes += 0 if balancer is None else balancer.layout.nbytes
            if os.fstat(descriptor).st_size == 0:
                os.ftruncate(descriptor, GroupMemory.size(nbytes))
            # A step may take long. A rank that replaces a dead one ends the waiting of others.
            self._memory = GroupMemory(descriptor, nbytes, rank, timeout=STAGE_TIMEOUT)
        finally:
            os.close(descriptor)
        self._begun: Counter = self._memory.counter(counters.begun)
        """Number of the last step of this generation that a rank has begun."""
        ranks = range(rank.size)
        self._came = [self._memory.counter(counters.came(i)) for i in ranks]
        """Generation that each rank has come to; it takes no more part in an earlier one."""
        self._mended = [self._memory.counter(counters.mended(i)) for i in ranks]
        """Generation for which each rank has mended the barriers."""
        self._begun_here = self._memory.counter(counters.steps(rank.index))
        """Number of steps that this rank has begun in this generation."""
        self._arrivals = self._memory.arrivals = self._memory.counter(counters.arrivals(rank.index))
        exchange.attach(self._memory, header)
        self._balancer = balancer
        if balancer is not None:
            balancer.attach(self._memory, header + exchange.nbytes)
            balancer.settle()  # reads experts before others wait for this engine
        self._exchange, self._index, self._peers = exchange, rank.index, peers
        self._is_met = False
        """True while this rank belongs to a generation."""
        self._steps = 0
        """Number of steps in this generation."""
        self._lost = lost
        self._was_met = False
        """True after this rank has belonged to a generation."""
        self._has_ended = False
        """True after `end`."""

    def run(self, step: Callable[[], T], *, repeats: bool = True) -> T:
        """Run a step, and return its result; run it again if an engine dies meanwhile.

        Args:
            step: runs the step.
            repeats: False if a step that was cut off cannot run again.

        Raises:
            StepLostError: an engine has died, and the step cannot run again.
            EngineDeadError: the step has failed, so this engine must end.
            EngineStoppedError: an engine has died, and this one cannot repeat its step.
        """
        while True:
            self._meet()
            try:
                return self._begin(step)
            except _native.GroupError as error:
                self._is_met = False
                if self._peers is not None:
                    self._peers.break_()
                if not repeats:
                    raise StepLostError("an engine died that has a part of the experts") from error
            except Exception as error:
                raise self._fail(error) from error

    def wait_for_step(self) -> bool:
        """Wait briefly until another rank begins the next step; return True if one has begun.

        The first call also waits until all ranks have come together.

        Raises:
            EngineStoppedError: the generation has ended.
        """
        self._meet()
        with contextlib.suppress(_native.GroupError):  # too late, or broken
            self._begun.wait(self._steps + 1, timeout=_LOOK_SECONDS)
            return True
        return False

    def announce(self, step: int) -> None:
        """Wake the other ranks for a step that ranks elsewhere have begun. Any thread may call it.

        Args:
            step: number of the step in this generation; this rank has not finished it.
        """
        self._begun_here.post(step)
        self._begun.post(step)

    def end(self) -> None:
        """End the generation: all ranks leave the barriers. Any thread may call it.

        This rank comes to no further one.
        """
        self._has_ended = True
        self._memory.break_()

    def serve(self, step: Callable[[], object]) -> None:
        """Run a step without tokens, for other engines.

        Args:
            step: computes this rank's experts for the tokens of the others.

        Raises:
            EngineDeadError: the step has failed, so this engine must end.
        """

        def serve() -> None:
            self._exchange.send_nothing()
            step()

        self.run(serve)

    def _fail(self, error: Exception) -> EngineDeadError:
        """Leave the generation, since this rank has failed within a step; return the error.

        If the rank stayed, its later steps would complete the barriers of the others' steps.
        """
        self._is_met = False
        return group_failure(error)

    def _begin(self, step: Callable[[], T]) -> T:
        self._steps += 1
        self._begun_here.post(self._steps)
        self._begun.post(self._steps)
        if self._balancer is not None:
            self._balancer.advance()
        return step()

    def _meet(self) -> None:
        """Wait until all ranks have come to a new generation, unless this one is still whole.

        A new rank ends the generation of the rank that it replaces. All ranks leave the barriers,
        then all of them mend these, and then the new generation begins. Each rank does all of the
        mending, so none depends on another one, which may die.
        """
        if self._is_met:
            if not self._memory.broken:
                return
            self._is_met = False
        if self._was_met and self._lost is not None:
            raise EngineStoppedError(self._lost)
        newest = max(came.value for came in self._came)
        own = self._came[self._index].value
        generation = newest + (own == newest)
        while True:
            self._came[self._index].post(generation)
            generation = self._gather(generation, self._came, breaks=True)
            if generation != self._came[self._index].value:
                continue
            if self._balancer is not None:
                try:
                    self._balancer.settle()
                except Exception as error:
                    raise self._fail(error) from error
            for memory in (self._memory, self._peers):
                if memory is not None:
                    _native.mend_group(memory.barrier_address)
            for counter in (self._begun, self._begun_here, self._arrivals):
                counter.post(0)
            self._mended[self._index].post(generation)
            generation = self._gather(generation, self._mended, breaks=False)
            if generation == self._came[self._index].value:
                break
        self._is_met, self._was_met, self._steps = True, True, 0

    def _gather(self, generation: int, counters: list[Counter], *, breaks: bool) -> int:
        """Wait until all counters reach a generation, or until a rank has come to a later one.

        Args:
            generation: the generation.
            counters: the counters.
            breaks: True if the barrier must be broken meanwhile, so that all ranks leave it.

        Returns:
            `generation`, or the later one.

        Raises:
            EngineStoppedError: this rank has ended.
        """
        while not all(counter.reached(generation) for counter in counters):
            newest = max(came.value for came in self._came)
            if newest != generation:
                return newest
            if self._has_ended:
                raise EngineStoppedError("this rank has ended")
            if breaks:
                self._memory.break_()
            time.sleep(_MEET_SECONDS)
        return generation


def _open(path: str, rank: Rank) -> GroupMemory:
    """Return the memory of a group that a rank has made.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return GroupMemory(descriptor, os.fstat(descriptor).st_size - GroupMemory.size(0), rank)
    finally:
        os.close(descriptor)
