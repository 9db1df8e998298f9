"""Measure effects on other clients while one client sends large grammars repeatedly.

    python -m benchmarks.grammar_attacks [--seconds 6] [--backends auto llguidance xgrammar]
        [--only TEXT] [--attackers 1]

A server with the built-in model and two API keys is started. With one of them an attacker repeats a
request with a grammar of `tests/structured_output/large_grammars.py`. With the other one a light
client sends small requests, one after the other: plain ones, to measure the time to the first
token, and ones with small grammars, each with another. The same is measured without the attacker
just before.

A line for each grammar and backend:
  attacker  its answers' statuses, and the longest time
  wait      the light client's median and longest wait for a first token, relative to those before
  grammars  the same ratios for the whole time of requests with small grammars
  PSS       memory of all the server's processes at its peak, and the memory plan
  the end   the missed targets: the longest wait is at most twice that before, and so is the
            median of small grammars; all statuses of the light client are 200; memory is within
            the plan; the attacker has an answer within 10 s, with a status below 500 or 503
At the end, the status of each honest grammar, and all missed targets.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from queue import Empty

import httpx
import psutil

from octavo.messages import GrammarSpec
from tests.structured_output.large_grammars import HONEST, LARGE

ATTACKER, LIGHT = "attacker-" + "a" * 24, "light-" + "b" * 24
MAX_RATIO, MAX_SECONDS = 2.0, 10.0
# Timeout of an attacker's answer.
GIVE_UP_SECONDS = 60.0
BACKENDS = ("auto", "llguidance", "xgrammar")
Answer = tuple[int, float]
"""Status, and seconds."""


@dataclass
class Server:
    """Server under attack."""

    url: str
    process: subprocess.Popen[str]
    plan: float = 0.0
    """Its memory plan, in MiB."""

    def read(self) -> None:
        """Read its log until it ends."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"memory plan: ([\d,]+) MiB", line):
                self.plan = float(found[1].replace(",", ""))
            if re.search(r"\b(ERROR|CRITICAL)\b|Traceback", line):
                print("  server:", line.rstrip(), flush=True)

    def pss(self) -> float:
        """Return the memory of all its processes, in MiB."""
        root = psutil.Process(self.process.pid)
        return sum(_pss(process.pid) for process in [root, *root.children(recursive=True)]) / 1024


@contextlib.contextmanager
def serve() -> Iterator[Server]:
    """Start a server with the built-in model; wait until it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", "octavo/stories", "--host", "127.0.0.1"]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--api-key", ATTACKER, LIGHT],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    server = Server(f"http://127.0.0.1:{port}", process)
    threading.Thread(target=server.read, daemon=True).start()
    try:
        while not _is_ready(server):
            time.sleep(0.2)
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _is_ready(server: Server) -> bool:
    if server.process.poll() is not None:
        sys.exit(f"The server has ended with status {server.process.returncode}.")
    with contextlib.suppress(httpx.HTTPError):
        status, _ = first_token(server.url, _client(LIGHT))
        return status == 200 and server.plan > 0
    return False


def _client(key: str) -> httpx.Client:
    return httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=GIVE_UP_SECONDS)


def _pss(pid: int) -> int:
    """Return a process's proportional memory in KiB; 0 if it has just ended."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        if found := re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE):
            return int(found[1])
    return 0


def body(spec: GrammarSpec | None = None, backend: str = "auto", **fields: object) -> bytes:
    """Return a small request, with a grammar if one is given."""
    request = {"prompt": "x", "max_tokens": 4, **fields}
    if spec is not None:
        is_json = spec.kind in ("json", "choice", "structural_tag")
        value = json.loads(spec.text) if is_json else spec.text
        request["structured_outputs"] = {spec.kind: value, "backend": backend}
    return json.dumps(request).encode()


def send(url: str, client: httpx.Client, data: bytes) -> Answer:
    """Send a request; return its status and time. Status 0: no answer."""
    began = time.perf_counter()
    status = 0
    with contextlib.suppress(httpx.HTTPError):
        headers = {"Content-Type": "application/json"}
        status = client.post(f"{url}/v1/completions", content=data, headers=headers).status_code
    return status, time.perf_counter() - began


def first_token(url: str, client: httpx.Client) -> Answer:
    """Send a small request; return its status and the time to the first token."""
    began = time.perf_counter()
    headers = {"Content-Type": "application/json"}
    with client.stream(
        "POST", f"{url}/v1/completions", content=body(stream=True), headers=headers
    ) as response:
        pieces = response.iter_bytes()
        next(pieces, None)
        seconds = time.perf_counter() - began
        for _ in pieces:
            pass
    return response.status_code, seconds


_numbers = itertools.count()


def small_grammar(url: str, client: httpx.Client) -> Answer:
    """Send a request with a small grammar that was never sent before."""
    name = f"field_{next(_numbers)}"
    schema = {
        "type": "object",
        "properties": {name: {"enum": ["yes", "no"]}, "count": {"type": "integer"}},
        "required": [name],
        "additionalProperties": False,
    }
    return send(url, client, body(GrammarSpec("json", json.dumps(schema))))


@dataclass
class Light:
    """Observations of the light client."""

    plain: list[Answer]
    small: list[Answer]

    def statuses(self) -> list[int]:
        """Return the statuses of all answers."""
        return [status for status, _ in self.plain + self.small]


