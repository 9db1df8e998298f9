"""Engines that divide the experts of a model: they step together, in waves.

A wave begins when one of the engines has a step. Until the wave ends, each engine takes part in
every step, with or without tokens of its own. A counter in shared memory has the number of the last
step that an engine has begun. It wakes the other engines, and the barriers of `ExpertExchange` keep
all of them together.

When an engine dies, the others wait for the engine that replaces it. Engines that have come
together are a generation. Each generation begins with all engines between two steps. An engine
whose step was cut off computes this step again from its inputs, which gives the same bits. A step
changes recurrent states: with these, the scheduler repeats the requests from their tokens instead.
If experts have moved, a generation begins with the newest placement that an engine has used; see
`ExpertBalancer.settle`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from octavo import _native
from octavo.errors import EngineDeadError, StepLostError
from octavo.layers.expert_exchange import ExpertExchange
from octavo.plan.group_layout import ExpertGroupLayout
from octavo.plan.setup import WorkerSetup
from octavo.system.distributed import (
    STAGE_TIMEOUT,
    Counter,
    GroupMemory,
    group_failure,
)
from octavo.worker.expert_balancer import ExpertBalancer

T = TypeVar("T")

# Interval at which an idle engine looks for changes that do not wake it.
_LOOK_SECONDS = 0.1
# Interval at which an engine looks for the others while they come together.
_MEET_SECONDS = 0.002


def make_exchange(setup: WorkerSetup) -> ExpertExchange | None:
    """Return the exchange of an engine's mixtures; None if it has all experts."""
    if setup.expert_rank.size == 1:
        return None
    return ExpertExchange(setup.expert_rank, setup.max_num_batched_tokens, setup.dtype)


