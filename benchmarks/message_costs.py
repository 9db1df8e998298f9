"""Measure the cost of messages, for the limits on the number of engines in docs/scaling.md.

python benchmarks/message_costs.py

Prints the median of each in microseconds. No other program should compute on the machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from octavo.fleet.routing import Router
from octavo.frontend.output_processor import OutputProcessor
from octavo.messages import (
    CoreSamplingParams,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    RequestOptions,
)
from octavo.models.hub import resolve_model
from octavo.observability.metrics import EngineMetrics
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer

BATCH = 32
"""Number of requests of a step."""
BLOCK = 16
PROMPT = 1024
"""Number of tokens of a routed prompt."""
ENGINES = (1, 10, 100, 1000)


def median_us(call: Callable[[], object], rounds: int) -> float:
    """Return the median time of a call in microseconds, after a tenth of the rounds to warm up."""
    times = []
    for _ in range(rounds + rounds // 10):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times[-rounds:]) * 1e6


def step(token: int = 5) -> EngineCoreOutputs:
    """Return an engine's outputs of a step with a token for each of its requests."""
    outputs = [EngineCoreOutput(str(number), [token]) for number in range(BATCH)]
    return EngineCoreOutputs(outputs, SchedulerStats(num_running_reqs=BATCH), time.time())


def codec(rounds: int) -> dict[str, float]:
    """Measure encoding and decoding a step's outputs."""
    encoder = msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
    outputs, payload = step(), encoder.encode(step())
    return {
        f"encode a step of {BATCH} requests ({len(payload)} bytes)": median_us(
            lambda: encoder.encode(outputs), rounds
        ),
        f"decode a step of {BATCH} requests": median_us(lambda: decoder.decode(payload), rounds),
    }


@contextmanager
def echo(address: str, curve: bool) -> Iterator[zmq.Socket[bytes]]:
    """Yield a socket to a thread that echoes messages, by the system's sockets."""
    context = zmq.Context()
    server, client = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    if curve:
        public, secret = zmq.curve_keypair()
        server.curve_server = True
        server.curve_secretkey = client.curve_secretkey = secret
        client.curve_serverkey = client.curve_publickey = public
    server.bind(address)
    client.connect(server.getsockopt_string(zmq.LAST_ENDPOINT))

    def answer() -> None:
        while message := server.recv():
            server.send(message)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield client
    finally:
        client.send(b"")
        thread.join()
        context.destroy(linger=0)


def round_trips(rounds: int) -> dict[str, float]:
    """Measure a step's outputs to a thread and back, by a Unix socket and by encrypted TCP."""
    payload = msgspec.msgpack.encode(step())
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "round trip, ipc": (f"ipc://{folder}/echo", False),
            "round trip, TCP on this machine with CurveZMQ": ("tcp://127.0.0.1:*", True),
        }
        for name, (address, curve) in ways.items():
            with echo(address, curve) as client:

                def there_and_back(client: zmq.Socket[bytes] = client) -> None:
                    client.send(payload)
                    client.recv()

                found[name] = median_us(there_and_back, rounds)
    return found


def routing(rounds: int) -> dict[str, float]:
    """Measure placing a request among engines; half of the prompts share their first half."""
    found = {}
    for size in ENGINES:
        rng = random.Random(0)
        router = Router(BLOCK, size, enable_prefix_caching=True)
        prefixes = [[rng.randrange(50000) for _ in range(PROMPT // 2)] for _ in range(64)]
        engines = range(size)
        requests = []
        for number in range(rounds + rounds // 10):
            tail = [rng.randrange(50000) for _ in range(PROMPT // 2)]
            first = rng.choice(prefixes) if number % 2 else tail[::-1]
            requests.append(
                EngineCoreRequest(
                    str(number), [*first, *tail], CoreSamplingParams(), RequestOptions(0.0)
                )
            )
        coming = iter(requests)

        def place(router: Router = router, coming: Any = coming, engines: range = engines) -> None:
            request = next(coming)
            router.place(request, engines)
            router.remove(request.child_ids)

        found[f"place a request of {PROMPT} tokens, engines: {size}"] = median_us(place, rounds)
    return found


def processing(rounds: int) -> dict[str, float]:
    """Measure the front end's cost of a token: detokenizing, metrics and output, without HTTP."""
    folder: Path = resolve_model("octavo/stories")
    tokenizer = Tokenizer.from_folder(folder)
    processor = OutputProcessor(tokenizer, EngineMetrics("m", 2**20))
    for number in range(BATCH):
        request = EngineCoreRequest(
            str(number), [5, 6, 7], CoreSamplingParams(), RequestOptions(time.time())
        )
        processor.add_request(request, SamplingParams(max_tokens=2**20, ignore_eos=True), "a b c")
    rng = random.Random(0)

    def process() -> None:
        processor.process_outputs(step(rng.randrange(100, 1000)).outputs, time.time())

    return {"process a token": median_us(process, rounds) / BATCH}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2000)
    rounds = parser.parse_args().rounds
    found = codec(rounds) | round_trips(rounds) | processing(rounds)
    found |= routing(max(20, rounds // 10))
    width = max(map(len, found))
    for name, microseconds in found.items():
        print(f"{name:<{width}}  {microseconds:10.2f} us")


if __name__ == "__main__":
    main()
