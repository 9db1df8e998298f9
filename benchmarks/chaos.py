"""Kill a server's processes under load repeatedly, and check that no stream is affected.

    python benchmarks/chaos.py --kills 1000 [--layout nodes-tp2] [--model FOLDER] [--seed 0]

The script starts a server, or a router with two servers. It sends each of some mixed requests
(greedy and sampled, n = 4, logprobs, prompt logprobs, penalties, stop texts, bad words, grammars,
chats, beams) once, undisturbed. Then it sends them together, repeatedly, while processes of the
layout die at random moments: engine cores, workers, warm spares, the headless node, the coordinator
of several front ends, a router's servers, actors of Ray. Kinds of processes take turns. Processes
with clients' connections, and their parents, are spared. The causes are SIGKILL, SIGSEGV, SIGSTOP
(detected by `--progress-timeout`, or sooner; stopped processes are not continued) and a limit on
the memory. A node that died is started again, as by an init system. Every answer is compared with
the undisturbed one, byte for byte. At the end no process, descriptor or file of the server may be
left. Each kill prints a line when it happens, and one when all streams continue. Exit status 1:
something was lost, changed or left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ROLES = ("core", "worker", "spare", "node", "coordinator", "server", "actor")
KINDS = ("SIGKILL", "SIGSEGV", "SIGSTOP", "memory")
PROGRESS_TIMEOUT = 1.0
LAYOUTS = {
    "plain": [],
    "dp2": ["-dp", "2"],
    "tp2": ["-tp", "2"],
    "tp2dp2": ["-tp", "2", "-dp", "2"],
    "nodes": ["-dp", "2", "--data-parallel-size-local", "1"],
    "nodes-tp2": ["-tp", "2", "-dp", "2", "--data-parallel-size-local", "1"],
    "front-ends": ["-asc", "2", "-dp", "2"],
    "front-ends-tp2": ["-asc", "2", "-tp", "2"],
    "elastic": ["-dp", "2", "--enable-elastic-ep", "--enable-admin"],
    "experts": [
        *("-dp", "2", "--enable-elastic-ep", "--enable-admin", "--enable-expert-parallel"),
        *("--enable-eplb", "--eplb-config", '{"window_size": 1, "step_interval": 2}'),
    ],
    "ray-tp2": ["-tp", "2", "--distributed-executor-backend", "ray", "--num-threads", "1"],
    "router": ["--replicas", "2", "--health-check-interval", "0.2"],
    "router-ray": ["--replicas", "2", "--backend", "ray", "--num-threads", "1"],
}
"""Flags of each layout; with engines on nodes there is one node, with the second engine."""
_MODULES = {
    "octavo.engine.core_process": "core",
    "octavo.executor.worker_process": "worker",
    "octavo.server.coordinator_process": "coordinator",
    "serve": "server",
}
# What the titles of Ray's actors begin with.
_ACTORS = {"ray::WorkerActor": "worker", "ray::ServerActor": "actor"}
# Numbers of engines in elastic layouts, in turn; they end with the last one.
_SIZES = (3, 1, 2)
# In the environment of all processes of a run.
_MARK = "OCTAVO_CHAOS_RUN"
# No stream may be silent for longer, and no stopped process may exist for longer.
_SILENT_SECONDS = 120.0
# Share of SIGKILL among a node's deaths: detecting a stopped node takes eight seconds.
_NODE_KILLED = 0.8
# Time after an engine's start in which its spares start.
_REST_SECONDS = 2.0
# Time for a memory limit to end a process, before it is killed.
_MEMORY_SECONDS = 1.0
# Age from which the system ends a process with its parent, even while it is stopped.
_BOUND_SECONDS = 2.0
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
TEXT = "Once upon a time there was a little dog who found a big red ball in the park"
# Fields that differ between equal answers.
_OWN = ("id", "created")


def requests(count: int, max_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Return paths and bodies of mixed requests, the same ones each time."""
    rng = random.Random(0)
    words = TEXT.split()
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"n": 4, "temperature": 0.8},
        {"logprobs": 3, "temperature": 1.0},
        {"prompt_logprobs": 2, "logprobs": 1, "temperature": 0, "stream": False},
        {"stop": ["the park", " and then"], "temperature": 0.9},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"bad_words": ["Lily", "play"], "min_tokens": max_tokens // 2, "stop_token_ids": [14]},
        {"structured_outputs": {"json": _SCHEMA}, "temperature": 1.0},
        {"chat": True, "temperature": 0.7, "logprobs": True, "top_logprobs": 2},
        {"logit_bias": {"20": 3.0}, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"use_beam_search": True, "n": 2, "stream": False, "max_tokens": 12},
    ]
    made = []
    for i in range(count):
        fields = {"max_tokens": max_tokens, "stream": True, "seed": i, **kinds[i % len(kinds)]}
        prompt = " ".join(rng.choices(words, k=rng.randint(3, 60)))
        if fields.pop("chat", False):
            made.append((CHAT, {"messages": [{"role": "user", "content": prompt}], **fields}))
            continue
        if "structured_outputs" not in fields and "stop" not in fields:
            fields.setdefault("ignore_eos", "bad_words" not in fields)
        if fields.get("use_beam_search"):
            del fields["seed"]
        else:
            fields["return_token_ids"] = True
        made.append((COMPLETIONS, {"prompt": prompt, **fields}))
    return made


