"""Measure what the live engine view costs.

python benchmarks/view_cost.py

Two measurements of a server with the built-in model, each with and without viewers in turn:
throughput of 32 requests at a time (32 tokens in, 64 out, as in W7) with 2 viewers, and the speed
of one stream with 1,000 viewers. Each also has the processor time of all processes of the server,
which other programs on the machine change less than they change the speed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil

PROMPT = list(range(10, 42))
IN_FLIGHT = 32
_STREAMS = 5


async def read_views(url: str, count: int) -> None:
    """Open views and discard their events until this process is killed."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    request = f"GET /v1/engine/view HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()

    async def view() -> None:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(request)
        status = await reader.readline()
        assert b"200" in status, status
        opened.release()
        while await reader.read(2**16):
            pass

    opened = asyncio.Semaphore(0)
    tasks = []
    for _ in range(count):
        tasks.append(asyncio.create_task(view()))
        if len(tasks) % 20 == 0:
            await asyncio.sleep(0.02)
    for _ in range(count):
        await opened.acquire()
    print("open", flush=True)
    await asyncio.gather(*tasks)


@contextlib.contextmanager
def viewers(url: str, count: int, settle: float) -> Iterator[None]:
    """Open views in another process for a while."""
    if not count:
        yield
        return
    command = [sys.executable, __file__, "--read", url, str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        time.sleep(settle)
        try:
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def server(*flags: str) -> Iterator[str]:
    """Start a server with the built-in model; yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen([*command, "--log-level", "error", *flags]) as process:
        url = f"http://127.0.0.1:{port}"
        for _ in range(300):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            time.sleep(0.2)
        try:
            yield url
        finally:
            process.terminate()


class Figures(NamedTuple):
    """Result of one run."""

    speed: float
    """Tokens per second."""
    cost: float
    """Processor time of the server for a token, in microseconds."""


def processor_seconds() -> float:
    """Return the processor time of the server, which is a child of this process."""
    seconds = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if __file__ not in process.cmdline():
                seconds += sum(process.cpu_times()[:2])
    return seconds


def throughput(url: str, seconds: float) -> Figures:
    """Return the figures of `IN_FLIGHT` requests at a time."""
    body = {"prompt": [PROMPT] * (IN_FLIGHT // 4), "max_tokens": 64, "ignore_eos": True, "seed": 1}
    begin, used = time.monotonic(), processor_seconds()
    end = begin + seconds

    def load() -> int:
        num_tokens = 0
        with httpx.Client(timeout=60) as client:
            while time.monotonic() < end:
                answer = client.post(f"{url}/v1/completions", json=body).json()
                num_tokens += answer["usage"]["completion_tokens"]
        return num_tokens

    with ThreadPoolExecutor(4) as pool:
        counted = sum(pool.map(lambda _: load(), range(4)))
    used = processor_seconds() - used
    return Figures(counted / (time.monotonic() - begin), 1e6 * used / counted)


def stream_speed(url: str, num_tokens: int) -> Figures:
    """Return the figures of one stream after the other."""
    used = processor_seconds()
    speeds = [_stream_speed(url, num_tokens) for _ in range(_STREAMS)]
    used = processor_seconds() - used
    return Figures(statistics.harmonic_mean(speeds), 1e6 * used / (_STREAMS * num_tokens))


def _stream_speed(url: str, num_tokens: int) -> float:
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    count, begin = 0, 0.0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                count += 1
                begin = begin or time.monotonic()
    return (count - 1) / (time.monotonic() - begin)


def report(name: str, without: list[Figures], with_viewers: list[Figures]) -> None:
    """Print medians, the median change of neighbouring runs, and its spread."""
    for field, unit in (("speed", "tokens/s"), ("cost", "us of processor time for a token")):
        before, after = ([getattr(f, field) for f in runs] for runs in (without, with_viewers))
        changes = sorted(100 * (b / a - 1) for a, b in zip(before, after, strict=True))
        quarter = len(changes) // 4
        print(
            f"{name}: {statistics.median(before):,.1f} {unit} without, "
            f"{statistics.median(after):,.1f} with; change {statistics.median(changes):+.2f} % "
            f"(middle half {changes[quarter]:+.2f} to {changes[-1 - quarter]:+.2f} "
            f"of {len(changes)} pairs)",
            flush=True,
        )


def main() -> None:
    """Run the measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--read", nargs=2, metavar=("URL", "N"), help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=["two", "many"])
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    if args.read:
        asyncio.run(read_views(args.read[0], int(args.read[1])))
        return
    with server() as url:
        if args.only != "many":
            throughput(url, 3.0)
            runs: dict[int, list[Figures]] = {0: [], 2: []}
            for pair in range(args.pairs):
                for count in (0, 2) if pair % 2 else (2, 0):
                    with viewers(url, count, 1.0):
                        runs[count].append(throughput(url, args.seconds))
            report("throughput, 2 viewers", runs[0], runs[2])
        if args.only != "two":
            stream_speed(url, 900)
            speeds: dict[int, list[Figures]] = {0: [], 1000: []}
            for pair in range(args.pairs):
                for count in (0, 1000) if pair % 2 else (1000, 0):
                    with viewers(url, count, 5.0):
                        speeds[count].append(stream_speed(url, 900))
            report("one stream, 1,000 viewers", speeds[0], speeds[1000])


if __name__ == "__main__":
    main()
