"""Compilation of grammars in processes, fairly between tenants and within limits.

Each grammar is compiled in its own process. A small grammar then moves to the process that holds
its tenant's small grammars, since each process costs time in every step. If a small grammar later
breaks that process, its grammars are compiled again, each in its own process.

Each tenant (API key) compiles at most two grammars at once, and tenants take turns, so the slow
grammars of one tenant delay no other tenant. The kernel shares the processor among the processes. A
slow process gets a lower priority, since the engine computes at the same time.

Limits of one grammar: `COMPILE_SECONDS` of processor time, and the address space that
`HelperSetup.max_nbytes` allows. The processes of a tenant use at most `TENANT_NBYTES` of memory,
and all together at most `TOTAL_NBYTES`. Beyond a limit a process of the tenant with most memory
ends: first one that no request uses, then the largest that compiles, then the largest.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from octavo.errors import (
    GRAMMAR_PACKAGES,
    GrammarBusyError,
    GrammarError,
    RequestError,
    StepFailedError,
    make_error,
    signal_name,
)
from octavo.messages import GrammarSpec
from octavo.structured_output.base import is_ebnf
from octavo.structured_output.client import (
    PROCESS_NBYTES,
    Compile,
    Compiled,
    Fed,
    Feed,
    GrammarHelper,
    GrammarProcess,
    Loaded,
    receive,
    send,
)

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 5.0
"""Maximum processor time for compiling one grammar."""
WAIT_SECONDS = 9.0
"""Maximum wait for a grammar, however busy the machine is, once its helper has started."""
START_SECONDS = 60.0
"""Maximum wait for the start of a helper; a busy machine may take long to load a library."""
COMPILE_NBYTES = 128 * 2**20
"""Maximum address space for compiling and matching one grammar."""
TENANT_NBYTES = 128 * 2**20
"""Maximum memory of a tenant's grammar processes."""
TOTAL_NBYTES = 192 * 2**20
"""Maximum memory of all grammar processes."""
MAX_IDLE = 32
"""Maximum number of idle grammar processes that are kept."""
_PER_TENANT, _AT_ONCE = 2, 8
# After this processor time a grammar is compiled with a lower priority than the engine's.
_QUICK_SECONDS, _SLOW_NICENESS = 0.1, 5
# Interval between checks of the limits, while a grammar is compiled, and otherwise.
_WATCH_SECONDS, _IDLE_WATCH_SECONDS = 0.02, 1.0
_MESSAGE_SECONDS = 10.0
# After a longer time without a check, the machine or this process was stopped.
_STOPPED_SECONDS = 2.0
# Maximum processor time and memory for compiling a small grammar, and maximum number of small
# grammars that share a process.
_SMALL_SECONDS, _SMALL_NBYTES, _MAX_SHARED = 0.05, 8 * 2**20, 64
# A library that could not be loaded is not tried again for this time.
_FAILED_SECONDS = 30.0

_TOO_SLOW = GrammarError(
    f"The grammar takes more than {COMPILE_SECONDS:g} s of processor time to compile; simplify it."
)
_TOO_LARGE = GrammarError("The grammar takes too much memory to compile; simplify it.")
_BUSY = GrammarBusyError(
    f"The grammar was not compiled within {WAIT_SECONDS:g} s, because grammars of the same client "
    "or other work had precedence; try again later."
)

# Memory of a backend's helper process, and for each token of the vocabulary, as measured:
# interpreter, library and tokenizer. xgrammar's package imports torch.
_HELPER_NBYTES = {"llguidance": (32 * 2**20, 1024), "xgrammar": (208 * 2**20, 768)}

# Processor time for all matching of a request, and for feeding each token of its given output.
MATCH_SECONDS, MATCH_SECONDS_PER_TOKEN = 2.0, 0.02
_MESSAGE_DECODER = msgspec.msgpack.Decoder(Compiled | Fed)
_COMPILED_DECODER = msgspec.msgpack.Decoder(Compiled)
_T = TypeVar("_T")
BROKEN_ANSWER = "its grammar made the library answer with something unreadable; simplify it"
TOO_SLOW_TO_MATCH = "its grammar takes too long to match; simplify it"

