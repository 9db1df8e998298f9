"""Measure the start, the memory and the revival of `octavo serve`, next to another build.

    python benchmarks/lightness.py [MODEL] [--before OTHER/.venv/bin/python] [--repeats 9]
        [--embeddings] [--kills 50] [--warm-spare] [-- FLAGS OF OCTAVO SERVE]

Each turn starts a server, with this build and the other one alternating. A start before the first
turn compiles the modules of each build, as an installation does. Prints medians with the least and
the most, in seconds since the start of the process:

  listening    the first connection is accepted
  ready        /health answers 200
  first token  of a streamed completion that is sent when the server is ready; with --embeddings
               the first vector of a text
  processor    seconds of the server and of the engine until then

and the proportional set size (PSS) of each process after that completion, in MiB: of the server,
of the engine, of its workers and of helpers. `engine without weights and cache` subtracts the
engine's mappings of 2 MiB and more.

With --kills, one more server of each build streams an answer, and its engine is killed that many
times (SIGKILL): the median of the pauses between the last token before and the first one after.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import psutil

PROMPT = "Once upon a time"
LIMIT = 120.0


def main() -> int:
    argv, flags = sys.argv[1:], []
    if "--" in argv:
        at = argv.index("--")
        argv, flags = argv[:at], argv[at + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="octavo/stories")
    parser.add_argument("--before", type=Path, metavar="PYTHON")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--embeddings", action="store_true", help="the model is an encoder")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--warm-spare", action="store_true")
    args = parser.parse_args(argv)
    builds = {"this build": sys.executable}
    if args.before is not None:
        builds["before"] = str(args.before.absolute())
    for python in builds.values():
        measure_start(python, args.model, flags, embeddings=args.embeddings)
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in builds}
    for turn in range(args.repeats):
        order = list(builds) if turn % 2 == 0 else list(builds)[::-1]
        for name in order:
            measured = measure_start(builds[name], args.model, flags, embeddings=args.embeddings)
            for what, value in measured.items():
                found[name][what].append(value)
    for name, values in found.items():
        print(name)
        for what, numbers in values.items():
            middle, least, most = statistics.median(numbers), min(numbers), max(numbers)
            print(f"  {what:38} {middle:8.2f}  ({least:.2f} to {most:.2f})", flush=True)
    if args.kills:
        spare = ["--warm-spare"] if args.warm_spare else []
        for name, python in builds.items():
            pauses = measure_kills(python, args.model, [*flags, *spare], args.kills)
            print(
                f"{name}: pause after SIGKILL of the engine: {statistics.median(pauses):.3f} s "
                f"({min(pauses):.3f} to {max(pauses):.3f}, {len(pauses)} kills)",
                flush=True,
            )
    return 0


@contextlib.contextmanager
def serving(python: str, model: str, flags: Sequence[str]) -> Iterator[tuple[int, float]]:
    """Run a server; yield its port and the time at which its process started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(python).parent.parent.parent  # of a checkout, whose build this interpreter uses
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": f"{tempfile.gettempdir()}/lightness-pyc"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.perf_counter()
    process = subprocess.Popen(
        [*(python, "-m", "octavo", "serve", model, "--port", str(port)), *flags],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield port, began
    finally:
        process.terminate()
        process.wait(30)


def measure_start(
    python: str, model: str, flags: Sequence[str], *, embeddings: bool
) -> dict[str, float]:
    with serving(python, model, flags) as (port, began):
        url, times = f"http://127.0.0.1:{port}", {}
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            if time.perf_counter() - began > LIMIT:
                raise SystemExit(f"{python}: the server did not start")
            time.sleep(0.002)
        times["listening"] = time.perf_counter() - began
        with httpx.Client(base_url=url, timeout=LIMIT) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if client.get("/health").status_code == 200:
                        break
                time.sleep(0.002)
            times["ready"] = time.perf_counter() - began
            if embeddings:
                body = {"model": model, "input": PROMPT}
                client.post("/v1/embeddings", json=body).raise_for_status()
                times["first vector"] = time.perf_counter() - began
            else:
                body = {"model": model, "prompt": PROMPT, "max_tokens": 16, "stream": True}
                with client.stream("POST", "/v1/completions", json=body) as response:
                    for line in response.iter_lines():
                        if line.startswith("data:"):
                            times.setdefault("first token", time.perf_counter() - began)
            server = server_at(port)
            times["processor: server"] = seconds_of(server)
            times["processor: engine"] = max(map(seconds_of, server.children()))
            time.sleep(1.0)  # a spare interpreter starts after the first answer
            return times | memory(port)


def server_at(port: int) -> psutil.Process:
    (server,) = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "serve" in (process.info["cmdline"] or []) and str(port) in process.info["cmdline"]
    ]
    return server


def seconds_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def memory(port: int) -> dict[str, float]:
    """Return the PSS of each kind of process of a server, in MiB."""
    server = server_at(port)
    sums: dict[str, float] = defaultdict(float)
    for process in (server, *server.children(recursive=True)):
        with contextlib.suppress(psutil.Error, OSError):
            pss, large = pss_of(process.pid)
            role = role_of(process, server)
            sums[f"MiB: {role}"] += pss
            sums["MiB: all processes"] += pss
            if role == "engine":
                sums["MiB: engine without weights and cache"] += pss - large
    return dict(sums)


def role_of(process: psutil.Process, server: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    if process.pid == server.pid:
        return "server"
    if "worker_process" in line:
        return "workers"
    if "core_process" in line:
        return "engine" if process.num_threads() > 3 else "spare engine"
    return "helpers"


def pss_of(pid: int) -> tuple[float, float]:
    """Return a process's PSS, and that of its anonymous mappings of 2 MiB and more, in MiB."""
    total = large = size = 0.0
    anonymous = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            anonymous = len(line.split()) == 5
        elif line.startswith("Size:"):
            size = float(line.split()[1])
        elif line.startswith("Pss:"):
            pss = float(line.split()[1])
            total += pss
            large += pss if anonymous and size >= 2048 else 0.0
    return total / 1024, large / 1024


def measure_kills(python: str, model: str, flags: Sequence[str], kills: int) -> list[float]:
    pauses: list[float] = []
    with (
        serving(python, model, [*flags, "--max-engine-restarts", str(10 * kills)]) as (port, _),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT) as client,
    ):
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if client.get("/health").status_code == 200:
                    break
            time.sleep(0.01)
        for _ in range(kills):
            time.sleep(1.5)  # the spare interpreter, if any, gets ready
            pauses.append(pause_after_kill(client, model, port))
    return pauses


def pause_after_kill(client: httpx.Client, model: str, port: int) -> float:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}
    last, count, killed = 0.0, 0, False
    with client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data:") or "[DONE]" in line:
                continue
            if json.loads(line[5:]).get("error"):
                raise SystemExit(f"the stream failed: {line}")
            now, count = time.perf_counter(), count + 1
            if killed and now - last > 0.05:
                return now - last
            last = now
            if count == 20:
                os.kill(engine_of(port), signal.SIGKILL)
                killed = True
    raise SystemExit("the stream ended without a pause")


def engine_of(port: int) -> int:
    server = server_at(port)
    engines = [
        process
        for process in server.children()
        if "core_process" in " ".join(process.cmdline()) and process.num_threads() > 3
    ]
    return max(engines, key=lambda process: process.memory_info().rss).pid


if __name__ == "__main__":
    sys.exit(main())