@dataclass
class Answer:
    """Answer to a request, independent of its division into events."""

    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)
    """Fields of the first event."""
    error: str | None = None

    def add(self, event: dict[str, Any]) -> None:
        """Add an event of the stream, or the whole answer."""
        if "error" in event:
            self.error = json.dumps(event["error"])
        for choice in event.get("choices", ()):
            _join(self.choices.setdefault(choice["index"], {}), choice)
        for name, value in event.items():
            if name not in ("choices", "error", *_OWN):
                self.first.setdefault(name, value)


def _join(held: dict[str, Any], new: dict[str, Any]) -> None:
    """Append texts and lists, at any depth."""
    for name, value in new.items():
        before = held.get(name)
        if isinstance(value, dict):
            if before is None:
                before = held[name] = {}
            _join(before, value)
        elif isinstance(value, str | list) and before and name != "role":
            held[name] = before + value
        elif value is not None or name not in held:
            held[name] = value.copy() if isinstance(value, list) else value


class Load:
    """Client that sends requests to a server, and records the times of events."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(
            base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)
        )
        self.heard: dict[int, float] = {}
        """Time of the latest event of each stream in flight; 0 before the first one."""
        self._count = 0

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def ask(self, path: str, body: dict[str, Any]) -> Answer:
        """Return the answer to one request."""
        answer = Answer()
        self._count = number = self._count + 1
        if body.get("stream"):
            self.heard[number] = 0.0
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if not body.get("stream") or response.status_code != 200:
                    answer.add(json.loads(await response.aread()))
                    return answer
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        self.heard[number] = time.monotonic()
                        answer.add(json.loads(line[6:]))
        except (httpx.HTTPError, ValueError) as error:
            answer.error = repr(error)
        finally:
            self.heard.pop(number, None)
        return answer

    async def scale(self, size: int) -> str:
        """Scale the server to `size` engines; return its answer."""
        body = {"new_data_parallel_size": size}
        answer = await self._client.post("/scale_elastic_ep", json=body)
        return f"{answer.status_code} {answer.text}"

    async def ask_all(self, asked: list[tuple[str, dict[str, Any]]]) -> list[Answer]:
        """Return the answers to concurrent requests."""
        return await asyncio.gather(*(self.ask(path, body) for path, body in asked))


class Site:
    """Server with all its processes.

    Args:
        model: the folder; None: the built-in model.
        layout: one of `LAYOUTS`.
        flags: more flags of `octavo serve`.
        folder: folder for logs and the cluster's key.
    """

    def __init__(self, model: str | None, layout: str, flags: list[str], folder: Path) -> None:
        self._folder = folder
        self._mark = os.urandom(8).hex()
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._files = self._all_files()
        common = [*([model] if model else []), *LAYOUTS[layout]]
        if "--progress-timeout" not in flags:
            common += ["--progress-timeout", str(PROGRESS_TIMEOUT)]
        common += flags
        if layout.startswith("nodes"):
            key = folder / "key"
            key.write_bytes(os.urandom(32).hex().encode())
            key.chmod(0o600)
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            common += ["--data-parallel-address", "127.0.0.1", "--cluster-key-file", str(key)]
            common += ["--data-parallel-rpc-port", str(port)]
        self._node_flags = [*common, "--headless", "--data-parallel-start-rank", "1"]
        self._head_flags = [*common, "--host", "127.0.0.1", "--port", "0"]
        self._head_flags += ["--max-engine-restarts", "1000000"]
        self._head_flags += ["--no-enable-prompt-tokens-details"]
        self._has_node = layout.startswith("nodes")
        self.is_elastic = "--enable-elastic-ep" in LAYOUTS[layout]
        self._command = "router" if layout.startswith("router") else "serve"
        self._node: subprocess.Popen[bytes] | None = None
        self._of_node: list[psutil.Process] = []
        self.log, self._node_log = folder / "server.log", folder / "node.log"
        self.left: list[str] = []
        """Processes and files that are left after its end."""

    def __enter__(self) -> Site:
        self.server = self._start(self._head_flags, self.log)
        try:
            if self._has_node:
                self.start_node()
            found = None
            while found is None:
                if self.server.poll() is not None:
                    raise RuntimeError(f"the server did not start: {self.log.read_text()}")
                time.sleep(0.01)
                found = re.search(r"listening on (\S+)", self.log.read_text())
            self.url = found[1]
            """The server's address."""
            self.settle()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _start(self, flags: list[str], log: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "octavo", self._command, *flags]
        environment = {**os.environ, "NO_COLOR": "1", _MARK: self._mark}
        environment["TMPDIR"] = environment["RAY_TMPDIR"] = str(self._temporary)
        environment.pop("RAY_ADDRESS", None)  # another's cluster
        with log.open("ab") as out:
            return subprocess.Popen(command, stdout=out, stderr=out, env=environment)

    def start_node(self) -> None:
        """Start the node, or replace a dead or stopped one.

        Like an init system, this kills the node's stopped processes: a process that was stopped
        after the node's death cannot notice the death.
        """
        if self._node is not None:
            self._node.kill()
            self._node.wait()
            for process in self._of_node:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.status() == psutil.STATUS_STOPPED:
                        process.kill()
        self._node = self._start(self._node_flags, self._node_log)

    def processes(self) -> list[tuple[str, psutil.Process]]:
        """Return (role, process) of all processes except the front end or the router."""
        found: list[tuple[str, psutil.Process]] = []
        if self._node is not None and self._node.poll() is None:
            node = psutil.Process(self._node.pid)
            found.append(("node", node))
            self._of_node = node.children(recursive=True)
        for root in (psutil.Process(self.server.pid), *(p for _, p in found)):
            spares: set[int] = set()
            for child in root.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # it ends meanwhile
                    role = _role(child.cmdline())
                    if role is None or child.status() == psutil.STATUS_ZOMBIE:
                        continue
                    if (role == "core" and not _talks(child)) or child.ppid() in spares:
                        spares.add(child.pid)
                        role = "spare"
                    found.append((role, child))
        return found

    def settle(self) -> Counter[str]:
        """Wait until all engines are up, and stopped processes are gone; count the processes.

        Raises:
            RuntimeError: the engines do not come up.
        """

        def settled() -> bool:
            if _get(self.url, "/ready") != "ready" or _get(self.url, "/health") != "ok":
                return False
            if self._command == "serve":
                return True
            servers = httpx.get(self.url, timeout=60).json()["servers"]
            return all(server["ready"] for server in servers)

        _wait(settled, lambda: f"the engines: {_get(self.url, '/health')}")
        return Counter(role for role, _ in self.processes())

    def at_rest(self) -> Counter[str]:
        """Wait until no process has started for a while, including spares; count them."""
        counts, since = self.settle(), time.monotonic()
        while time.monotonic() - since < _REST_SECONDS:
            time.sleep(0.1)
            if (now := self.settle()) != counts:
                counts, since = now, time.monotonic()
        return counts

    @property
    def logs(self) -> list[Path]:
        """Logs of the server, and of its node if it has one."""
        return [path for path in (self.log, self._node_log) if path.exists()]

    def num_descriptors(self) -> int:
        """Return the number of descriptors of the front end."""
        return int(psutil.Process(self.server.pid).num_fds())

    def _all_files(self) -> set[str]:
        return {str(path) for at in (Path("/dev/shm"), self._temporary) for path in at.iterdir()}

    def _running(self) -> Iterator[str]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark:
                    yield f"{process.pid} {process.status()} {' '.join(process.cmdline())}"

    def _end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):  # remaining processes are reported
            self.server.send_signal(signal.SIGINT)
            self.server.wait(30)
            if self._node is not None:
                self._node.wait(30)
        end = time.monotonic() + 5.0
        while (running := list(self._running())) and time.monotonic() < end:
            time.sleep(0.05)
        self.left += [*running, *sorted(self._all_files() - self._files)]
        for process in filter(None, (self.server, self._node)):
            process.kill()
            process.wait()


