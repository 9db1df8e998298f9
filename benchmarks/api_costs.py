"""Compare the APIs of a server, and parsers of answers, by tokens per second of many streams.

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
from typing import Any

import aiohttp

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
WORDS = "the cold rain fell on a small town and nobody went out of the house that day "
_COUNT = re.compile(rb'"(?:completion_tokens|output_tokens|eval_count)": ?(\d+)')


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


async def speed(url: str, path: str, body: dict[str, Any], streams: int) -> float:
    """Return the tokens per second of all streams together."""
    connector = aiohttp.TCPConnector(limit=streams)

    async with aiohttp.ClientSession(connector=connector) as session:

        async def one() -> int:
            async with session.post(url + path, json=body) as response:
                answer = await response.read()
                assert response.status == 200, answer[:500]
            return int(_COUNT.findall(answer)[-1])

        start = time.perf_counter()
        counts = await asyncio.gather(*(one() for _ in range(streams)))
        return sum(counts) / (time.perf_counter() - start)


@contextmanager
def serving(model: str, template: Path, *flags: str) -> Iterator[str]:
    """Serve a model; yield the address."""
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
            yield f"http://127.0.0.1:{port}"
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
                rates = {
                    name: asyncio.run(speed(*case, args.streams)) for name, case in cases.items()
                }
                if number:  # the first round warms up
                    for name, rate in rates.items():
                        found.setdefault(name, []).append(rate / rates["/v1/chat/completions"])
                    print({name: round(rate) for name, rate in rates.items()}, flush=True)
    for name, ratios in found.items():
        middle = statistics.median(ratios)
        print(f"{name}: {middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
