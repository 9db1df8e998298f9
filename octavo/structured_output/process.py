"""Processes in which grammar libraries run: a helper, and one process for each grammar.

Grammar libraries are native code that reads users' input. A grammar may make them compute for
minutes, use all memory, or crash, and no call into them can be interrupted. So no other process
of Octavo loads one.

The helper (`main`) loads one library and the tokenizer, which takes at most a second. Then it only
forks: in about 3 ms a new process has both, and shares their memory until one of the two writes.
The new process limits its memory, compiles one grammar, and then matches it for the requests of one
tenant (`GrammarServer`). So the engine can kill a slow or large process, and only requests with
that grammar of that tenant are affected. `client.py` is the engine's side.

A process reads two sockets. `jobs` carries the grammar, and later the requests that already have
output. Such output is fed in small pieces, because the engine waits for bitmasks on `steps`, which
has precedence. Each process ends when its sockets are closed; all end with the helper, and the
helper ends with the engine.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.errors import GrammarError, OctavoError
from octavo.structured_output.base import MAX_FORCED, CompiledGrammar, Grammar, GrammarBackend
from octavo.structured_output.client import (
    Compile,
    Compiled,
    Fed,
    Feed,
    HelperSetup,
    Loaded,
    Match,
    Matched,
    MatchJob,
    receive,
    send,
)
from octavo.structured_output.limits import check_size
from octavo.structured_output.vocabulary import Vocabulary
from octavo.system.device import signal_at_parents_end, trim_memory
from octavo.text.tokenizer import Tokenizer

# Number of tokens that are fed before the process looks for a step again.
_FED_AT_ONCE = 16
_BACKENDS = {"llguidance": "LLGuidanceBackend", "xgrammar": "XGrammarBackend"}

# Trial of a new grammar: tokens of an allowed text, and processor time of each mask.
_TRIAL_TOKENS, _TRIAL_SECONDS = 8, 0.05

_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Match)

MakeBackend = Callable[[HelperSetup], GrammarBackend]


def main(make_backend: MakeBackend | None = None) -> None:
    """Load the backend that the first message names, and fork until standard input ends.

    Args:
        make_backend: another factory of the backend, for tests.
    """
    # The engine decides when to stop; a Ctrl-C in the terminal reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=sys.stdin.fileno())
    with contextlib.suppress(ConnectionError):
        data = receive(connection)
        if data is None:
            return
        setup = msgspec.msgpack.decode(data, type=HelperSetup)
        try:
            backend = (make_backend or _make_backend)(setup)
        except Exception as error:
            kind = type(error).__name__ if isinstance(error, OctavoError) else None
            send(connection, msgspec.msgpack.encode(Loaded(str(error) or repr(error), kind)))
            return
        gc.collect()
        gc.freeze()  # a collection in a forked process would copy all pages of the helper
        trim_memory()
        send(connection, msgspec.msgpack.encode(Loaded()))
        _serve(connection, backend, setup)


def _make_backend(setup: HelperSetup) -> GrammarBackend:
    """Make the backend that the setup names, for the tokenizer in its folder.

    Raises:
        ImportError: its library is not installed.
        OctavoError: the tokenizer is unsuitable.
    """
    module = importlib.import_module(f"octavo.structured_output.{setup.backend}_backend")
    tokenizer = Tokenizer.from_folder(Path(setup.folder), setup.tokenizer_mode)
    vocabulary = Vocabulary.from_tokenizer(tokenizer, setup.vocab_size, setup.eos_token_ids)
    backend: GrammarBackend = getattr(module, _BACKENDS[setup.backend])(vocabulary)
    return backend


def _serve(connection: socket.socket, backend: GrammarBackend, setup: HelperSetup) -> None:
    """Fork processes and reap them on the engine's request."""
    while True:
        command, fds, _, _ = socket.recv_fds(connection, 1, 2)
        if not command:
            return
        if command == b"f":
            try:
                answer = os.fork()
            except OSError as error:
                answer = -(error.errno or 1)
            if answer == 0:
                connection.close()
                _run_grammar_server(backend, setup, *fds)
            for fd in fds:
                os.close(fd)
        else:
            pid = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
            answer = _reap(pid)
        connection.sendall(answer.to_bytes(8, "little", signed=True))