def _role(words: list[str]) -> str | None:
    """Return the role of a process by its command line; None: the process must not die."""
    by_title = (role for title, role in _ACTORS.items() if words and words[0].startswith(title))
    return next(by_title, next((_MODULES[word] for word in words if word in _MODULES), None))


def _talks(core: psutil.Process) -> bool:
    """Return True if a core is in use: a spare one has no address."""
    return any(it.laddr for it in core.net_connections(kind="all"))


def _get(url: str, path: str) -> str:
    answer = httpx.get(url + path, timeout=60).json()
    return str(answer["reason"] if path == "/health" else answer["status"])


def _wait(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    end = time.monotonic() + _SILENT_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"{what()}, after {_SILENT_SECONDS:.0f} s")
        time.sleep(0.005)


class Killer(threading.Thread):
    """Thread that kills processes of a server, one after another or several at once.

    Args:
        site: the server.
        load: the server's load.
        kills: number of kills.
        roles: roles of killed processes, as in `Site.processes`.
        kinds: causes of death, chosen at random.
        at_once: maximum number of simultaneous kills.
        pause: maximum seconds between kills.
        seed: seed of the random numbers.
    """

    def __init__(
        self,
        site: Site,
        load: Load,
        kills: int,
        roles: tuple[str, ...],
        kinds: tuple[str, ...],
        at_once: int,
        pause: float,
        seed: int,
    ) -> None:
        super().__init__(daemon=True)
        self.done: Counter[tuple[str, str]] = Counter()
        """Number of kills by role and cause."""
        self.seconds: dict[tuple[str, str], list[tuple[float, float]]] = {}
        """Seconds from single kills until one stream, and until all streams, continued."""
        self.failure: str | None = None
        self._site, self._load, self._rng = site, load, random.Random(seed)
        self._kills, self._roles, self._kinds = kills, roles, kinds
        self._at_once, self._pause = at_once, pause
        self._begun = time.monotonic()

    def run(self) -> None:
        """Kill until the number of kills is reached."""
        try:
            while self.done.total() < self._kills:
                self._strike()
                time.sleep(self._rng.uniform(0.0, self._pause))
        except Exception as error:
            self.failure = repr(error)

    def _strike(self) -> None:
        """Kill some processes, and wait until every stream that was in flight has continued."""
        # First wait for output: consecutive deaths without output would be attributed to a request.
        begun, load, rng = time.monotonic(), self._load, self._rng
        _wait(lambda: any(t > begun for t in load.heard.copy().values()), lambda: "no token came")
        time.sleep(rng.uniform(0.0, 0.3))
        victims = self._draw()
        killed, in_flight = time.monotonic(), set(load.heard.copy())
        struck = [(role, self._kill(role, process), process) for role, process in victims]
        for role, kind, _ in struck:
            self.done[role, kind] += 1
        names = ", ".join(f"{kind} of {role} {process.pid}" for role, kind, process in struck)
        self.tell(f"{names or 'none there to kill'}; {len(in_flight)} streams")
        node = next((kind for role, kind, _ in struck if role == "node"), None)
        if node is None:  # otherwise its engines end with it
            self._wait_for_ends(struck)
        elif node != "SIGSTOP":
            self._site.start_node()
        gone = time.monotonic() + 0.05  # messages in transit have arrived

        def silent() -> list[int]:
            heard = load.heard.copy()
            return [i for i in in_flight if heard.get(i, gone + 1) < gone]

        def what() -> str:
            return f"{len(silent())} streams silent after {struck}"

        _wait(lambda: any(t > gone for t in load.heard.copy().values()), what)
        first = time.monotonic()
        _wait(lambda: not silent(), what)
        self.tell(f"all go on after {time.monotonic() - killed:.1f} s")
        if len(struck) == 1:
            key = struck[0][:2]
            times = first - killed, time.monotonic() - killed
            self.seconds.setdefault(key, []).append(times)
        if node == "SIGSTOP":  # it can only be killed on its machine
            self._site.start_node()
        self._wait_for_ends(struck)

    def _draw(self) -> list[tuple[str, psutil.Process]]:
        """Return processes to kill together: one of the role with the fewest deaths, and others.

        By chance alone, a role of few processes may be left out.
        """
        there = [it for it in self._site.processes() if it[0] in self._roles]
        if not there:
            return []
        self._rng.shuffle(there)
        turns = Counter(role for role, _ in self.done.elements())
        there.sort(key=lambda it: turns[it[0]])
        most = min(self._at_once, self._kills - self.done.total(), len(there))
        return [there[0], *self._rng.sample(there[1:], self._rng.randint(1, most) - 1)]

    def tell(self, text: str) -> None:
        """Print progress, also into a pipe at once."""
        seconds = time.monotonic() - self._begun
        print(f"{seconds:4.0f} s, kill {self.done.total()} of {self._kills}: {text}", flush=True)

    def _wait_for_ends(self, struck: list[tuple[str, str, psutil.Process]]) -> None:
        """Wait until killed and stopped processes have ended, except for spares."""
        for role, kind, process in struck:
            if role != "spare":
                what = f"{role} {process.pid} is there after {kind}"
                _wait(lambda p=process: not _runs(p), lambda w=what: w)  # type: ignore[misc]

    def _kill(self, role: str, process: psutil.Process) -> str:
        """Kill a process; return the cause."""
        kind = self._rng.choice(self._kinds)
        if role == "node" and "SIGKILL" in self._kinds and self._rng.random() < _NODE_KILLED:
            kind = "SIGKILL"
        with contextlib.suppress(psutil.NoSuchProcess):
            if kind == "SIGSTOP" and time.time() - process.create_time() < _BOUND_SECONDS:
                kind = "SIGKILL"
            if kind == "memory":
                limit = process.memory_info().vms + 2**20
                resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limit))
                end = time.monotonic() + _MEMORY_SECONDS
                while (runs := _runs(process)) and time.monotonic() < end:
                    time.sleep(0.002)
                kind = "memory, then SIGKILL" if runs else "memory"
            process.send_signal(getattr(signal, kind, signal.SIGKILL))
        return kind


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def storm(site: Site, args: argparse.Namespace) -> tuple[list[str], int, Killer]:
    """Send requests while processes die; return errors, the number of answers, and the killer."""
    load = Load(site.url)
    asked = requests(args.streams, args.max_tokens)
    wanted = await load.ask_all(asked)
    for (path, body), answer in zip(asked, wanted, strict=True):
        if answer.error is not None or not answer.choices:
            raise RuntimeError(f"undisturbed, {path} {body} was not answered: {answer}")
    roles, kinds = tuple(args.roles), tuple(args.kinds)
    killer = Killer(site, load, args.kills, roles, kinds, args.at_once, args.pause, args.seed)
    killer.start()
    wrong: list[str] = []
    num_answers = 0

    async def repeat(number: int) -> None:
        nonlocal num_answers
        path, body = asked[number]
        while killer.is_alive():
            answer = await load.ask(path, body)
            num_answers += 1
            if answer != wanted[number]:
                wrong.append(f"{path} {body}\n  is      {answer}\n  was     {wanted[number]}")

    async def scale() -> None:
        while killer.is_alive():
            for size in _SIZES:
                killer.tell(f"{size} engines: {await load.scale(size)}")
        # A kill may have hit the engine that was to come.
        killer.tell(f"{_SIZES[-1]} engines: {await load.scale(_SIZES[-1])}")

    scaling = asyncio.create_task(scale()) if site.is_elastic else None
    tasks = [asyncio.create_task(repeat(number)) for number in range(len(asked))]
    while killer.is_alive():
        await asyncio.sleep(0.05)
    if scaling is not None:
        await scaling
    _, hanging = await asyncio.wait(tasks, timeout=_SILENT_SECONDS)
    for task in hanging:
        task.cancel()
    wrong += [f"not answered in {_SILENT_SECONDS:.0f} s (times: {len(hanging)})"] * bool(hanging)
    for task in set(tasks) - hanging:
        task.result()
    await load.close()
    if killer.failure is not None:
        wrong.append(f"the killer failed: {killer.failure}")
    return wrong, num_answers, killer


