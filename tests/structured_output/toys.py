"""Toy grammar backend for tests: words over the tokens' ids, by very simple rules.

`make_manager` runs it in threads that look like processes. As a program, this file is a helper
process with the toy backend.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.errors import GrammarError
from octavo.messages import GrammarSpec
from octavo.structured_output import process
from octavo.structured_output.base import CompiledGrammar, Grammar, GrammarBackend
from octavo.structured_output.client import (
    PROCESS_NBYTES,
    GrammarProcess,
    HelperSetup,
    Loaded,
    receive,
    send,
)
from octavo.structured_output.manager import StructuredOutputManager

STOP = 1


class ToyGrammar(Grammar):
    """Grammar where token i must be one of `rule(i)`; None: the answer ends there."""

    def __init__(self, rule: Callable[[int], Sequence[int]]) -> None:
        self.rule, self.tokens = rule, []

    def accept_tokens(self, token_ids: Sequence[int]) -> int:
        for count, token in enumerate(token_ids):
            if self.is_terminated or token not in (self.rule(len(self.tokens)) or [STOP]):
                return count
            self.tokens.append(token)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        row[:] = 0
        for token in [STOP] if self.is_terminated else self.rule(len(self.tokens)) or [STOP]:
            row[token // 32] |= np.uint32(1 << token % 32).view(np.int32)

    @property
    def is_terminated(self) -> bool:
        return STOP in self.tokens

    def forced_tokens(self, most: int) -> list[int]:
        found: list[int] = []
        while len(found) < most and len(self.rule(len(self.tokens) + len(found))) == 1:
            found += self.rule(len(self.tokens) + len(found))
        return found


class ToyCompiled(CompiledGrammar):
    stop_token_ids = frozenset({STOP})

    def __init__(self, rule: Callable[[int], Sequence[int]]) -> None:
        self.rule = rule

    def start(self) -> Grammar:
        return ToyGrammar(self.rule)


class ToyBackend(GrammarBackend):
    """Backend whose grammars are lists of the tokens allowed at each place: "3,4 5 6,7".

    "bad ..." is rejected; "slow ..." waits for `go`.
    """

    def __init__(self, name: str = "xgrammar") -> None:
        self.name = name
        self.compiled: list[str] = []
        self.go = threading.Event()
        self.running = threading.Semaphore(0)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        kind, _, rest = spec.text.partition(" ")
        if kind == "bad":
            raise GrammarError(f"{self.name} cannot {rest}")
        self.running.release()
        if kind == "slow":
            assert self.go.wait(100)
        else:
            rest = spec.text
        self.compiled.append(spec.text)
        places = [[int(t) for t in place.split(",")] for place in rest.split()]
        return ToyCompiled(lambda i: places[i] if i < len(places) else [])


def spec(text: str, backend: str = "auto") -> GrammarSpec:
    return GrammarSpec("grammar", text, backend)


class ThreadHelper:
    """`GrammarHelper` whose processes are threads."""

    is_alive = True

    def __init__(self, backend: GrammarBackend, vocab_size: int) -> None:
        self.backend = backend
        self.setup = HelperSetup(backend.name, "", vocab_size, [STOP], 2**30)
        self.socket, self._theirs = socket.socketpair()
        self.processes: list[ThreadProcess] = []
        send(self._theirs, msgspec.msgpack.encode(Loaded()))

    def read_loaded(self) -> Loaded:
        return msgspec.msgpack.decode(receive(self.socket), type=Loaded)

    def fork(self, tenant: str | None) -> ThreadProcess:
        found = ThreadProcess(self, tenant)
        self.processes.append(found)
        return found

    def close(self) -> None:
        self.socket.close()
        self._theirs.close()


class ThreadProcess(GrammarProcess):
    """Grammar process that is a thread; tests set its time and memory."""

    seconds = 0.0
    nbytes = PROCESS_NBYTES

    def __init__(self, helper: ThreadHelper, tenant: str | None) -> None:
        ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
        super().__init__(helper, tenant, 0, *ours)
        self.server = process.GrammarServer(helper.backend, helper.setup)

        def run() -> None:
            with theirs[0], theirs[1], contextlib.suppress(OSError):  # killed
                self.server.run(*theirs)

        threading.Thread(target=run, daemon=True).start()

    def kill(self, reason: str | None) -> None:
        self.reason = self.reason or reason
        for end in (self.jobs, self.steps):
            with contextlib.suppress(OSError):  # shut down before
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> int:
        if self.status is None:
            self.kill(None)
            self.status = -signal.SIGKILL
        return self.status


def make_manager(
    *backends: ToyBackend, vocab_size: int = 40, wake: Callable[[], object] = lambda: None
) -> StructuredOutputManager:
    by_name = {backend.name: backend for backend in backends}
    return StructuredOutputManager(
        lambda name: ThreadHelper(by_name[name], vocab_size), list(by_name), vocab_size, wake
    )


class HostileBackend(ToyBackend):
    """Backend of a process: "spin" computes for ever, "eat" uses all memory, "crash" aborts.

    After "match " they do so during matching. "slow masks" needs 0.08 s for each mask after the
    fifth.
    """

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if spec.text.startswith("slow masks"):
            return ToyCompiled(lambda i: [3, 4] if i < 5 else compute(0.08) or [3, 4])
        when, _, what = spec.text.rpartition(" ")
        if what not in ("spin", "eat", "crash"):
            return super().compile(spec)
        if when != "match":
            misbehave(what)
        return ToyCompiled(lambda i: [3] if i < 20 else misbehave(what))


def compute(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def misbehave(what: str) -> Sequence[int]:
    if what == "crash":
        os.abort()
    if what == "eat":
        return [bytearray(2**24) for _ in range(1000)] and []
    while True:
        time.sleep(0)


if __name__ == "__main__":
    process.main(lambda setup: HostileBackend(setup.backend))