def be_light(url: str, seconds: float) -> Light:
    """Run the light client for some seconds: two connections, one for each kind of request."""
    end = time.monotonic() + seconds
    light = Light([], [])

    def repeat(ask: Callable[[str, httpx.Client], Answer], answers: list[Answer]) -> None:
        with _client(LIGHT) as client:
            while not answers or time.monotonic() < end:
                began = time.perf_counter()
                try:
                    answers.append(ask(url, client))
                except httpx.HTTPError:
                    answers.append((0, time.perf_counter() - began))
                time.sleep(0.02)

    threads = [
        threading.Thread(target=repeat, args=(first_token, light.plain)),
        threading.Thread(target=repeat, args=(small_grammar, light.small)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return light


def attack(url: str, data: bytes, seconds: float, begun: Event, answers: Queue[Answer]) -> None:
    """Repeat a request, and wait for the last answer."""
    with _client(ATTACKER) as client:
        begun.set()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            answers.put(send(url, client, data))


@dataclass
class Result:
    """Result of one grammar with one backend."""

    answers: list[Answer]
    before: Light
    under: Light
    pss: float
    plan: float

    @staticmethod
    def _ratios(before: list[Answer], under: list[Answer]) -> tuple[float, float]:
        """Return the ratios of the median and of the longest time."""
        old, new = [seconds for _, seconds in before], [seconds for _, seconds in under]
        return statistics.median(new) / statistics.median(old), max(new) / max(old)

    @property
    def wait(self) -> tuple[float, float]:
        """Ratios of the waits for a first token."""
        return self._ratios(self.before.plain, self.under.plain)

    @property
    def grammars(self) -> tuple[float, float]:
        """Ratios of the times of small grammars."""
        return self._ratios(self.before.small, self.under.small)

    def misses(self) -> list[str]:
        """Return the missed targets."""
        aims = {
            "wait": self.wait[1] <= MAX_RATIO,
            "grammars": self.grammars[0] <= MAX_RATIO,
            "light's status": {*self.before.statuses(), *self.under.statuses()} == {200},
            "PSS": self.pss <= self.plan,
            "attacker's time": max(seconds for _, seconds in self.answers) <= MAX_SECONDS,
            "attacker's status": all(
                200 <= status < 500 or status == 503 for status, _ in self.answers
            ),
        }
        return [name for name, is_met in aims.items() if not is_met]

    def __str__(self) -> str:
        statuses = " ".join(f"{s} x{n}" for s, n in Counter(s for s, _ in self.answers).items())
        longest = max(seconds for _, seconds in self.answers)
        return (
            f"{statuses:16} {longest:6.2f} s  wait {self.wait[0]:5.2f} {self.wait[1]:5.2f}  "
            f"grammars {self.grammars[0]:5.2f} {self.grammars[1]:5.2f}  "
            f"PSS {self.pss:6,.0f}/{self.plan:,.0f} MiB  {', '.join(self.misses()) or 'ok'}"
        )


class Watch:
    """Context manager that watches the memory of a server.

    Attributes:
        peak: maximum MiB at one time.
    """

    def __init__(self, server: Server) -> None:
        self.peak = 0.0
        self._server, self._done = server, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(0.2):
            self.peak = max(self.peak, self._server.pss())


def measure(server: Server, data: bytes, seconds: float, attackers: int) -> Result:
    """Measure the light client alone, then with attackers."""
    spawn = multiprocessing.get_context("spawn")
    queue: Queue[Answer] = spawn.Queue()
    with Watch(server):  # for the same overhead
        before = be_light(server.url, seconds)
    # Separate processes, which share no lock with the light client.
    processes = []
    for _ in range(attackers):
        begun = spawn.Event()
        args = (server.url, data, seconds, begun, queue)
        processes.append(spawn.Process(target=attack, args=args, daemon=True))
        processes[-1].start()
        begun.wait()
    answers: list[Answer] = []
    with Watch(server) as watch:
        under = be_light(server.url, seconds)
        while any(process.is_alive() for process in processes) or not queue.empty():
            with contextlib.suppress(Empty):
                answers.append(queue.get(timeout=0.2))
    return Result(answers, before, under, watch.peak, server.plan)


def main() -> None:
    """Print a line for each grammar and backend."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="duration of each measurement")
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument(
        "--only", default="", help="run only grammars with this text in their names"
    )
    parser.add_argument("--attackers", type=int, default=1, help="number of concurrent attackers")
    options = parser.parse_args()
    missed: list[str] = []
    count = 0
    with serve() as server:
        with _client(LIGHT) as client:
            for backend in BACKENDS:  # the libraries are loaded at the first use
                send(server.url, client, body(GrammarSpec("regex", "a"), backend))
        for name, backend in itertools.product(LARGE, options.backends):
            if options.only not in name:
                continue
            data = body(LARGE[name], backend)
            result = measure(server, data, options.seconds, options.attackers)
            print(f"{name:42} {backend:10} {result}", flush=True)
            count += 1
            if misses := result.misses():
                missed.append(f"{name}, {backend}: {', '.join(misses)}")
        with _client(LIGHT) as client:
            for name, spec in HONEST.items():
                status, seconds = send(server.url, client, body(spec))
                print(f"{name:42} {'honest':10} {status} {seconds:6.2f} s", flush=True)
                if status != 200:
                    missed.append(f"{name}: status {status}")
    print(f"{count} attacks, {len(HONEST)} honest grammars; {len(missed)} miss an aim")
    for line in missed:
        print(" ", line)


if __name__ == "__main__":
    main()
