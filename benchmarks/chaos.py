"""Kills the engine under load, again and again, and looks whether any stream shows it.

    python benchmarks/chaos.py --kills 1000 [--model FOLDER] [--streams 32] [--seed 0]

A server is started; each of some mixed requests (greedy and sampled, n = 4, logprobs, prompt
logprobs, penalties, stop texts, bad words, grammars, chats, beams) is answered once undisturbed.
Then they are asked together, over and over, while the engine process dies at random moments:
SIGKILL, SIGSEGV, SIGSTOP (found by `--progress-timeout`) and a limit on its memory. Every answer is
held against the undisturbed one, byte for byte. Exit status 1: something was lost or changed.
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
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KINDS = ("SIGKILL", "SIGSEGV", "SIGSTOP", "memory")
PROGRESS_TIMEOUT = 1.0
# How long a limit on its memory gets to end a process, before it is ended otherwise.
_MEMORY_SECONDS = 1.0
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
TEXT = "Once upon a time there was a little dog who found a big red ball in the park"
# What tells two askings of the same apart.
_OWN = ("id", "created")


def requests(count: int, max_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies of mixed requests, the same ones each time."""
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
    """What a request got, however it was cut into events."""

    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)
    """What came once."""
    error: str | None = None

    def add(self, event: dict[str, Any]) -> None:
        """Takes in an event of the stream, or the whole answer."""
        if "error" in event:
            self.error = json.dumps(event["error"])
        for choice in event.get("choices", ()):
            _join(self.choices.setdefault(choice["index"], {}), choice)
        for name, value in event.items():
            if name not in ("choices", "error", *_OWN):
                self.first.setdefault(name, value)


