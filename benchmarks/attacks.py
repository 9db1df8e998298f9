"""Measure how long a light client waits for its first token while another client attacks.

    python benchmarks/attacks.py [--url http://localhost:8000] [--seconds 10]

Without --url a server with the built-in model is started. For each attack, the light client's
median time to first token under attack is compared with its time alone, just before; the target is
a ratio of at most 2. The attacker is one process that repeats its request as soon as it is
answered.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import httpx
import msgspec

MESSAGE = {"role": "user", "content": "hello there"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def body(**fields: object) -> bytes:
    """Return the JSON of a small request with some other fields."""
    return msgspec.json.encode({"prompt": "x", "max_tokens": 2, **fields})


ATTACKS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "7.8 MB of text": (COMPLETIONS, lambda: body(prompt="a b! " * 1_560_000)),
    "2 MB of text to cut": (
        COMPLETIONS,
        lambda: body(prompt="a b! " * 400_000, truncate_prompt_tokens=5),
    ),
    "tokenize": ("/tokenize", lambda: body(prompt="a b! " * 40_000, return_token_strs=True)),
    "detokenize": ("/detokenize", lambda: body(tokens=[100] * 130_000)),
    "a long bad word": (COMPLETIONS, lambda: body(bad_words=["a b! " * 1_300_000])),
    "1000 prompts": (COMPLETIONS, lambda: body(prompt=["hello"] * 1000)),
    "8 MB of ids": (COMPLETIONS, lambda: body(prompt=[1] * 4_000_000)),
    "allowed ids, n = 64": (COMPLETIONS, lambda: body(allowed_token_ids=[5] * 200_000, n=64)),
    "10,000 messages": (CHAT, lambda: body(messages=[MESSAGE] * 10_000)),
    "a long stop text": (COMPLETIONS, lambda: body(stop=["a b! " * 1_400_000], n=256)),
    "30,000 items": ("/v1/responses", lambda: msgspec.json.encode({"input": [MESSAGE] * 30_000})),
    "20 long items": (
        "/v1/conversations",
        lambda: msgspec.json.encode({"items": [{**MESSAGE, "content": "a b! " * 75_000}] * 20}),
    ),
    "10,000 calls of Ollama's": (
        "/api/chat",
        lambda: msgspec.json.encode({"model": "octavo/stories", "messages": [CALL] * 10_000}),
    ),
}


@contextlib.contextmanager
def server(flags: Sequence[str] = ()) -> Iterator[str]:
    """Start a server, of the built-in model unless the flags name another; yield its address."""
    process = subprocess.Popen(
        [*(sys.executable, "-m", "octavo", "serve", "--host", "127.0.0.1", "--port", "0"), *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert process.stderr is not None
    try:
        url = ""
        for line in process.stderr:
            if found := re.search(r"listening on (http\S+)", line):
                url = found[1]
            if " ready: " in line:
                break
        else:
            raise SystemExit("the server did not start")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def first_token_times(url: str, seconds: float) -> list[float]:
    """Return the seconds to the first token of successive small requests."""
    times = []
    end = time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=120) as client:
        while time.monotonic() < end:
            started = time.perf_counter()
            with client.stream("POST", COMPLETIONS, content=body(stream=True), headers=JSON) as r:
                pieces = r.iter_bytes()
                next(pieces)
                times.append(time.perf_counter() - started)
                for _ in pieces:
                    pass
            time.sleep(0.02)
    return times


JSON = {"Content-Type": "application/json"}


def attack(url: str, path: str, data: bytes) -> None:
    """Send the same request repeatedly."""
    with httpx.Client(base_url=url, timeout=600) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                client.post(path, content=data, headers=JSON)


def main() -> None:
    """Print a line for each attack."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", help="address of a running server")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each measurement")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with contextlib.nullcontext(options.url) if options.url else server() as url:
        first_token_times(url, 2.0)
        print(f"{'attack':24}{'alone ms':>10}{'attacked':>10}{'longest':>10}{'ratio':>8}")
        for name, (path, make) in ATTACKS.items():
            data = make()
            alone = statistics.median(first_token_times(url, options.seconds))
            # A separate process, which shares no lock with the light client.
            attacker = spawn.Process(target=attack, args=(url, path, data), daemon=True)
            attacker.start()
            time.sleep(1.0)
            times = first_token_times(url, options.seconds)
            attacker.kill()
            attacker.join()
            attacked = statistics.median(times)
            print(
                f"{name:24}{alone * 1e3:10.1f}{attacked * 1e3:10.1f}{max(times) * 1e3:10.1f}"
                f"{attacked / alone:8.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
