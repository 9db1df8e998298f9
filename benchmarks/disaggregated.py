"""Compare prefill and decode servers with one server: streams among long prompts.

    python benchmarks/disaggregated.py --model DIR [--seconds 60] [--repeat 3]

Both variants use all cores: one server with a thread for each, or a router with one prefill and one
decode server that share them. Each in turn has the same load: --streams clients that request
answers to short prompts one after the other, and long prompts (of random tokens) at the times of a
Poisson process. It prints the time between tokens of the streams, the time to the first token of
the long prompts, and the total throughput; then the ratios of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field

import httpx

KINDS = {
    "one server": ["serve"],
    "prefill and decode": ["router", "--prefill", "1", "--decode", "1"],
}


@dataclass
class Seen:
    """Measurements of the clients."""

    gaps: list[float] = field(default_factory=list)
    """Seconds between tokens of the streams."""
    first: list[float] = field(default_factory=list)
    """Seconds to the first token of long prompts."""
    num_tokens: int = 0
    """Number of tokens of the streams."""
    num_long: int = 0

    def row(self, seconds: float) -> dict[str, float]:
        """Return the figures of a run."""
        self.gaps.sort()
        return {
            "ITL p50 (ms)": 1e3 * self.gaps[len(self.gaps) // 2],
            "ITL p99 (ms)": 1e3 * self.gaps[int(len(self.gaps) * 0.99)],
            "ITL max (ms)": 1e3 * self.gaps[-1],
            "TTFT of long prompts p50 (ms)": 1e3 * statistics.median(self.first),
            "tokens/s of streams": self.num_tokens / seconds,
            "long prompts/s": self.num_long / seconds,
        }


async def ask(client: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> list[float]:
    """Return the arrival times of tokens."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    moments: list[float] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                moments += [time.perf_counter() for c in choices for _ in c["token_ids"] or ()]
    return moments


async def load(url: str, args: argparse.Namespace) -> dict[str, float]:
    """Run a load on a server for a while."""
    seen, rng = Seen(), random.Random(0)
    end = time.perf_counter() + args.seconds

    def prompt(length: int) -> list[int]:
        return [rng.randrange(5, 1000) for _ in range(length)]

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await ask(client, prompt(args.long), 2)

        async def stream() -> None:
            while time.perf_counter() < end:
                moments = await ask(client, prompt(32), args.output)
                seen.num_tokens += len(moments)
                seen.gaps += [b - a for a, b in itertools.pairwise(moments)]

        async def long() -> None:
            begin = time.perf_counter()
            moments = await ask(client, prompt(args.long), 4)
            seen.first.append(moments[0] - begin)
            seen.num_long += 1

        started = time.perf_counter()
        tasks = [asyncio.create_task(stream()) for _ in range(args.streams)]
        moments = random.Random(1)
        while time.perf_counter() < end:
            await asyncio.sleep(moments.expovariate(args.rate))
            tasks.append(asyncio.create_task(long()))
        await asyncio.gather(*tasks)
        return seen.row(time.perf_counter() - started)


def run(words: list[str], args: argparse.Namespace) -> dict[str, float]:
    """Start a server, or a router with its own, and measure it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "octavo", *words, "--model", args.model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "bfloat16", "--log-level", "error"]
    command += ["--skip-tokenizer-init", "--no-warm-spare", "--max-model-len", str(args.long + 64)]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, env={**os.environ, "NO_COLOR": "1"})
    try:
        while True:
            if process.poll() is not None:
                raise RuntimeError("the server did not start")
            try:
                servers = httpx.get(url + "/", timeout=5).json().get("servers", [])
                ready = httpx.get(url + "/ready", timeout=5).status_code == 200
                if ready and all(server["ready"] for server in servers):
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        return asyncio.run(load(url, args))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--long", type=int, default=1500, help="tokens of a long prompt")
    parser.add_argument("--rate", type=float, default=0.25, help="long prompts per second")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(args.repeat):
        for kind, words in KINDS.items():
            rows[kind].append(run(words, args))
    one, two = (
        {name: statistics.median(row[name] for row in of_kind) for name in of_kind[0]}
        for of_kind in rows.values()
    )
    print(f"| | {' | '.join(KINDS)} | ratio |")
    print("| --- | --- | --- | --- |")
    for name, value in one.items():
        print(f"| {name} | {value:.1f} | {two[name]:.1f} | {two[name] / value:.2f} |")


if __name__ == "__main__":
    main()
