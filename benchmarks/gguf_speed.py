"""Compare Octavo and llama.cpp on GGUF files: decoding of 1 and 8 requests, and prefill.

    python benchmarks/gguf_speed.py FILE... --llama BUILD/bin/llama-server --rounds 3

Both serve the same file on the same cores, one after the other in each round. The clients send
random token ids. Prints medians, with the least and the most.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

OUTPUT, SHORT, LONG = 128, 32, 2048
"""Numbers of tokens: of an answer, of a prompt, and of the prompt that measures prefill."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def post(port: int, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


def complete(port: int, prompt: list[int], tokens: int) -> None:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = post(port, body)
    assert answer["usage"]["completion_tokens"] == tokens, answer["usage"]


def measure(port: int, seed: int) -> dict[str, float]:
    """Return tokens per second."""
    numbers = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [numbers.randrange(100, 20000) for _ in range(length)]

    complete(port, prompt(SHORT), 8)
    found = {}
    for requests in (1, 8):
        prompts = [prompt(SHORT) for _ in range(requests)]
        with ThreadPoolExecutor(requests) as pool:
            begin = time.perf_counter()
            list(pool.map(lambda p: complete(port, p, OUTPUT), prompts))
            found[f"batch {requests}"] = requests * OUTPUT / (time.perf_counter() - begin)
    begin = time.perf_counter()
    complete(port, prompt(LONG), 1)
    found["prefill"] = LONG / (time.perf_counter() - begin)
    return found


def serve(command: list[str], port: int, ready: str, seed: int) -> dict[str, float]:
    """Start a server, measure, stop it; the path `ready` answers 200 once the model is loaded."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            begin = time.perf_counter()
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}{ready}", timeout=5).close()
                    break
                except OSError:
                    if process.poll() is not None or time.perf_counter() - begin > 300:
                        raise SystemExit(f"{command[0]} did not start") from None
                    time.sleep(0.02)
            seconds = time.perf_counter() - begin
            return {"ready, s": seconds} | measure(port, seed)
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--llama", required=True, help="llama-server")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    cores = str(len(os.sched_getaffinity(0)))
    for file in args.files:
        rows: dict[str, list[dict[str, float]]] = {"octavo": [], "llama.cpp": []}
        for seed in range(args.rounds):
            for name, found in rows.items():
                port = free_port()
                where = ["--host", "127.0.0.1", "--port", str(port)]
                ready = "/ready" if name == "octavo" else "/health"
                if name == "octavo":
                    command = [sys.executable, "-m", "octavo", "serve", str(file), *where]
                    command += ["--max-model-len", "4096", "--kv-cache-memory-bytes", "1G"]
                    command += ["--no-enable-prefix-caching", "--max-num-seqs", "8"]
                else:
                    command = [args.llama, "--model", str(file), *where, "--parallel", "8"]
                    command += ["--ctx-size", str(8 * 4096), "--threads", cores]
                    command += ["--threads-batch", cores, "--no-webui"]
                found.append(serve(command, port, ready, seed))
        print(file.name, flush=True)
        for key in rows["octavo"][0]:
            values = {name: [one[key] for one in found] for name, found in rows.items()}
            texts = [
                f"{name} {statistics.median(v):.4g} ({min(v):.4g} to {max(v):.4g})"
                for name, v in values.items()
            ]
            ours, theirs = (statistics.median(v) for v in values.values())
            print(f"  {key:10} {'; '.join(texts)}; ratio {ours / theirs:.2f}", flush=True)


if __name__ == "__main__":
    main()
