"""Grammars of an engine's requests: compiled concurrently with the steps, matched in the steps.

Grammar libraries run in separate processes (`process.py`). A grammar that takes too much time or
memory, or crashes its library, ends a process and fails only requests with that grammar.
"""

from __future__ import annotations

import itertools
import logging
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary, finalize

import msgspec

from octavo.errors import GrammarError, RequestError
from octavo.messages import GrammarOutput
from octavo.request import Request
from octavo.structured_output.client import (
    Feed,
    GrammarProcess,
    Match,
    Matched,
    MatchJob,
    receive,
    receive_into,
    send,
)
from octavo.structured_output.compiler import (
    BROKEN_ANSWER,
    MATCH_SECONDS,
    MATCH_SECONDS_PER_TOKEN,
    TOO_SLOW_TO_MATCH,
    WAIT_SECONDS,
    FeedResult,
    GrammarCompiler,
    Key,
    Placed,
    Ready,
    StartHelper,
)

logger = logging.getLogger(__name__)

MAX_TEXT = 512 * 2**10
"""Maximum number of characters of a grammar."""
# Processor time that a grammar process may use in one step: all requests wait for it.
_STEP_SECONDS, _STEP_SECONDS_PER_ROW, _STEP_SECONDS_PER_TOKEN = 0.15, 0.002, 0.02
# Seconds within which a process must answer, however busy the machine is.
_ANSWER_SECONDS = 10.0

_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[Matched])

_MAX_ALONE, _MAX_REFUSED = 10_000, 1_000


@dataclass(slots=True, eq=False)
class _State:
    """State of a request's matching."""

    process: GrammarProcess
    grammar: int
    """The grammar's number in the process."""
    key: int
    """The request's key in the process."""
    num_sent: int = 0
    """Number of output tokens that were sent to the process."""
    seconds: float = 0.0
    """Processor time so far, in seconds."""


@dataclass(slots=True, eq=False)
class _Job:
    """A request's part of a step."""

    request: Request
    state: _State
    drafts: list[int]
    num_forced: int
    """Number of requested forced tokens, including those of this step."""
    rows: memoryview | bytes = b""
    """int32 [1 + drafts, words], as bytes."""
    forced: list[int] = field(default_factory=list)
    error: str | None = None


