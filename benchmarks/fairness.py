"""Measure one API key's waits for first tokens while another key floods the server.

    python benchmarks/fairness.py [--seconds 30] [--flooders 32] [--flags "--max-num-seqs 32"]

Starts a server with the built-in model, or another one by --flags, and two keys. The light key
sends one prompt of --tokens at intervals; the flood consists of --flooders concurrent long prompts
without common prefixes. Each of the light key's times is measured alone first, then under the
flood, and again with both under one key, which fairness is meant to prevent. The target is a ratio
of at most 2 of the 99th percentiles.

Under the flood each request waits at least for the step that is being computed and the one that is
scheduled after it. So the step's budget determines the minimum length of a prompt for a ratio of
two: about four steps' worth, which is also the amount that a key may save up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import random
import shlex
import sys
import time

import httpx
from attacks import server

LIGHT, FLOOD = "light-key", "flood-key"
# Ids that every model has, and that are no special tokens in most.
FIRST_ID, NUM_IDS = 100, 150


def prompt(chance: random.Random, length: int) -> list[int]:
    """Return random token ids."""
    return [FIRST_ID + chance.randrange(NUM_IDS) for _ in range(length)]


def headers(key: str) -> dict[str, str]:
    """Return the headers with a key."""
    return {"Authorization": f"Bearer {key}"}


def first_token_times(url: str, key: str, length: int, seconds: float) -> list[float]:
    """Return the sorted seconds to the first token of successive requests with pauses."""
    chance = random.Random(1)
    times = []
    end = time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=600, headers=headers(key)) as client:
        while time.monotonic() < end or len(times) < 3:
            fields = {"prompt": prompt(chance, length), "max_tokens": 4, "stream": True}
            started = time.perf_counter()
            with client.stream("POST", "/v1/completions", json=fields) as response:
                response.raise_for_status()
                pieces = response.iter_bytes()
                next(pieces)
                times.append(time.perf_counter() - started)
                for _ in pieces:
                    pass
            time.sleep(chance.uniform(0.02, 0.1))
    return sorted(times)


def flood(url: str, key: str, count: int, length: int) -> None:
    """Keep `count` requests of `length` tokens in flight, forever."""

    async def one(client: httpx.AsyncClient, chance: random.Random) -> None:
        while True:
            fields = {"prompt": prompt(chance, length), "max_tokens": 16, "ignore_eos": True}
            with contextlib.suppress(httpx.HTTPError):
                await client.post("/v1/completions", json=fields)

    async def run() -> None:
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(
            base_url=url, timeout=600, headers=headers(key), limits=limits
        ) as client:
            await asyncio.gather(*(one(client, random.Random(i)) for i in range(count)))

    asyncio.run(run())


def percentile(times: list[float], share: float) -> float:
    """Return a percentile of sorted times, in milliseconds."""
    return times[min(len(times) - 1, int(share * len(times)))] * 1e3


def show(name: str, times: list[float], alone: list[float]) -> float:
    """Print a line; return the ratio of the 99th percentiles."""
    ratio = percentile(times, 0.99) / percentile(alone, 0.99)
    print(
        f"{name:22}{len(times):8}{percentile(times, 0.5):10.1f}{percentile(times, 0.99):10.1f}"
        f"{ratio:8.2f}",
        flush=True,
    )
    return ratio


def main() -> int:
    """Print the three measurements; return status 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of each measurement")
    parser.add_argument("--tokens", type=int, default=480, help="length of the light key's prompts")
    parser.add_argument(
        "--flooders", type=int, default=32, help="number of concurrent prompts of the flood"
    )
    parser.add_argument(
        "--flood-tokens", type=int, default=1500, help="length of each prompt of the flood"
    )
    parser.add_argument(
        "--flags",
        default="--max-num-batched-tokens 128 --max-num-seqs 16",
        help="flags of octavo serve",
    )
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with server(["--api-key", LIGHT, "--api-key", FLOOD, *shlex.split(options.flags)]) as url:
        first_token_times(url, LIGHT, options.tokens, 2.0)
        print(f"{'':22}{'requests':>8}{'p50 ms':>10}{'p99 ms':>10}{'ratio':>8}")
        alone = first_token_times(url, LIGHT, options.tokens, options.seconds)
        show("alone", alone, alone)
        ratios = []
        for name, key in (("flood by another key", FLOOD), ("flood by the same key", LIGHT)):
            flooder = spawn.Process(
                target=flood,
                args=(url, key, options.flooders, options.flood_tokens),
                daemon=True,
            )
            flooder.start()
            time.sleep(3.0)
            times = first_token_times(url, LIGHT, options.tokens, options.seconds)
            flooder.kill()
            flooder.join()
            ratios.append(show(name, times, alone))
    return int(ratios[0] > 2)


if __name__ == "__main__":
    sys.exit(main())