def _join(held: dict[str, Any], new: dict[str, Any]) -> None:
    """Appends texts and lists, at any depth."""
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
    """Asks requests of a server, and notes when something came."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(
            base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)
        )
        self.last_event = 0.0

    async def close(self) -> None:
        """Closes its connections."""
        await self._client.aclose()

    async def ask(self, path: str, body: dict[str, Any]) -> Answer:
        """The answer to one request."""
        answer = Answer()
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if not body.get("stream") or response.status_code != 200:
                    answer.add(json.loads(await response.aread()))
                    return answer
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        self.last_event = time.monotonic()
                        answer.add(json.loads(line[6:]))
        except (httpx.HTTPError, ValueError) as error:
            answer.error = repr(error)
        return answer

    async def ask_all(self, asked: list[tuple[str, dict[str, Any]]]) -> list[Answer]:
        """The answers to all, asked at once."""
        return await asyncio.gather(*(self.ask(path, body) for path, body in asked))


class Killer(threading.Thread):
    """Ends the engine processes of a server, one after another.

    Args:
        server: the server's process.
        url: its address.
        load: what it is under.
        kills: how many.
        kinds: how, by turns at random.
        seed: of the random numbers.
    """

    def __init__(
        self,
        server: psutil.Process,
        url: str,
        load: Load,
        kills: int,
        kinds: tuple[str, ...],
        seed: int,
    ) -> None:
        super().__init__(daemon=True)
        self.done: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {}
        """By kind: from the kill to the next token."""
        self.failure: str | None = None
        self._server, self._url, self._load = server, url, load
        self._kills, self._kinds, self._rng = kills, kinds, random.Random(seed)

    def run(self) -> None:
        """Kills until all is done."""
        try:
            for _ in range(self._kills):
                self._kill(self._rng.choice(self._kinds))
                time.sleep(self._rng.uniform(0.0, 1.0))
        except Exception as error:
            self.failure = repr(error)

    def _engine(self) -> psutil.Process:
        """The process that computes: the oldest child, a spare one is younger."""
        found = []
        for child in self._server.children():
            with contextlib.suppress(psutil.NoSuchProcess):  # one ends while they are looked at
                if "octavo.engine.core_process" in child.cmdline() and child.status() != "zombie":
                    found.append(child)
        return min(found, key=lambda c: c.create_time())

    def _kill(self, kind: str) -> None:
        while httpx.get(f"{self._url}/ready", timeout=60).status_code != 200:
            time.sleep(0.01)
        # Not before it has brought something: two deaths in a row without would be the request's.
        begun = time.monotonic()
        while self._load.last_event < begun:
            time.sleep(0.002)
        time.sleep(self._rng.uniform(0.0, 0.3))
        engine = self._engine()
        if kind == "memory":
            limit = engine.memory_info().vms + 2**20
            resource.prlimit(engine.pid, resource.RLIMIT_AS, (limit, limit))
            with contextlib.suppress(psutil.TimeoutExpired):
                engine.wait(_MEMORY_SECONDS)
            kind = "memory" if not engine.is_running() else "memory, then SIGKILL"
        killed = time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.send_signal(getattr(signal, kind, signal.SIGKILL))
        self.done[kind] += 1
        if kind != "memory":
            self._time(kind, killed, engine)

    def _time(self, kind: str, killed: float, engine: psutil.Process) -> None:
        while engine.is_running() and engine.status() != "zombie":
            time.sleep(0.002)
        gone = time.monotonic()
        while self._load.last_event < gone + 0.02:  # what was on its way has come
            time.sleep(0.002)
        self.seconds.setdefault(kind, []).append(self._load.last_event - killed)


@contextlib.contextmanager
def serve(model: str | None, flags: list[str]) -> Iterator[tuple[psutil.Process, str]]:
    """A server that puts up with any number of deaths; its process and its address."""
    command = [sys.executable, "-m", "octavo", "serve", *([model] if model else [])]
    command += ["--host", "127.0.0.1", "--port", "0", "--max-engine-restarts", "1000000"]
    command += ["--progress-timeout", str(PROGRESS_TIMEOUT), "--no-enable-prompt-tokens-details"]
    command += flags
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}
    )
    assert process.stderr is not None
    try:
        url = ""
        for line in process.stderr:
            if found := re.search(r"listening on (\S+)", line):
                url = found[1]
            if " ready " in line:
                break
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        yield psutil.Process(process.pid), url
        process.send_signal(signal.SIGINT)
        process.wait(30)
        reader.join()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


async def storm(
    server: psutil.Process, url: str, args: argparse.Namespace
) -> tuple[list[str], int, Killer]:
    """Asks while the engine dies; returns what was wrong, how many were answered, the killer."""
    load = Load(url)
    asked = requests(args.streams, args.max_tokens)
    wanted = await load.ask_all(asked)
    for (path, body), answer in zip(asked, wanted, strict=True):
        if answer.error is not None or not answer.choices:
            raise RuntimeError(f"undisturbed, {path} {body} was not answered: {answer}")
    killer = Killer(server, url, load, args.kills, tuple(args.kinds), args.seed)
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

    await asyncio.gather(*map(repeat, range(len(asked))))
    await load.close()
    if killer.failure is not None:
        wrong.append(f"the killer failed: {killer.failure}")
    return wrong, num_answers, killer


def main(argv: list[str] | None = None) -> int:
    """Runs the storm and prints what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of octavo serve")
    args = parser.parse_args(argv)
    started = time.monotonic()
    with serve(args.model, args.flags) as (server, url):
        wrong, num_answers, killer = asyncio.run(storm(server, url, args))
    for line in wrong[:5]:
        print(line)
    print(
        f"{killer.done.total()} kills in {time.monotonic() - started:.0f} s, {num_answers} "
        f"answers, {len(wrong)} lost or changed"
    )
    print("| kill | times | to the next token: median | highest |")
    print("| --- | --- | --- | --- |")
    for kind, count in sorted(killer.done.items()):
        times = killer.seconds.get(kind)
        cells = "- | -" if not times else f"{statistics.median(times):.2f} s | {max(times):.2f} s"
        print(f"| {kind} | {count} | {cells} |")
    return 1 if wrong or killer.done.total() < args.kills else 0


if __name__ == "__main__":
    sys.exit(main())