Key = tuple[str | None, GrammarSpec]
"""Tenant and its grammar."""
StartHelper = Callable[[str], GrammarHelper]


@dataclass(slots=True, eq=False)
class _Compile:
    """Grammar to compile."""

    key: Key
    is_wanted: Callable[[], bool]
    alone: bool
    """True if the grammar must not share a process."""
    backends: deque[str]
    """Backends that have not been tried."""
    arrived: float
    """Time from which it waits, in seconds of `time.monotonic`.

    The start of a helper, and a time in which the machine was stopped, do not count.
    """
    errors: list[RequestError] = field(default_factory=list)
    process: GrammarProcess | None = None


@dataclass(slots=True, eq=False)
class _Helper:
    """Helper process, and the grammars that wait until it has loaded its library."""

    process: GrammarHelper
    loaded: bool = False
    failure: RequestError | None = None
    failed: float = 0.0
    """Time of the failure, in seconds of `time.monotonic`."""
    waiting: list[_Compile] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Placed:
    """Compiled grammar."""

    process: GrammarProcess
    number: int
    """Number of the grammar in the process."""

    @property
    def hold(self) -> int:
        """Entry of `GrammarProcess.live` that keeps the process until its requests use it."""
        return -1 - self.number


@dataclass(frozen=True, slots=True)
class Ready:
    """Result of a `GrammarCompiler.compile`."""

    key: Key
    result: Placed | RequestError | None
    """Compiled grammar or error; None if no request waited for it any more."""


@dataclass(frozen=True, slots=True)
class FeedResult:
    """Result of a `GrammarCompiler.feed`, or the end of a process."""

    process: GrammarProcess
    fed: Fed | None
    """Answer of the process; None if the process has ended."""