class StructuredOutputManager:
    """Store of the grammars of an engine and of each request's state in its grammar.

    Only the engine's thread may call its methods.

    Args:
        start_helper: starts the helper process of a backend.
        backends: names of the backends, in order of preference.
        vocab_size: width of the logits.
        wake: called, on another thread, when `take_finished` has results.
    """

    def __init__(
        self,
        start_helper: StartHelper,
        backends: Sequence[str],
        vocab_size: int,
        wake: Callable[[], object] = lambda: None,
    ) -> None:
        self._wake = wake
        self._start_helper, self._backends = start_helper, backends
        self._row_nbytes = 4 * -(-vocab_size // 32)
        self._compiler: GrammarCompiler | None = None
        self._ready: dict[Key, Placed] = {}
        self._alone: set[int] = set()
        """Hashes of the keys of grammars that must not share a process, since theirs broke."""
        self._refused: dict[int, str] = {}
        """Reasons why grammars broke their dedicated processes, by the hashes of their keys."""
        self._waiting: dict[Key, list[Request]] = {}
        """Requests whose grammars are being compiled."""
        self._feeding: dict[int, Request] = {}
        """Requests with output in feeding, by their keys."""
        self._done: queue.SimpleQueue[Ready | FeedResult] = queue.SimpleQueue()
        self._found: list[tuple[Request, RequestError | None]] = []
        self._arrived = threading.Event()
        self._states: WeakKeyDictionary[Request, _State] = WeakKeyDictionary()
        self._keys = itertools.count()

    @property
    def has_finished(self) -> bool:
        """True if `take_finished` has results."""
        return bool(self._found) or not self._done.empty()

    @property
    def is_compiling(self) -> bool:
        """True if a request waits for its grammar."""
        return bool(self._waiting or self._feeding)

    def add(self, request: Request) -> bool:
        """Add a request with a grammar.

        Returns:
            True if the grammar is ready; otherwise `take_finished` returns the request later.

        Raises:
            GrammarError: the grammar is too large, or broke a process before.
        """
        spec = request.sampling_params.grammar
        assert spec is not None
        if len(spec.text) > MAX_TEXT:
            raise GrammarError(
                f"The grammar has {len(spec.text)} characters; at most {MAX_TEXT} are accepted. "
                "Shorten it."
            )
        key = _key_of(request)
        if hash(key) in self._refused:
            raise GrammarError(f"When it was used before: {self._refused[hash(key)]}.")
        return self._join(request, key)

    def take_finished(self) -> list[tuple[Request, RequestError | None]]:
        """Return the requests whose grammar has been compiled or rejected, with the error.

        Some may have ended meanwhile.
        """
        while not self._done.empty():
            self._take(self._done.get())
        found, self._found = self._found, []
        return found

    def wait(self, seconds: float) -> None:
        """Wait at most the given time until `take_finished` has results."""
        if self._arrived.wait(seconds):
            self._arrived.clear()

    def make_output(
        self, requests: Sequence[tuple[Request, int]], drafts: dict[str, list[int]]
    ) -> tuple[GrammarOutput, dict[Request, str]]:
        """Advance grammars by their requests' new tokens, and return the allowed next tokens.

        Args:
            requests: the sampled requests of a step with a grammar, each with the number of
                requested forced tokens.
            drafts: drafts of the step's requests, by id.

        Returns:
            The worker's part, and the failed requests with the reason.
        """
        jobs = []
        for request, wanted in requests:
            tokens = drafts.get(request.request_id, [])
            forced = wanted and wanted + 1 + len(tokens)
            jobs.append(_Job(request, self._states[request], tokens, forced))
        lost = self._match(jobs)
        if lost:  # another program has killed the process: the tokens restore the state
            self._revive(lost)
            for job in self._match([job for job in lost if job.error is None]):
                job.error = "the process of its grammar was killed again and again"
        good = [job for job in jobs if job.error is None]
        output = GrammarOutput(
            [job.request.request_id for job in good],
            b"".join([job.rows for job in good]),
            {job.request.request_id: job.forced for job in good if job.forced},
        )
        return output, {job.request: job.error for job in jobs if job.error is not None}

    def shutdown(self) -> None:
        """End all grammar processes. A second call is harmless."""
        if self._compiler is not None:
            self._compiler.shutdown()
        self._compiler = None
        self._ready.clear()

    def _join(self, request: Request, key: Key) -> bool:
        """Connect a request with its grammar, as `add` does."""
        if self._compiler is not None and self._compiler.has_ended:
            self._compiler.shutdown()
            self._compiler = None
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._start_helper, self._backends, self._put)
        placed = self._ready.get(key)
        if placed is not None and self._begin(request, placed):
            return not self._feed(request)
        self._ready.pop(key, None)
        waiting = self._waiting.setdefault(key, [])
        waiting.append(request)
        if len(waiting) == 1:
            self._compiler.compile(key, partial(_is_wanted, waiting), hash(key) in self._alone)
        return False

    def _put(self, result: Ready | FeedResult) -> None:
        """Queue a result; runs on the compiler's thread."""
        self._done.put(result)
        self._arrived.set()
        self._wake()

    def _take(self, result: Ready | FeedResult) -> None:
        """Handle a result for its requests."""
        if isinstance(result, FeedResult):
            self._take_fed(result)
            return
        waiting = self._waiting.pop(result.key)
        if isinstance(result.result, RequestError):
            self._found += [(request, result.result) for request in waiting]
            return
        if isinstance(result.result, Placed):
            self._ready[result.key] = result.result
        # Requests that arrived after the compiler had cancelled the grammar start again.
        for request in waiting:
            if not request.status.finished and self._join(request, result.key):
                self._found.append((request, None))
        if isinstance(result.result, Placed):
            result.result.process.live.discard(result.result.hold)

    def _take_fed(self, result: FeedResult) -> None:
        """Note the number of a request's tokens that its grammar has accepted."""
        fed = result.fed
        if fed is None:  # the process has ended
            process, feeding = result.process, self._feeding
            ready = self._ready.items()
            self._ready = {key: placed for key, placed in ready if placed.process is not process}
            keys = [k for k in feeding if self._states[feeding[k]].process is process]
            requests = [feeding.pop(key) for key in keys]
            reason = self._reason_of_end(process, requests)
            for request in requests:
                if reason is not None:
                    self._found.append((request, GrammarError(reason)))
                elif not request.status.finished and self._join(request, _key_of(request)):
                    self._found.append((request, None))
            return
        request = self._feeding.pop(fed.key)
        error: RequestError | None = None
        given = request.all_token_ids[request.num_prompt_tokens :]
        if fed.error is not None:
            error = GrammarError(f"The output in the request: {fed.error}.")
        elif fed.num_accepted < len(given):
            error = GrammarError(
                f"The grammar does not allow the output in the request: token number "
                f"{fed.num_accepted} ({given[fed.num_accepted]})."
            )
        self._found.append((request, error))

    def _begin(self, request: Request, placed: Placed) -> bool:
        """Connect a request with its grammar; return False if the process has ended."""
        assert self._compiler is not None
        process, key = placed.process, next(self._keys)
        if not self._compiler.use(process, key):
            return False
        self._states[request] = _State(process, placed.number, key)
        finalize(request, process.live.discard, key)
        # The grammar's end ends the answer, even with `ignore_eos`: no token can follow.
        request.stop_token_ids |= process.stop_token_ids
        return True

    def _feed(self, request: Request) -> bool:
        """Send a request's output to its process; return True if it has any."""
        given = request.all_token_ids[request.num_prompt_tokens :]
        if not given:
            return False
        assert self._compiler is not None
        state = self._states[request]
        state.num_sent = len(given)
        state.process.known.add(state.key)
        self._feeding[state.key] = request
        self._compiler.feed(state.process, Feed(state.key, state.grammar, given))
        return True

    def _match(self, jobs: Sequence[_Job]) -> list[_Job]:
        """Let the processes match a step; return the jobs of externally killed processes."""
        groups: dict[GrammarProcess, list[_Job]] = {}
        for job in jobs:
            groups.setdefault(job.state.process, []).append(job)
        pending = {process.steps.fileno(): process for process in groups}
        began: dict[GrammarProcess, float | None] = {}
        limits: dict[GrammarProcess, float] = {}
        poll = select.poll()
        lost: list[_Job] = []
        for process, group in groups.items():
            message = self._make_match(process, group)
            began[process], limits[process] = process.seconds, _limit(message)
            try:
                process.steps.settimeout(_ANSWER_SECONDS)
                send(process.steps, _ENCODER.encode(message))
                poll.register(process.steps, select.POLLIN)
            except OSError:
                del pending[process.steps.fileno()]
                lost += self._note_end(process, group)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while pending:
            for fd, _ in poll.poll(20):
                process = pending.pop(fd)
                poll.unregister(fd)
                if not self._read(process, groups[process]):
                    lost += self._note_end(process, groups[process])
            is_late = time.monotonic() > deadline
            for process in pending.values():
                now, start = process.seconds, began[process]
                took = None if now is None or start is None else now - start
                if is_late or (took is not None and took > limits[process]):
                    process.kill(TOO_SLOW_TO_MATCH)  # then its socket ends
        return lost

    def _make_match(self, process: GrammarProcess, group: Sequence[_Job]) -> Match:
        ended = process.known - process.live
        process.known -= ended
        jobs = []
        for job in group:
            request, state = job.request, job.state
            new = request.all_token_ids[request.num_prompt_tokens + state.num_sent :]
            state.num_sent += len(new)
            process.known.add(state.key)
            jobs.append(MatchJob(state.key, state.grammar, new, job.drafts, job.num_forced))
        return Match(jobs, list(ended))

    def _read(self, process: GrammarProcess, group: Sequence[_Job]) -> bool:
        """Read a process's answer; return False if it has none."""
        try:
            data = receive(process.steps)
            if data is None:
                return False
            answers = _DECODER.decode(data)
            if len(answers) != len(group):
                raise msgspec.ValidationError("another number of answers than of requests")
            counts = [1 + len(job.drafts) for job in group]
            rows = memoryview(bytearray(sum(counts) * self._row_nbytes))
            if not receive_into(process.steps, rows):
                return False
        except OSError:
            return False
        except msgspec.MsgspecError:
            process.kill(BROKEN_ANSWER)
            return False
        end = 0
        for job, count, answer in zip(group, counts, answers, strict=True):
            begin, end = end, end + count * self._row_nbytes
            job.rows = rows[begin:end]
            job.error, job.forced = answer.error, answer.forced
            job.state.seconds += answer.seconds
            allowed = MATCH_SECONDS + MATCH_SECONDS_PER_TOKEN * job.request.num_output_tokens
            if job.state.seconds > allowed:
                job.error = TOO_SLOW_TO_MATCH
        return True

    def _note_end(self, process: GrammarProcess, group: list[_Job]) -> list[_Job]:
        """Find out why a process has ended; return the jobs that may try again."""
        reason = self._reason_of_end(process, [job.request for job in group])
        for job in group:
            job.error = reason
        return group if reason is None else []

    def _reason_of_end(self, process: GrammarProcess, requests: Sequence[Request]) -> str | None:
        """Return why the grammar of requests ended its process; None: compile it again.

        In a process with several grammars the faulty one is unknown. Each continues in its own
        process.
        """
        status = process.close()
        if process.reason is None and status == -signal.SIGKILL:
            return None  # neither Octavo nor the grammar caused it
        if process.num_grammars > 1:
            if len(self._alone) > _MAX_ALONE:
                self._alone.clear()
            self._alone.update(hash(_key_of(request)) for request in requests)
            return None
        reason = process.reason or (
            f"its grammar takes too much memory to match, or the library failed on it (status "
            f"{status}); simplify it"
        )
        if len(self._refused) >= _MAX_REFUSED:
            self._refused.clear()
        for request in requests:
            self._refused[hash(_key_of(request))] = reason
        return reason

    def _revive(self, jobs: Sequence[_Job]) -> None:
        """Compile the grammars of a step again, and wait for them."""
        left: dict[Request, _Job] = {}
        for job in jobs:
            del self._states[job.request]
            left[job.request] = job
            if self._join(job.request, _key_of(job.request)):
                self._found.append((job.request, None))
        deadline = time.monotonic() + WAIT_SECONDS
        while left and time.monotonic() < deadline:
            self.wait(0.0 if self.has_finished else 0.1)
            others = []
            for request, error in self.take_finished():
                if request not in left:
                    others.append((request, error))
                    continue
                job = left.pop(request)
                if error is None:
                    job.state = self._states[request]
                else:
                    job.error = error.message
            self._found += others
        for job in left.values():
            job.error = "the process of its grammar was killed, and no other one was ready in time"


def _key_of(request: Request) -> Key:
    spec = request.sampling_params.grammar
    assert spec is not None
    return request.options.tenant, spec


def _is_wanted(waiting: Sequence[Request]) -> bool:
    """Return True if a request still waits for its grammar; runs on the compiler's thread."""
    return not all(request.status.finished for request in list(waiting))


def _limit(match: Match) -> float:
    """Return the processor time that a process may take for a step, in seconds."""
    rows = sum(1 + len(job.drafts) for job in match.jobs)
    tokens = sum(len(job.token_ids) for job in match.jobs)
    return _STEP_SECONDS + rows * _STEP_SECONDS_PER_ROW + tokens * _STEP_SECONDS_PER_TOKEN
