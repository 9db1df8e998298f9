"""Grammars of an engine's requests: compiled beside the steps, advanced while the model computes.

Backends are libraries in C++ and Rust that let go of the interpreter's lock, and that cannot be
interrupted. What they take too long for fails the request that asked for it; the thread that it
keeps busy ends when the library comes back.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from octavo.device import check_memory
from octavo.errors import GrammarError, RequestError, StepFailedError
from octavo.messages import GrammarOutput, GrammarSpec
from octavo.request import Request, RequestStatus
from octavo.structured_output.base import CompiledGrammar, Grammar, GrammarBackend

logger = logging.getLogger(__name__)

MAX_TEXT = 512 * 2**10
"""Most characters of a grammar."""
COMPILE_SECONDS = 10.0
"""That compiling a grammar may take."""
CACHE_NBYTES = 128 * 2**20
"""Of compiled grammars that are kept."""
COMPILE_THREADS = 2
# Threads that a library keeps busy beyond its time: with so many, nothing is compiled.
_MAX_LOST = 4
# What a request's grammar may take in one step (by the clock, up to twice as long), and in all
# (processor time): its share of a step is on everybody's way.
_STEP_SECONDS = 1.0
_SECONDS, _SECONDS_PER_TOKEN = 2.0, 0.02

_TOO_SLOW = "its grammar takes too long to match; simplify it"

MakeBackends = Callable[[], Sequence[GrammarBackend]]
_Result = CompiledGrammar | RequestError | MemoryError | None
"""What became of a grammar; None: nobody waited for it any more."""


@dataclass(slots=True, eq=False)
class _State:
    """A request's grammar, and how far it has come."""

    grammar: Grammar
    num_accepted: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Job:
    """What a request's grammar is asked for in a step."""

    request: Request
    state: _State
    drafts: list[int]
    rows: NDArray[np.int32]
    """[1 + drafts, words]"""
    num_forced: int
    """Forced tokens wanted, those of this step included."""
    forced: list[int] = field(default_factory=list)
    error: str | None = None

    def run(self) -> None:
        """Advances by the request's new tokens, and fills the rows."""
        began, request, state = time.thread_time(), self.request, self.state
        try:
            self._fill(request.all_token_ids[request.num_prompt_tokens + state.num_accepted :])
        except GrammarError as error:
            self.error = error.message
        except Exception as error:
            check_memory()
            logger.exception("a grammar failed")
            self.error = f"its grammar failed: {type(error).__name__}: {error}"
        state.seconds += time.thread_time() - began
        if state.seconds > _SECONDS + _SECONDS_PER_TOKEN * request.num_output_tokens:
            self.error = _TOO_SLOW

    def _fill(self, new: list[int]) -> None:
        grammar, rows = self.state.grammar, self.rows
        accepted = grammar.accept_tokens(new)
        self.state.num_accepted += accepted
        if accepted < len(new):
            self.error = (
                f"internal error: token {new[accepted]} was sampled, which its grammar does not "
                "allow"
            )
            return
        grammar.fill_bitmask(rows[0])
        if self.num_forced:
            self.forced = grammar.forced_tokens(self.num_forced)
        count = 0
        for draft in self.drafts:
            if not grammar.accept_tokens([draft]):
                rows[count + 1 :] = rows[count]  # what is sampled there is dropped
                break
            count += 1
            grammar.fill_bitmask(rows[count])
        grammar.rollback(count)


class _Jobs:
    """Jobs that are done one after the other, until one takes too long."""

    def __init__(self, jobs: Sequence[_Job]) -> None:
        self._jobs = jobs
        self._lock = threading.Lock()
        self.at = 0
        """How many are done."""
        self._cancelled = False

    def run(self) -> None:
        """Does them."""
        for job in self._jobs:
            job.run()
            with self._lock:
                if self._cancelled:
                    return
                self.at += 1

    def cancel(self, at: int) -> bool:
        """Leaves the rest alone, unless more than `at` jobs are done."""
        with self._lock:
            self._cancelled = self.at == at
            return self._cancelled


class _Thread:
    """A thread for calls that may never come back."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None]
        self._calls = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="octavo-grammar", daemon=True)
        self.thread.start()

    def start(self, function: Callable[[], None]) -> Future[None]:
        """Begins a call."""
        future: Future[None] = Future()
        self._calls.put((function, future))
        return future

    def end(self) -> None:
        """Ends the thread, once it has come back."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            function, future = call
            try:
                function()
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)