class ExpertGroup:
    """This engine's place in the group. All methods but `wanted` and `watch` are for one thread.

    Args:
        path: file with the memory of the group; the first engine finds it empty.
        exchange: exchange of the built model's mixtures.
        balancer: balances the experts of the engines; None: they stay where they are.

    Raises:
        ConfigError: the other engines do not compute the same model.
        ModelError: experts that have moved to this engine cannot be read.
        OSError: the memory cannot be opened.
    """

    def __init__(
        self, path: str, exchange: ExpertExchange, balancer: ExpertBalancer | None = None
    ) -> None:
        rank = exchange.rank
        counters = ExpertGroupLayout(rank.size)
        header = counters.nbytes
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            nbytes = header + exchange.nbytes
            nbytes += 0 if balancer is None else balancer.layout.nbytes
            if os.fstat(descriptor).st_size == 0:
                os.ftruncate(descriptor, GroupMemory.size(nbytes))
            # A step may take long. An engine that replaces a dead one ends the waiting of others.
            self._memory = GroupMemory(descriptor, nbytes, rank, timeout=STAGE_TIMEOUT)
        finally:
            os.close(descriptor)
        self._begun: Counter = self._memory.counter(counters.begun)
        """Number of the last step of this generation that an engine has begun."""
        engines = range(rank.size)
        self._came = [self._memory.counter(counters.came(i)) for i in engines]
        """Generation that each engine has come to; it takes no more part in an earlier one."""
        self._mended = [self._memory.counter(counters.mended(i)) for i in engines]
        """Generation for which each engine has mended the barrier."""
        self._arrivals = self._memory.arrivals = self._memory.counter(counters.arrivals(rank.index))
        exchange.attach(self._memory, header)
        self._balancer = balancer
        if balancer is not None:
            balancer.attach(self._memory, header + exchange.nbytes)
            balancer.settle()  # reads experts before others wait for this engine
        self._exchange, self._index = exchange, rank.index
        self._is_met = False
        """True while this engine belongs to a generation."""
        self._steps = 0
        """Number of steps in this generation."""
        self._idle = threading.Event()
        self._watcher: threading.Thread | None = None
        self._is_over = False

    @property
    def wanted(self) -> bool:
        """True if others wait for this engine."""
        if self._is_met:
            return self._memory.broken or self._begun.reached(self._steps + 1)
        return max(came.value for came in self._came) > 0

    def run(self, step: Callable[[], T], *, repeats: bool = True) -> T:
        """Run a step with tokens, and return its result; run it again if an engine dies meanwhile.

        Args:
            step: runs the step.
            repeats: False if a step that was cut off cannot run again.

        Raises:
            StepLostError: an engine has died, and the step cannot run again.
            EngineDeadError: the step has failed, so this engine must end.
        """
        while True:
            self._meet()
            try:
                return self._begin(step)
            except _native.GroupError as error:
                self._is_met = False
                if not repeats:
                    raise StepLostError("an engine died that has a part of the experts") from error
            except Exception as error:
                raise self._fail(error) from error

    def serve(self, step: Callable[[], object]) -> None:
        """Run a step without tokens, if others wait for this engine.

        Args:
            step: computes this engine's experts for the tokens of the others.

        Raises:
            EngineDeadError: the step has failed, so this engine must end.
        """
        while self.wanted:
            self._meet()
            if not self.wanted:
                return
            self._exchange.send_nothing()
            try:
                self._begin(step)
                return
            except _native.GroupError:
                self._is_met = False
            except Exception as error:
                raise self._fail(error) from error

    def _fail(self, error: Exception) -> EngineDeadError:
        """Leave the generation, since this engine has failed within a step; return the error.

        If the engine stayed, its later steps would complete the barriers of the others' steps.
        """
        self._is_met = False
        return group_failure(error)

    def _begin(self, step: Callable[[], T]) -> T:
        self._steps += 1
        self._begun.post(self._steps)
        if self._balancer is not None:
            self._balancer.advance()
        return step()

    def _meet(self) -> None:
        """Wait until all engines have come to a new generation, unless this one is still whole.

        A new engine ends the generation of the engine that it replaces. All engines leave the
        barrier, then all of them mend it, and then the new generation begins. Each engine does all
        of the mending, so none depends on another engine, which may die.
        """
        if self._is_met:
            if not self._memory.broken:
                return
            self._is_met = False
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
            _native.mend_group(self._memory.barrier_address)
            self._begun.post(0)
            self._arrivals.post(0)
            self._mended[self._index].post(generation)
            generation = self._gather(generation, self._mended, breaks=False)
            if generation == self._came[self._index].value:
                break
        self._is_met, self._steps = True, 0

    def _gather(self, generation: int, counters: list[Counter], *, breaks: bool) -> int:
        """Wait until all counters reach a generation, or until an engine has come to a later one.

        Args:
            generation: the generation.
            counters: the counters.
            breaks: True if the barrier must be broken meanwhile, so that all engines leave it.

        Returns:
            `generation`, or the later one.
        """
        while not all(counter.reached(generation) for counter in counters):
            newest = max(came.value for came in self._came)
            if newest != generation:
                return newest
            if breaks:
                self._memory.break_()
            time.sleep(_MEET_SECONDS)
        return generation

    def watch(self, wake: Callable[[], object]) -> None:
        """Start a thread that calls `wake` when others want this engine after a call of `sleep`."""
        self._watcher = threading.Thread(target=self._watch, args=(wake,), daemon=True)
        self._watcher.start()

    def shutdown(self) -> None:
        """End the thread of `watch`."""
        self._is_over = True
        self._idle.set()
        if self._watcher is not None:
            self._watcher.join()

    def sleep(self) -> None:
        """Note that this engine has nothing to do: the thread of `watch` must wake it."""
        self._idle.set()

    def _watch(self, wake: Callable[[], object]) -> None:
        while not self._is_over:
            self._idle.wait()
            self._idle.clear()
            while not (self.wanted or self._is_over):
                if self._is_met:
                    try:
                        self._begun.wait(self._steps + 1, timeout=_LOOK_SECONDS)
                    except _native.GroupError:  # too late, or broken
                        continue
                else:
                    time.sleep(_LOOK_SECONDS)
            wake()