def _reap(pid: int) -> int:
    """Return a process's exit status, or minus the signal that ended it."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # already reaped
        return -signal.SIGKILL


def _run_grammar_server(
    backend: GrammarBackend, setup: HelperSetup, jobs_fd: int, steps_fd: int
) -> NoReturn:
    """Run a grammar process until the engine closes the sockets, and exit."""
    status = 1
    try:
        signal_at_parents_end(signal.SIGKILL)
        with contextlib.suppress(FileNotFoundError):  # only Linux counts and limits the memory
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            limit = used + setup.max_nbytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        server = GrammarServer(backend, setup)
        with contextlib.suppress(ConnectionError):
            server.run(socket.socket(fileno=jobs_fd), socket.socket(fileno=steps_fd))
        status = 0
    finally:
        os._exit(status)


class GrammarServer:
    """Server that compiles grammars, and matches them for many requests."""

    def __init__(self, backend: GrammarBackend, setup: HelperSetup) -> None:
        self._backend, self._setup = backend, setup
        self._num_words = -(-setup.vocab_size // 32)
        self._compiled: dict[int, CompiledGrammar] = {}
        self._grammars: dict[int, Grammar] = {}

    def run(self, jobs: socket.socket, steps: socket.socket) -> None:
        """Answer messages until a socket ends."""
        feeds: deque[tuple[Feed, int]] = deque()
        poll = select.poll()
        poll.register(steps, select.POLLIN)
        poll.register(jobs, select.POLLIN)
        while True:
            for fd, _ in poll.poll(0 if feeds else None):
                data = receive(steps if fd == steps.fileno() else jobs)
                if data is None:
                    return
                if fd == steps.fileno():
                    self._match(_DECODER.decode(data), steps)
                    continue
                message = msgspec.msgpack.decode(data, type=Compile | Feed)
                if isinstance(message, Compile):
                    send(jobs, msgspec.msgpack.encode(self._compile(message)))
                else:
                    feeds.append((message, 0))
            if feeds:
                feed, at = feeds.popleft()
                answer = self._feed(feed, at)
                if answer is None:
                    feeds.append((feed, at + _FED_AT_ONCE))
                else:
                    send(jobs, msgspec.msgpack.encode(answer))

    def _compile(self, message: Compile) -> Compiled:
        try:
            check_size(message.spec)
            compiled = self._backend.compile(message.spec)
            self._try(compiled)
        except GrammarError as error:
            return Compiled(message.grammar, error.message)
        except MemoryError:
            return Compiled(
                message.grammar,
                f"{self._backend.name}: the grammar takes more than "
                f"{self._setup.max_nbytes / 2**20:.0f} MiB to compile; simplify it.",
            )
        except Exception as error:
            return Compiled(
                message.grammar,
                f"{self._backend.name}: the grammar cannot be compiled: "
                f"{type(error).__name__}: {str(error)[:300]}",
            )
        self._compiled[message.grammar] = compiled
        return Compiled(message.grammar, None, sorted(compiled.stop_token_ids))

    def _try(self, compiled: CompiledGrammar) -> None:
        """Match an allowed text, as steps would.

        Raises:
            GrammarError: steps would wait too long.
            Exception: any error of the library.
        """
        row = np.zeros(self._num_words, np.int32)
        choice = random.Random(0)
        began = time.process_time()
        grammar = compiled.start()
        for _ in range(_TRIAL_TOKENS):
            grammar.fill_bitmask(row)
            grammar.forced_tokens(MAX_FORCED)
            if time.process_time() - began > _TRIAL_SECONDS:
                raise GrammarError(
                    f"{self._backend.name}: the grammar takes too long to match; simplify it."
                )
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            if grammar.is_terminated or not len(allowed):
                break
            began = time.process_time()
            if not grammar.accept_tokens([int(choice.choice(allowed))]):
                break

    def _feed(self, feed: Feed, at: int) -> Fed | None:
        """Advance a request by its next tokens; return None if more follow."""
        new = feed.token_ids[at : at + _FED_AT_ONCE]
        try:
            accepted = self._get_grammar(feed.key, feed.grammar).accept_tokens(new)
        except Exception as error:
            return Fed(feed.key, at, _describe(error))
        if accepted == len(new) and at + accepted < len(feed.token_ids):
            return None
        return Fed(feed.key, at + accepted)

    def _match(self, match: Match, steps: socket.socket) -> None:
        for key in match.ended:
            self._grammars.pop(key, None)
        counts = [1 + len(job.drafts) for job in match.jobs]
        rows = np.zeros((sum(counts), self._num_words), np.int32)
        answers, end, began = [], 0, time.process_time()
        for job, count in zip(match.jobs, counts, strict=True):
            end += count
            error, forced = self._run(job, rows[end - count : end])
            began, before = time.process_time(), began
            answers.append(Matched(error, began - before, forced))
        # In one piece: the engine must wake only once.
        send(steps, _ENCODER.encode(answers), rows.data.cast("B"))

    def _run(self, job: MatchJob, rows: NDArray[np.int32]) -> tuple[str | None, list[int]]:
        """Advance a request by its new tokens, and fill its rows.

        Args:
            job: the request's part of the step.
            rows: int32 [1 + drafts, words], zero.

        Returns:
                The reason if the request fails, and its forced tokens.
        """
        try:
            grammar = self._get_grammar(job.key, job.grammar)
            accepted = grammar.accept_tokens(job.token_ids)
            if accepted < len(job.token_ids):
                token = job.token_ids[accepted]
                return (
                    f"internal error: token {token} was sampled, which its grammar does not allow"
                ), []
            return None, _fill(grammar, job, rows)
        except Exception as failure:
            return _describe(failure), []

    def _get_grammar(self, key: int, number: int) -> Grammar:
        """Return the state of a request in a grammar; that of a new request is the beginning."""
        grammar = self._grammars.get(key)
        if grammar is None:
            grammar = self._grammars[key] = self._compiled[number].start()
        return grammar


def _fill(grammar: Grammar, job: MatchJob, rows: NDArray[np.int32]) -> list[int]:
    """Fill a row for the next position and one for each draft; return forced tokens."""
    grammar.fill_bitmask(rows[0])
    forced = grammar.forced_tokens(job.num_forced) if job.num_forced else []
    count = 0
    for draft in job.drafts:
        if not grammar.accept_tokens([draft]):
            rows[count + 1 :] = rows[count]  # samples at these positions are dropped
            break
        count += 1
        grammar.fill_bitmask(rows[count])
    grammar.rollback(count)
    return forced


def _describe(error: Exception) -> str:
    """Return the reason for which a request fails."""
    if isinstance(error, GrammarError):
        return error.message
    if isinstance(error, MemoryError):
        return "its grammar takes too much memory to match; simplify it"
    return f"its grammar failed: {type(error).__name__}: {str(error)[:300]}"


if __name__ == "__main__":
    main()