class StructuredOutputManager:
    """Compiles grammars, and keeps where each request stands in its own.

    All methods are for the engine's thread.

    Args:
        make_backends: makes the backends, the one to be asked first first; called on another
            thread with the first grammar, for it imports large libraries.
        vocab_size: width of the logits.
    """

    def __init__(self, make_backends: MakeBackends, vocab_size: int) -> None:
        self.wake: Callable[[], None] = lambda: None
        """Is called, on any thread, when there is something to be taken."""
        self._make_backends = make_backends
        self._backends: Sequence[GrammarBackend] | None = None
        self._lock = threading.Lock()
        self._num_words = -(-vocab_size // 32)
        self._cache: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._waiting: dict[GrammarSpec, list[Request]] = {}
        self._done: queue.SimpleQueue[tuple[GrammarSpec, _Result]]
        self._done = queue.SimpleQueue()
        self._arrived = threading.Event()
        self._pool: ThreadPoolExecutor | None = None
        self._matching: _Thread | None = None
        self._lost: list[_Thread] = []
        """Threads that did not come back in time."""
        self._states: WeakKeyDictionary[Request, _State] = WeakKeyDictionary()

    @property
    def has_finished(self) -> bool:
        """Whether `take_finished` would bring something."""
        return not self._done.empty()

    @property
    def is_compiling(self) -> bool:
        """Whether something is still to come."""
        return bool(self._waiting)

    def add(self, request: Request) -> bool:
        """Takes in a request with a grammar.

        Returns:
            Whether the grammar is there; otherwise the request comes with `take_finished`.

        Raises:
            GrammarError: the grammar is too large, or does not allow the output that the request
                has already.
        """
        spec = request.sampling_params.grammar
        assert spec is not None
        if len(spec.text) > MAX_TEXT:
            raise GrammarError(
                f"The grammar has {len(spec.text)} characters; at most {MAX_TEXT} are taken. "
                "Shorten it."
            )
        compiled = self._cache.get(spec)
        if compiled is not None:
            self._cache.move_to_end(spec)
            self._begin(request, compiled)
            return True
        waiting = self._waiting.setdefault(spec, [])
        waiting.append(request)
        if len(waiting) == 1:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(COMPILE_THREADS, "octavo-grammars")
            self._pool.submit(self._compile, spec, waiting)
        return False

    def take_finished(self) -> list[tuple[Request, RequestError | None]]:
        """The requests whose grammar is there now, or cannot be had, with the reason.

        Some may have ended meanwhile.

        Raises:
            MemoryError: a library lacked memory; what else does nobody knows.
        """
        found: list[tuple[Request, RequestError | None]] = []
        while not self._done.empty():
            spec, result = self._done.get()
            if isinstance(result, MemoryError):
                raise result
            waiting = self._waiting.pop(spec)
            if result is None:  # nobody wanted it when its turn came; somebody may now
                waiting = [r for r in waiting if r.status == RequestStatus.WAITING_FOR_FSM]
                found += [(request, None) for request in waiting if self.add(request)]
                continue
            if isinstance(result, CompiledGrammar):
                self._keep(spec, result)
            for request in waiting:
                error = result if isinstance(result, RequestError) else None
                if isinstance(result, CompiledGrammar):
                    try:
                        self._begin(request, result)
                    except GrammarError as refusal:
                        error = refusal
                found.append((request, error))
        return found

    def wait(self, seconds: float) -> None:
        """Waits until there is something to be taken, at most that long."""
        if self._arrived.wait(seconds):
            self._arrived.clear()

    def make_output(
        self, requests: Sequence[tuple[Request, int]], drafts: dict[str, list[int]]
    ) -> tuple[GrammarOutput, dict[Request, str]]:
        """Advances grammars by their requests' new tokens, and says what may come next.

        Args:
            requests: those of a step that have a grammar and are sampled, and how many forced
                tokens of each are wanted.
            drafts: of a step's requests, by id.

        Returns:
            What the worker is to be told, and requests that fail, with the reason.
        """
        counts = [1 + len(drafts.get(request.request_id, ())) for request, _ in requests]
        words = np.zeros((sum(counts), self._num_words), np.int32)
        jobs, end = [], 0
        for (request, wanted), count in zip(requests, counts, strict=True):
            end += count
            jobs.append(
                _Job(
                    request,
                    self._states[request],
                    drafts.get(request.request_id, []),
                    words[end - count : end],
                    wanted and wanted + count,
                )
            )
        self._do(jobs)
        good = [job for job in jobs if job.error is None]
        output = GrammarOutput(
            [job.request.request_id for job in good],
            b"".join(job.rows.tobytes() for job in good),
            {job.request.request_id: job.forced for job in good if job.forced},
        )
        return output, {job.request: job.error for job in jobs if job.error is not None}

    def shutdown(self) -> None:
        """Lets go of the threads. May be called twice."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self._matching is not None:
            self._matching.end()
        self._pool = self._matching = None

    def _begin(self, request: Request, compiled: CompiledGrammar) -> None:
        state = _State(compiled.start())
        given = request.all_token_ids[request.num_prompt_tokens :]
        state.num_accepted = state.grammar.accept_tokens(given)
        if state.num_accepted < len(given):
            raise GrammarError(
                f"The grammar does not allow the output that the request came with: token number "
                f"{state.num_accepted} ({given[state.num_accepted]})."
            )
        self._states[request] = state
        # Its end is the answer's, whatever `ignore_eos` says: nothing can follow.
        request.stop_token_ids |= compiled.stop_token_ids

    def _keep(self, spec: GrammarSpec, compiled: CompiledGrammar) -> None:
        self._cache[spec] = compiled
        while sum(c.nbytes for c in self._cache.values()) > CACHE_NBYTES and self._cache:
            self._cache.popitem(last=False)

    def _compile(self, spec: GrammarSpec, waiting: Sequence[Request]) -> None:
        """On a thread of the pool: compiles, or says why not."""
        result: _Result = None
        # The list may grow meanwhile, and that is as good.
        if any(request.status == RequestStatus.WAITING_FOR_FSM for request in list(waiting)):
            try:
                result = self._compile_in_time(spec)
            except (RequestError, MemoryError) as error:
                result = error
            except Exception as error:
                try:
                    check_memory()
                except MemoryError as want:
                    result = want
                else:
                    logger.exception("a grammar could not be compiled")
                    result = GrammarError(f"The grammar cannot be compiled: {error}")
        self._done.put((spec, result))
        self._arrived.set()
        self.wake()

    def _compile_in_time(self, spec: GrammarSpec) -> CompiledGrammar:
        backends = self._choose(spec)
        with self._lock:
            self._lost = [thread for thread in self._lost if thread.thread.is_alive()]
            is_busy = len(self._lost) >= _MAX_LOST
        if is_busy:
            raise GrammarError(
                "Grammars that take too long are still being worked on; try again later."
            )
        errors: list[GrammarError] = []
        found: list[CompiledGrammar] = []

        def compile_by_any() -> None:
            for backend in backends:
                try:
                    found.append(backend.compile(spec))
                    return
                except GrammarError as error:
                    errors.append(error)

        thread = _Thread()
        call = thread.start(compile_by_any)
        thread.end()
        try:
            call.result(COMPILE_SECONDS)
        except TimeoutError:
            self._lose(thread)
            raise GrammarError(
                f"The grammar takes more than {COMPILE_SECONDS:g} s to compile; simplify it."
            ) from None
        if found:
            return found[0]
        messages = list(dict.fromkeys(error.message for error in errors))
        raise GrammarError("No grammar for this: " + " | ".join(messages))

    def _choose(self, spec: GrammarSpec) -> Sequence[GrammarBackend]:
        with self._lock:
            if self._backends is None:
                try:
                    self._backends = self._make_backends()
                except Exception as error:
                    check_memory()
                    logger.exception("the grammar libraries could not be loaded")
                    raise StepFailedError(
                        f"The grammar libraries cannot be loaded: {error}"
                    ) from error
        return [b for b in self._backends if spec.backend in ("auto", b.name)]

    def _lose(self, thread: _Thread) -> None:
        with self._lock:
            self._lost.append(thread)

    def _do(self, jobs: Sequence[_Job]) -> None:
        """Does jobs on another thread, so that no grammar can hold up everybody."""
        while jobs:
            if self._matching is None:
                self._matching = _Thread()
            todo = _Jobs(jobs)
            call = self._matching.start(todo.run)
            while True:
                at = todo.at
                try:
                    call.result(_STEP_SECONDS)
                    return
                except TimeoutError:
                    if todo.cancel(at):
                        break
            self._matching.end()
            self._lose(self._matching)
            self._matching = None
            # The thread that is lost writes to that job's rows only.
            jobs[at].error = _TOO_SLOW
            jobs = jobs[at + 1 :]