def _same(before: Counter[str], now: Counter[str]) -> bool:
    """Return True if the processes are those of before; a spare may still be missing."""
    return now["spare"] <= before["spare"] and all(
        now[role] == before[role] for role in ROLES if role != "spare"
    )


def run(args: argparse.Namespace, layout: str, folder: Path) -> bool:
    """Run the storm in a layout and print the results; return True if there were no errors."""
    started = time.monotonic()
    site = Site(args.model, layout, args.flags, folder)
    with site:
        before, descriptors = site.at_rest(), site.num_descriptors()
        print(
            f"{layout}: ready after {time.monotonic() - started:.0f} s: {dict(before)}", flush=True
        )
        wrong, num_answers, killer = asyncio.run(storm(site, args))
        try:
            _wait(
                lambda: _same(before, site.settle()),
                lambda: f"there were {before}, and are {site.settle()}",
            )
            _wait(
                lambda: site.num_descriptors() <= descriptors,
                lambda: f"{descriptors} descriptors are {site.num_descriptors()}",
            )
        except RuntimeError as error:
            wrong.append(str(error))
    wrong += [f"left: {what}" for what in site.left]
    for line in wrong[:5]:
        print(line)
    if wrong:
        for path in site.logs:
            log = [line for line in path.read_text().splitlines() if " POST " not in line]
            print(f"The end of {path.name}:", *log[-100:], sep="\n")
    seconds = time.monotonic() - started
    print(
        f"{layout}: {killer.done.total()} kills in {seconds:.0f} s, {num_answers} answers, "
        f"{len(wrong)} lost, changed or left"
    )
    print("Seconds until a stream went on, and until all did:")
    print("| what died | kill | times | one: median | highest | all: median | highest |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (role, kind), count in sorted(killer.done.items()):
        cells = ["-"] * 4
        if times := killer.seconds.get((role, kind)):
            values = [of(it) for it in zip(*times, strict=True) for of in (statistics.median, max)]
            cells = [f"{it:.2f} s" for it in values]
        print(f"| {role} | {kind} | {count} | {' | '.join(cells)} |")
    return not wrong and killer.done.total() >= args.kills


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="number of kills in each layout")
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=["plain"])
    parser.add_argument(
        "--roles", nargs="+", choices=ROLES, default=ROLES, help="kinds of processes to end"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["SIGKILL", "SIGSTOP"])
    parser.add_argument(
        "--at-once", type=int, default=2, help="maximum number of processes that end together"
    )
    parser.add_argument("--pause", type=float, default=1.0, help="maximum seconds between kills")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model")
    parser.add_argument(
        "--flags", nargs=argparse.REMAINDER, default=[], help="flags of octavo serve"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the storm in each layout; return the exit status."""
    args, well = parse(argv), True
    for layout in args.layout:
        with tempfile.TemporaryDirectory(prefix="ch-") as folder:  # Ray's sockets have long names
            well &= run(args, layout, Path(folder))
    return 0 if well else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server ends, too
    sys.exit(main())
