"""Measure round trips of messages to two workers, by `octavo.executor.message_queue`.

    python benchmarks/message_queue.py [--messages 5000] [--size 400] [--workers 2]

A message is written to all workers, and the first one answers, as with steps: first back to back,
while the workers stay awake, then with a pause of 2 ms before each message, so that they sleep.
Needs a quiet machine with a core for each worker and one more.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time

import msgspec

from octavo.executor.message_queue import (
    QueueHandle,
    QueueReader,
    QueueWriter,
    make_queue,
)

PAUSE_SECONDS = 2e-3


def work(steps: QueueHandle, results: QueueHandle | None) -> None:
    """Run a worker: answer every message with one of the same size, until an empty one."""
    reader = QueueReader(steps)
    writer = None if results is None else QueueWriter(results)
    while message := reader.read():
        if writer is not None:
            writer.write(message)


def measure(writer: QueueWriter, reader: QueueReader, message: bytes, count: int) -> None:
    """Print the times of round trips, back to back and with pauses."""
    for name, pause in (("back to back", 0.0), ("with pauses", PAUSE_SECONDS)):
        times = []
        for _ in range(count):
            if pause:
                time.sleep(pause)
            begin = time.perf_counter()
            writer.write(message)
            reader.read(10.0)
            times.append(1e6 * (time.perf_counter() - begin))
        median, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
        print(f"{name:13} median {median:7.1f} us, p99 {p99:7.1f} us")


def main() -> None:
    """Start the workers and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=5000)
    parser.add_argument(
        "--size",
        type=int,
        default=400,
        help="bytes of a message; default: about a step of 8 requests",
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(*msgspec.json.decode(args.worker, type=tuple[QueueHandle, QueueHandle | None]))
        return
    steps, results = make_queue(args.workers), make_queue(1)
    with contextlib.ExitStack() as stack:
        for rank in range(args.workers):
            handles = (steps.for_reader(rank), results if rank == 0 else None)
            process = subprocess.Popen(
                [sys.executable, __file__, "--worker", msgspec.json.encode(handles).decode()],
                pass_fds=[fd for handle in handles if handle for fd in handle.descriptors],
            )
            stack.callback(process.wait)
        writer, reader = QueueWriter(steps), QueueReader(results)
        stack.callback(writer.write, b"")
        message = bytes(args.size)
        writer.write(message)
        reader.read(60.0)  # imports are complete
        measure(writer, reader, message, args.messages)


if __name__ == "__main__":
    main()
