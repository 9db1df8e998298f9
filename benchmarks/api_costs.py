"""Compare the APIs of a server, and parsers of answers, by tokens per second of many streams.

On a busy machine compare the processor time instead: the microseconds a token that the server's own
process, without its engine, has used for all rounds.

    python benchmarks/api_costs.py MODEL [--streams 256] [--tokens 64] [--rounds 5]

Two servers run MODEL: one without a parser, one that looks for reasoning and tool calls (hermes).
In each round, all streams are sent at once to /v1/chat/completions of the first server, which is
the base, then to that of the second, and then to the other APIs of the first. Prints the median
ratio to the same round's base, with the least and the most. A tiny model shows the costs best.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
WORDS = "the cold rain fell on a small town and nobody went out of the house that day "
_COUNT = re.compile(rb'"(?:completion_tokens|output_tokens|eval_count)": ?(\d+)')


class Server(NamedTuple):
    """Server that is measured."""

    url: str
    pid: int


def bodies(tokens: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return path and fields of a streamed request of each API, by name."""
    messages = [{"role": "user", "content": WORDS * 2}]
    chat = {"messages": messages, "max_tokens": tokens, "stream": True, "temperature": 0}
    usage = {"stream_options": {"include_usage": True}}
    given = {"input": WORDS * 2, "max_output_tokens": tokens, "temperature": 0, "stream": True}
    options = {"num_predict": tokens, "temperature": 0}
    return {
        "/v1/chat/completions": ("/v1/chat/completions", chat | usage),
        "/v1/responses": ("/v1/responses", given | {"store": False}),
        "/v1/messages": ("/v1/messages", chat | {"model": "model"}),
        "/api/chat": ("/api/chat", {"model": "model", "messages": messages, "options": options}),
    }


async def measure(
    server: Server, path: str, body: dict[str, Any], streams: int
) -> tuple[float, float]:
    """Return tokens per second of all streams together, and microseconds of processor a token."""
    connector = aiohttp.TCPConnector(limit=streams)

    async with aiohttp.ClientSession(connector=connector) as session:

        async def one() -> int:
            async with session.post(server.url + path, json=body) as response:
                answer = await response.read()
                assert response.status == 200, answer[:500]
            return int(_COUNT.findall(answer)[-1])

        start, used = time.perf_counter(), processor_seconds(server.pid)
        tokens = sum(await asyncio.gather(*(one() for _ in range(streams))))
        seconds, used = time.perf_counter() - start, processor_seconds(server.pid) - used
        return tokens / seconds, used / tokens * 1e6


def processor_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process (Linux)."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int(Path(thread, "schedstat").read_text().split()[0]) for thread in threads) / 1e9


@contextmanager
def serving(model: str, template: Path, *flags: str) -> Iterator[Server]:
    """Serve a model."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", model, "--port", str(port)]
    command += ["--served-model-name", "model", "--chat-template", str(template)]
    command += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log", *flags]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).close()
                    break
                except OSError:
                    if process.poll() is not None:
                        raise SystemExit("the server did not start") from None
                    time.sleep(0.05)
            yield Server(f"http://127.0.0.1:{port}", process.pid)
        finally:
            process.terminate()


def main() -> None:
    """Measure all cases in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    found: dict[str, list[float]] = {}
    used: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder, "template.jinja")
        template.write_text(TEMPLATE)
        plain = ("--reasoning-parser", "none")
        parsed = ("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes")
        with (
            serving(args.model, template, *plain) as base,
            serving(args.model, template, *parsed) as other,
        ):
            asked = bodies(args.tokens)
            path, chat = asked["/v1/chat/completions"]
            cases = {"with a parser": (other, path, chat)}
            cases |= {name: (base, *case) for name, case in asked.items()}
            for number in range(args.rounds + 1):
                results = {
                    name: asyncio.run(measure(*case, args.streams)) for name, case in cases.items()
                }
                if number:  # the first round warms up
                    basis = results["/v1/chat/completions"][0]
                    for name, (rate, microseconds) in results.items():
                        found.setdefault(name, []).append(rate / basis)
                        used.setdefault(name, []).append(microseconds)
                    print({name: round(rate) for name, (rate, _) in results.items()}, flush=True)
    for name, ratios in found.items():
        middle, times = statistics.median(ratios), used[name]
        print(
            f"{name}: {middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f}); processor "
            f"{statistics.median(times):.1f} us a token ({min(times):.1f} to {max(times):.1f})"
        )


if __name__ == "__main__":
    main()
