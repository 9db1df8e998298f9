"""How long `octavo serve` takes to answer /health and /ready, from process start.

python benchmarks/start.py [--model MODEL] [--runs 5]
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import statistics
import subprocess
import sys
import time

import httpx


def measure(model: str) -> tuple[float, float]:
    """Seconds until /health and until /ready answer 200."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    started = time.perf_counter()
    process = subprocess.Popen(command)
    times: list[float] = []
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            for path in ("/health", "/ready"):
                while True:
                    if process.poll() is not None:
                        sys.exit(f"the server ended with status {process.returncode}")
                    with contextlib.suppress(httpx.HTTPError):
                        if client.get(path).status_code == 200:
                            break
                    time.sleep(0.005)
                times.append(time.perf_counter() - started)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    return times[0], times[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="octavo/stories")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    runs = [measure(args.model) for _ in range(args.runs)]
    for name, times in zip(("health", "ready"), zip(*runs, strict=True), strict=True):
        print(
            f"/{name}: median {statistics.median(times):.2f} s "
            f"({min(times):.2f} to {max(times):.2f}, {args.runs} runs)"
        )


if __name__ == "__main__":
    main()