class GrammarCompiler:
    """Starter and supervisor of grammar processes, on a dedicated thread.

    Args:
        start_helper: starts the helper of a backend; raises the reason if that is impossible.
        backends: names of the backends, in order of preference.
        done: receives each result, on the compiler's thread.
    """

    def __init__(
        self,
        start_helper: StartHelper,
        backends: Sequence[str],
        done: Callable[[Ready | FeedResult], None],
    ) -> None:
        self._start_helper, self._backends, self._done = start_helper, backends, done
        self._inbox: queue.SimpleQueue[_Compile | tuple[GrammarProcess, Feed] | None]
        self._inbox = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, self._woken)
        self._helpers: dict[str, _Helper] = {}
        self._queues: dict[str | None, deque[_Compile]] = {}
        self._running: list[_Compile] = []
        """Grammars that have left the queues; some wait for a helper."""
        self._lock = threading.Lock()
        self._ready: dict[GrammarProcess, None] = {}
        """Processes with compiled grammars, the most recently used last. Guarded by `_lock`."""
        self._memory: dict[GrammarProcess, int] = {}
        """Bytes of the processes in `_ready`, as last measured."""
        self._measured = 0.0
        self._shared: dict[tuple[str | None, str], GrammarProcess] = {}
        """Processes of the tenants' small grammars, by tenant and backend."""
        self._joining: dict[tuple[GrammarProcess, int], _Compile] = {}
        """Small grammars that a shared process is compiling, by their numbers there."""
        self._feeds: dict[GrammarProcess, tuple[int, float]] = {}
        """Number of requests in feeding, and the processor time that kills their process."""
        self.has_ended = False
        """True if the thread has ended, by `shutdown` or a fault."""
        self._watched = 0.0
        self._thread = threading.Thread(target=self._run, name="octavo-grammars", daemon=True)
        self._thread.start()

    def compile(self, key: Key, is_wanted: Callable[[], bool], alone: bool = False) -> None:
        """Begin to compile a grammar; `done` receives a `Ready`.

        Args:
            key: the tenant and the grammar.
            is_wanted: returns True if any request still waits for the grammar.
            alone: True if the grammar must not share a process.
        """
        _, spec = key
        names = deque(name for name in self._backends if spec.backend in ("auto", name))
        self._put(_Compile(key, is_wanted, alone, names, time.monotonic()))

    def feed(self, process: GrammarProcess, feed: Feed) -> None:
        """Begin to start a request that already has output; `done` receives a `FeedResult`."""
        self._put((process, feed))

    def use(self, process: GrammarProcess, key: int) -> bool:
        """Note that a request uses a process; return True if the process is still alive."""
        with self._lock:
            if process not in self._ready or process.status is not None:
                return False
            del self._ready[process]
            self._ready[process] = None  # the most recently used one is the last
            process.live.add(key)
            return True

    def shutdown(self) -> None:
        """End all processes and the thread."""
        self._put(None)
        self._thread.join()
        self._wake.close()
        self._woken.close()

    def _put(self, item: _Compile | tuple[GrammarProcess, Feed] | None) -> None:
        self._inbox.put(item)
        self._wake.send(b"x")

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception:
            logger.exception("the grammar compiler failed")
        self.has_ended = True
        for process in [job.process for job in self._running if job.process is not None]:
            process.close()
        with self._lock:
            ready, self._ready = list(self._ready), {}
        for process in ready:
            process.close()
            self._done(FeedResult(process, None))
        for helper in self._helpers.values():
            helper.process.close()
        self._selector.close()
        left = [*self._running, *itertools.chain(*self._queues.values())]
        while not self._inbox.empty():
            item = self._inbox.get()
            left += [item] if isinstance(item, _Compile) else []
        for job in left:
            self._finish(job, StepFailedError("The grammar compiler failed; try again."))

    def _turn(self) -> bool:
        """Handle all events; return True if the thread continues."""
        # All names are local: this waiting thread must not keep a request alive.
        for event, _ in self._selector.select(self._timeout()):
            self._read(event.data)
        while not self._inbox.empty():
            item = self._inbox.get()
            if item is None:
                return False
            if isinstance(item, _Compile):
                self._queues.setdefault(item.key[0], deque()).append(item)
            else:
                self._feed(*item)
        self._start()
        now = time.monotonic()
        if now - self._watched >= _WATCH_SECONDS and (self._running or self._ready):
            self._watch(now)
            self._watched = now
        return True

    def _timeout(self) -> float | None:
        if self._running or any(self._queues.values()):
            return _WATCH_SECONDS
        return _IDLE_WATCH_SECONDS if self._ready else None

    def _read(self, source: socket.socket | _Helper | _Compile | GrammarProcess) -> None:
        """Read the data of a socket."""
        if isinstance(source, socket.socket):
            with contextlib.suppress(BlockingIOError):
                source.recv(4096)
        elif isinstance(source, _Helper):
            self._take_loaded(source)
        elif isinstance(source, _Compile):
            self._take_compiled(source)
        else:
            self._take_message(source)

    def _take_message(self, process: GrammarProcess) -> None:
        """Handle an answer of a process with compiled grammars, or its end."""
        answer = _receive(process, _MESSAGE_DECODER)
        if answer is None:
            self._drop(process)
            return
        if isinstance(answer, Fed):
            self._done(FeedResult(process, answer))
            count, limit = self._feeds.pop(process)
            if count > 1:
                self._feeds[process] = (count - 1, limit)
            return
        job = self._joining.pop((process, answer.grammar), None)
        if job is None:  # no longer wanted
            return
        if answer.error is not None:
            self._stay(job)
            return
        self._end_process(job)
        self._place(job, process, answer.grammar)

    def _start(self) -> None:
        """Start waiting grammars, the tenants in turn, within the limits."""
        started = True
        while started:
            started = False
            for tenant, waiting in list(self._queues.items()):
                while waiting and not waiting[0].is_wanted():
                    self._finish(waiting.popleft(), None)
                if not waiting:
                    del self._queues[tenant]
                    continue
                own = sum(job.key[0] == tenant for job in self._running)
                if own < self._places() and self._has_room(tenant):
                    self._queues[tenant] = self._queues.pop(tenant)  # now the last one
                    job = waiting.popleft()
                    self._running.append(job)
                    self._try_next(job)
                    started = True

    def _places(self) -> int:
        """Return the number of grammars that a tenant may compile at once now."""
        count = len(self._running)
        return _PER_TENANT if count < _AT_ONCE // 2 else int(count < _AT_ONCE)

    def _has_room(self, tenant: str | None) -> bool:
        """Return True if a tenant has memory for one more process; end idle ones for it."""
        while True:
            used = self._memory_by_tenant()
            if used.get(tenant, 0) + PROCESS_NBYTES > TENANT_NBYTES:
                if not self._end_idle(tenant):
                    return False
            elif sum(used.values()) + PROCESS_NBYTES > TOTAL_NBYTES:
                if not self._end_idle(max(used, key=lambda name: used[name])):
                    return False
            else:
                return True

    def _memory_by_tenant(self) -> dict[str | None, int]:
        """Return the bytes of all grammar processes, by tenant."""
        used: dict[str | None, int] = {}
        compiling = [job.process for job in self._running if job.process is not None]
        for process in [*self._memory, *compiling]:
            nbytes = self._memory.get(process) or process.nbytes
            used[process.tenant] = used.get(process.tenant, 0) + nbytes
        return used

    def _try_next(self, job: _Compile) -> None:
        """Compile a grammar by the next backend, or report its errors."""
        if not job.backends:
            self._running.remove(job)
            self._finish(job, self._join(job))
            return
        name = job.backends[0]
        helper = self._helpers.get(name)
        if helper is not None and helper.failure is not None:
            if time.monotonic() - helper.failed < _FAILED_SECONDS:
                self._refuse(job, helper.failure)
                return
            helper = None
        if helper is not None and helper.loaded:
            error = self._fork(job, helper)
            if error is None:
                return
            if helper.process.is_alive:
                self._refuse(job, error)
                return
            helper.process.close()  # it died since its last use
            helper = None
        if helper is None:
            try:
                helper = self._helpers[name] = _Helper(self._start_helper(name))
            except Exception as error:
                logger.exception("the helper of %s could not be started", name)
                self._refuse(job, _loading_error(Loaded(str(error), type(error).__name__)))
                return
            self._selector.register(helper.process.socket, selectors.EVENT_READ, helper)
        helper.waiting.append(job)

    def _take_loaded(self, helper: _Helper) -> None:
        """Handle the first answer of a helper: it has loaded its library, or failed."""
        self._selector.unregister(helper.process.socket)
        answer = helper.process.read_loaded()
        helper.loaded = True
        if answer.error is not None:
            helper.process.close()
            helper.failure, helper.failed = _loading_error(answer), time.monotonic()
        now, (waiting, helper.waiting) = time.monotonic(), (helper.waiting, [])
        for job in (*waiting, *itertools.chain(*self._queues.values())):
            job.arrived = now
        for job in waiting:
            error = helper.failure or self._fork(job, helper)
            if error is not None:
                self._refuse(job, error)

    def _fork(self, job: _Compile, helper: _Helper) -> RequestError | None:
        """Start the process of a grammar; return the error if that fails."""
        try:
            job.process = process = helper.process.fork(job.key[0])
            process.jobs.settimeout(_MESSAGE_SECONDS)
            _send_grammar(process, job.key[1])
        except OSError as error:
            self._end_process(job)
            return StepFailedError(f"No process for a grammar could be started: {error}")
        self._selector.register(process.jobs, selectors.EVENT_READ, job)
        return None

    def _take_compiled(self, job: _Compile) -> None:
        """Handle the answer of a grammar process, or its end."""
        process = job.process
        assert process is not None
        answer = _receive(process, _COMPILED_DECODER)
        if answer is not None:
            if answer.error is None:
                process.stop_token_ids = frozenset(answer.stop_token_ids)
                self._settle(job, process)
                return
            error = answer.error
        else:
            error = f"{job.backends[0]}: the grammar {_cause_of_death(process)}"
        self._end_process(job)
        self._refuse(job, GrammarError(error))

    def _settle(self, job: _Compile, process: GrammarProcess) -> None:
        """Keep a compiled grammar in its process, or have a shared process compile it again.

        Small grammars share processes. A large or slow one keeps its process, and the first small
        one's process becomes the shared one.
        """
        small = (
            process.nbytes <= PROCESS_NBYTES + _SMALL_NBYTES
            and (process.seconds or 0.0) <= _SMALL_SECONDS
        )
        if job.alone or not small:
            self._stay(job)
            return
        name = (job.key[0], job.backends[0])
        shared = self._shared.get(name)
        if shared is None or shared.num_grammars >= _MAX_SHARED:
            self._shared[name] = process
            self._stay(job)
            return
        self._selector.unregister(process.jobs)
        self._joining[shared, shared.num_grammars] = job
        try:
            _send_grammar(shared, job.key[1])
        except OSError:
            self._drop(shared)

    def _stay(self, job: _Compile) -> None:
        """Keep a grammar in the process that has compiled it."""
        process = job.process
        assert process is not None
        with contextlib.suppress(KeyError):
            self._selector.unregister(process.jobs)
        self._selector.register(process.jobs, selectors.EVENT_READ, process)
        self._place(job, process, 0)

    def _place(self, job: _Compile, process: GrammarProcess, number: int) -> None:
        """Report a compiled grammar."""
        self._running.remove(job)
        placed = Placed(process, number)
        process.live.add(placed.hold)
        with self._lock:
            self._ready[process] = None
        self._memory.setdefault(process, process.nbytes)
        self._done(Ready(job.key, placed))

    def _refuse(self, job: _Compile, error: RequestError) -> None:
        """Note why a backend rejected a grammar, and try the next one."""
        job.errors.append(error)
        job.backends.popleft()
        self._try_next(job)

    def _give_up(self, job: _Compile, error: RequestError | None) -> None:
        """Stop compiling a grammar."""
        self._running.remove(job)
        for helper in self._helpers.values():
            if job in helper.waiting:
                helper.waiting.remove(job)
        for place in [place for place, other in self._joining.items() if other is job]:
            del self._joining[place]
        self._end_process(job)
        self._finish(job, error)

    def _join(self, job: _Compile) -> RequestError:
        """Return one error for the errors of all backends."""
        if not any(isinstance(error, GrammarError) for error in job.errors):
            return job.errors[0]
        messages = dict.fromkeys(error.message for error in job.errors)
        _, spec = job.key
        is_fit = spec.kind in ("json", "structural_tag") or (
            spec.kind == "grammar" and is_ebnf(spec.text)
        )
        refused = any(message.startswith("llguidance:") for message in messages)
        if spec.backend == "auto" and "xgrammar" not in self._backends and is_fit and refused:
            install = GRAMMAR_PACKAGES["xgrammar"]
            messages[f"The package xgrammar may support it, but is not installed: {install}"] = None
        return GrammarError("No grammar for this: " + " | ".join(messages))

    def _finish(self, job: _Compile, error: RequestError | None) -> None:
        self._done(Ready(job.key, error))

    def _end_process(self, job: _Compile) -> None:
        if job.process is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(job.process.jobs)
            job.process.close()
            job.process = None

    def _feed(self, process: GrammarProcess, feed: Feed) -> None:
        seconds = process.seconds or 0.0
        count, limit = self._feeds.get(process, (0, seconds + MATCH_SECONDS))
        limit += MATCH_SECONDS_PER_TOKEN * len(feed.token_ids)
        self._feeds[process] = (count + 1, limit)
        try:
            send(process.jobs, msgspec.msgpack.encode(feed))
        except OSError:
            self._drop(process)

    def _drop(self, process: GrammarProcess) -> None:
        """Forget a process that has ended or must end."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(process.jobs)
        self._feeds.pop(process, None)
        with self._lock:
            self._ready.pop(process, None)
        self._memory.pop(process, None)
        for name in [name for name, shared in self._shared.items() if shared is process]:
            del self._shared[name]
        for place in [place for place in self._joining if place[0] is process]:
            self._stay(self._joining.pop(place))
        process.close()
        self._done(FeedResult(process, None))

    def _end_idle(self, tenant: str | None) -> bool:
        """End the tenant's process that no request has used for the longest time.

        Returns:
            True if a process without requests existed.
        """
        with self._lock:
            for process in self._ready:
                if process.tenant == tenant and not process.live:
                    del self._ready[process]
                    break
            else:
                return False
        self._drop(process)
        return True

    def _watch(self, now: float) -> None:
        """Enforce the limits."""
        starts = any(not helper.loaded for helper in self._helpers.values())
        limit = START_SECONDS if starts else WAIT_SECONDS
        for job in (*self._running, *itertools.chain(*self._queues.values())):
            unseen = now - max(self._watched, job.arrived)
            job.arrived += unseen if unseen > _STOPPED_SECONDS else 0.0
        for job in list(self._running):
            seconds = None if job.process is None else job.process.seconds
            if not job.is_wanted():
                self._give_up(job, None)
            elif seconds is not None and seconds > COMPILE_SECONDS:
                self._give_up(job, _TOO_SLOW)
            elif now - job.arrived > limit:
                self._give_up(job, _BUSY)
            elif seconds is not None and seconds > _QUICK_SECONDS:
                assert job.process is not None
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, job.process.pid, _SLOW_NICENESS)
        for waiting in self._queues.values():
            while waiting and now - waiting[0].arrived > limit:
                self._finish(waiting.popleft(), _BUSY)
        for process, (_, limit) in self._feeds.items():
            if (process.seconds or 0.0) > limit:
                process.kill(TOO_SLOW_TO_MATCH)
        self._watch_memory(now)

    def _watch_memory(self, now: float) -> None:
        if now - self._measured >= _IDLE_WATCH_SECONDS:
            self._measured = now
            self._memory = {process: process.nbytes for process in self._memory}
            self._end_most_idle()
        used = self._memory_by_tenant()
        for tenant, nbytes in used.items():
            if nbytes > TENANT_NBYTES:
                self._take_memory(tenant)
                return
        if sum(used.values()) > TOTAL_NBYTES:
            self._take_memory(max(used, key=lambda name: used[name]))

    def _end_most_idle(self) -> None:
        """Keep at most `MAX_IDLE` idle processes; end those of the tenant with most first."""
        with self._lock:
            idle = Counter(process.tenant for process in self._ready if not process.live)
        for _ in range(idle.total() - MAX_IDLE):
            tenant, _ = idle.most_common(1)[0]
            self._end_idle(tenant)
            idle[tenant] -= 1

    def _take_memory(self, tenant: str | None) -> None:
        """End the least needed process of a tenant."""
        if self._end_idle(tenant):
            return
        compiling = {
            job: job.process.nbytes
            for job in self._running
            if job.process is not None and job.key[0] == tenant
        }
        if compiling:
            largest = max(compiling, key=lambda job: compiling[job])
            self._give_up(largest, _TOO_LARGE)
            return
        own = {process: n for process, n in self._memory.items() if process.tenant == tenant}
        max(own, key=lambda process: own[process]).kill(
            "its grammar takes too much memory to match; simplify it"
        )


def grammar_memory(vocab_size: int, backends: Sequence[str]) -> int:
    """Return the maximum memory of all grammar processes of one engine, in bytes.

    Args:
        vocab_size: width of the logits.
        backends: names of the installed backends.
    """
    helpers = [_HELPER_NBYTES[name] for name in backends]
    return TOTAL_NBYTES + sum(nbytes + per_token * vocab_size for nbytes, per_token in helpers)


def _send_grammar(process: GrammarProcess, spec: GrammarSpec) -> None:
    number = process.num_grammars
    process.num_grammars += 1
    send(process.jobs, msgspec.msgpack.encode(Compile(number, spec)))


def _receive(process: GrammarProcess, decoder: msgspec.msgpack.Decoder[_T]) -> _T | None:
    """Return a process's next message on `jobs`; None if the process has ended.

    A process with an unreadable message is killed.
    """
    try:
        data = receive(process.jobs)
        return None if data is None else decoder.decode(data)
    except (OSError, msgspec.MsgspecError):
        process.kill(BROKEN_ANSWER)
        return None


def _cause_of_death(process: GrammarProcess) -> str:
    """Return the rest of a sentence that begins with "the grammar"."""
    status = process.close()
    cause = signal_name(-status) if status < 0 else f"status {status}"
    return (
        f"takes more than {COMPILE_NBYTES / 2**20:.0f} MiB to compile, or the library failed on it "
        f"({cause}); simplify it."
    )


def _loading_error(answer: Loaded) -> RequestError:
    """Return the error of the requests if a helper cannot load its library."""
    assert answer.error is not None
    error = make_error(answer.error_kind, answer.error)
    if isinstance(error, RequestError):
        return error  # the model's tokenizer is unsuitable
    return StepFailedError(f"The grammar library cannot be loaded: {answer.error}")
