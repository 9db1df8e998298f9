"""`octavo bench startup`: time from process start to the first token, and memory."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console

from octavo.bench import pictures, plots, results
from octavo.bench.start_child import resident_nbytes
from octavo.config import EngineConfig, config_fields, environment_without_keys
from octavo.config.arguments import add_engine_settings, engine_kwargs, setting_flags
from octavo.errors import BenchError, ConfigError
from octavo.models.hub import resolve_folders
from octavo.models.weight_cache import WeightCache

_POLL = 0.005
_READ_CHUNK = 2**24
_LABELS = {
    "import": "import octavo.LLM",
    "ready": "model loaded",
    "first_token": "first token",
    "server_health": "server: /health answers",
    "server_ready": "server: /ready answers",
    "server_first_token": "server: first token",
}
_SIZES = {
    "rss": "resident",
    "pss": "resident, shared pages split",
    "plan": "planned",
    "plan_but_kv_cache": "planned, without the KV cache",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags, including the engine's."""
    add = parser.add_argument_group("benchmark").add_argument
    add(
        "--repeats",
        type=int,
        default=5,
        metavar="N",
        help="Number of fresh processes of each kind [5].",
    )
    add("--server", action="store_true", help="Time `octavo serve` as well.")
    add(
        "--cold",
        action="store_true",
        help="Also start with the model's files dropped from the file cache (Linux).",
    )
    add(
        "--timeout",
        type=float,
        default=600.0,
        metavar="X",
        help="Timeout of a start in seconds [600].",
    )
    add("--output-json", metavar="FILE", help="Save the results as JSON.")
    add("--plot", metavar="FILE", help="Draw the starts as FILE.png or FILE.svg.")
    add_engine_settings(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark, print its figures, and save them on request.

    Starts read packed weights from the weight cache; the first one may have to fill it.

    Ctrl-C ends it early: the starts that have ended are counted, `interrupted` is true.

    Returns:
        The result of `metadata`; interrupted; `starts`: one entry for each process: kind ("offline"
        or "server"), cache ("warm" or "cold"), seconds by moment since the process was started, and
        sizes in bytes: rss and pss once the model is loaded (of a server: all its processes), plan
        and plan_but_kv_cache from the memory plan. The KV cache uses memory as it fills, so rss
        should be below the latter. `picture`: see `octavo.bench.pictures`.

    Raises:
        ConfigError, ModelError: a flag, an engine setting or the model is unusable.
        BenchError: a process failed, or the result cannot be saved.
    """
    result = benchmark(args)
    _print(result)
    if args.output_json is not None:
        results.save_json(args.output_json, result)
    if args.plot is not None:
        plots.starts(result["starts"], _LABELS, args.plot)
        print(f"Plot saved in {args.plot}")
    return result


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark without printing or saving; see `run`."""
    if args.repeats < 1:
        raise ConfigError(f"--repeats {args.repeats}: must be at least 1.")
    if not args.timeout > 0:
        raise ConfigError(f"--timeout {args.timeout}: must be above 0.")
    if args.cold and not hasattr(os, "posix_fadvise"):
        raise ConfigError("--cold is not possible: this system cannot drop files from its cache.")
    kwargs = engine_kwargs(args)
    config = EngineConfig.from_kwargs(**kwargs)
    path = resolve_folders(config)[0]
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    kept = WeightCache.from_config(config)
    for path in (args.output_json, args.plot):
        results.check_writable(path)
    if args.plot is not None:
        plots.check(args.plot)
    measures: dict[str, Callable[[Mapping[str, Any], float], dict[str, Any]]] = {
        "offline": measure_offline
    }
    if args.server:
        measures["server"] = measure_server
    caches: dict[str, Callable[[Sequence[Path]], None]] = {"warm": read_files}
    if args.cold:
        caches["cold"] = forget_files
    starts: list[dict[str, Any]] = []
    interrupted = False
    with results.progress(total=args.repeats * len(measures) * len(caches), desc="Starts") as bar:
        try:
            for _ in range(args.repeats):
                for kind, measure in measures.items():
                    for cache, prepare in caches.items():
                        prepare([*files, *(kept.files() if kept is not None else ())])
                        start = measure(kwargs, args.timeout)
                        starts.append({"kind": kind, "cache": cache, **start})
                        bar.update()
        except KeyboardInterrupt:
            if not starts:
                raise
            interrupted = True
    measured = {"starts": starts, "picture": pictures.starts(starts, _LABELS)}
    return {**results.metadata(vars(args)), "interrupted": interrupted, **measured}


def measure_offline(kwargs: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """Return seconds and bytes of one start of an `LLM` in a separate process.

    Raises:
        BenchError: the start failed; the message is the last line of its output.
    """
    command = [sys.executable, "-m", "octavo.bench.start_child"]
    command.append(msgspec.json.encode(kwargs).decode())
    begin = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise BenchError(f"A start took more than {timeout:g} s (--timeout).") from None
    if done.returncode != 0:
        raise BenchError(f"A start failed: {_last_line(done.stderr)}")
    report = msgspec.json.decode(done.stdout, type=dict[str, Any])
    for name in ("import", "ready", "first_token"):
        report[name] -= begin
    return report


def measure_server(kwargs: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """Return seconds and bytes of one start of `octavo serve`, up to its first token over HTTP.

    Raises:
        BenchError: the start failed; the message is the last line of its output.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve"]
    command += setting_flags(kwargs, config_fields())
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    report: dict[str, Any] = {}
    with tempfile.TemporaryFile() as log:
        begin = time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment_without_keys())
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=timeout) as client:
                for name, path in (("server_health", "/health"), ("server_ready", "/ready")):
                    while not _answers(client, path):
                        if process.poll() is not None:
                            log.seek(0)
                            raise BenchError(f"The server failed: {_last_line(log.read())}")
                        if time.monotonic() - begin > timeout:
                            raise BenchError(f"A start took more than {timeout:g} s (--timeout).")
                        time.sleep(_POLL)
                    report[name] = time.monotonic() - begin
                for pid in _family(process.pid):
                    for name, nbytes in resident_nbytes(pid).items():
                        report[name] = report.get(name, 0) + nbytes
                body = {"prompt": [0] * 8, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
                answer = client.post("/v1/completions", json=body)
                if answer.status_code != 200:
                    raise BenchError(f"The server rejects a short request: {answer.text}")
                report["server_first_token"] = time.monotonic() - begin
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return report


def read_files(paths: Sequence[Path]) -> None:
    """Read files, so that the system has their contents in its cache."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(_READ_CHUNK):
                pass


def forget_files(paths: Sequence[Path]) -> None:
    """Request that the system drop the files' contents from its cache; it may ignore that."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # unwritten pages cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _answers(client: httpx.Client, path: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return client.get(path).status_code == 200
    return False


def _family(pid: int) -> list[int]:
    """Return a process and all its descendants, by the kernel's list of children."""
    pids = [pid]
    for parent in pids:  # grows meanwhile
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            pids += map(int, children.read_text().split())
    return pids


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing."


def _print(result: Mapping[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    starts = result["starts"]
    if result["interrupted"]:
        console.print(
            f"Interrupted: the figures cover {results.counted(len(starts), 'start')}.",
            style="yellow",
        )
    for cache in dict.fromkeys(start["cache"] for start in starts):
        of_cache = [start for start in starts if start["cache"] == cache]
        rows: list[Sequence[object]] = []
        for name, label in _LABELS.items():
            seconds = [start[name] for start in of_cache if name in start]
            if seconds:
                median = f"{statistics.median(seconds):.2f}"
                rows.append((label, median, f"{min(seconds):.2f}", f"{max(seconds):.2f}"))
        results.print_table(
            f"Seconds from process start ({cache} file cache)",
            ("", "median", "min", "max"),
            rows,
            console,
        )
    rows = []
    for kind in dict.fromkeys(start["kind"] for start in starts):
        of_kind = [start for start in starts if start["kind"] == kind]
        for name, label in _SIZES.items():
            sizes = [start[name] / 2**20 for start in of_kind if name in start]
            if sizes:
                rows.append((f"{kind}: {label}", f"{statistics.median(sizes):,.0f}"))
    results.print_table("Memory when the model is loaded, MiB", ("", "median"), rows, console)
