"""Time between tokens while experts move between the processes that divide them.

    python benchmarks/shaped_model.py FOLDER --shape gpt-oss-20b-6-layers
    python benchmarks/expert_balance.py FOLDER

Serves the model with two processes and expert parallelism, with and without `--enable-eplb` in
turns. Eight streams run at a time. Their prompts are one repeated token each, so some experts are
used much more often than others; the tokens change every few requests, so experts move again and
again. Prints tokens per second, and the median, the 99th percentile and the maximum of the time
between two messages of a stream. With `--enable-eplb` it also prints how often a layer's experts
moved.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

STREAMS, OUTPUT = 8, 64


@contextmanager
def served(folder: str, flags: list[str]) -> Iterator[str]:
    """Serve a model; yield the server's URL when the model is loaded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", folder, "--port", str(port)]
    command += ["--max-model-len", "2048", "--max-num-seqs", str(STREAMS), "--log-level", "warning"]
    command += ["--tensor-parallel-size", "2", "--enable-expert-parallel", *flags]
    environment = {**os.environ, "OCTAVO_WEIGHT_CACHE": "off"}
    process = subprocess.Popen(command, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            try:
                with urllib.request.urlopen(f"{url}/ready"):
                    break
            except OSError:
                time.sleep(0.2)
        else:
            raise SystemExit("the server ended")
        yield url
    finally:
        process.terminate()
        process.wait()


def stream(url: str, token: int) -> list[float]:
    """Return the times between the messages of an answer, in seconds."""
    body = {"prompt": [token] * 48, "max_tokens": OUTPUT, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    times = []
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(times)]


def moves(url: str) -> int:
    """Return how often a layer's experts moved."""
    with urllib.request.urlopen(f"{url}/metrics") as page:
        return sum(
            int(float(line.rsplit(b" ", 1)[1]))
            for line in page
            if b"eplb_rearrangements_total{" in line
        )


def measure(folder: str, flags: list[str], requests: int, seed: int) -> str:
    """Return a line of results."""
    numbers = random.Random(seed)
    tokens = [numbers.randrange(1000, 4000) for _ in range(requests // 16)]
    gaps: list[float] = []
    with served(folder, flags) as url:
        stream(url, 999)
        begun = time.perf_counter()

        def work(number: int) -> None:
            for i in range(number, requests, STREAMS):
                gaps.extend(stream(url, tokens[min(i // 16, len(tokens) - 1)]))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(STREAMS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begun
        moved = moves(url)
    gaps.sort()
    return (
        f"{requests * OUTPUT / seconds:7.1f} tokens/s, between messages: median "
        f"{statistics.median(gaps) * 1e3:.0f} ms, p99 {gaps[len(gaps) * 99 // 100] * 1e3:.0f} ms, "
        f"maximum {gaps[-1] * 1e3:.0f} ms; {moved} moves"
    )


def main() -> None:
    """Measure with and without balancing, in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--interval", type=int, default=40, help="steps between two decisions")
    options = parser.parse_args()
    config = {"step_interval": options.interval, "window_size": options.interval}
    balanced = ["--enable-eplb", "--eplb-config", json.dumps(config)]
    for turn in range(options.rounds):
        for name, flags in (("fixed", []), ("eplb", balanced)):
            result = measure(options.folder, flags, options.requests, turn)
            print(f"{name:6} {result}", flush=True)


if __name__ == "__main__":
    main()
