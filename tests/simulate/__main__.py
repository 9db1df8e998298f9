"""Random lives of an engine, in any number, each from its seed.

    python -m tests.simulate --schedules 1000000 --jobs 2
    python -m tests.simulate --replay 1234567

The real engine core, scheduler, block pool and front-end records serve random requests with random
settings on a fake worker and clock, while requests are aborted, steps fail and engines die. After
each step all records are checked. In the end every request has been answered once, with the tokens
of a run alone. A failure is reported by its seed; --replay reduces it, and prints it as Python for
a test.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.simulate.schedule import Schedule, make_schedule, shrink
from tests.simulate.simulation import run

_BATCH = 500
_MOST_FAILURES = 10


def failures(seeds: range, states: bool = False) -> list[tuple[int, str]]:
    """Return the seeds whose schedules fail, and the errors."""
    found = []
    for seed in seeds:
        try:
            run(make_schedule(seed, states))
        except Exception as error:
            found.append((seed, f"{type(error).__name__}: {error}"))
    return found


def fails(schedule: Schedule) -> bool:
    """Return whether a schedule fails."""
    try:
        run(schedule)
    except Exception:
        return True
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """Return the status: 0, or 1 if a schedule failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--schedules", type=int, default=10_000, metavar="N", help="how many [10000]")
    add("--seed", type=int, default=0, metavar="N", help="the first one's number [0]")
    add("--jobs", type=int, default=1, metavar="N", help="processes [1]")
    add("--states", action="store_true", help="all models have recurrent states")
    add("--replay", type=int, metavar="SEED", help="run this one only, and make it smaller")
    args = parser.parse_args(argv)
    logging.getLogger("octavo").setLevel(logging.CRITICAL)  # steps fail on purpose
    if args.replay is not None:
        return _replay(make_schedule(args.replay, args.states), args.replay)
    begin, end = args.seed, args.seed + args.schedules
    batches = [range(at, min(at + _BATCH, end)) for at in range(begin, end, _BATCH)]
    started, done, found = time.monotonic(), 0, 0
    with contextlib.suppress(KeyboardInterrupt):  # finished schedules count
        for batch, bad in zip(batches, _map(batches, args.states, args.jobs), strict=False):
            done += len(batch)
            found += len(bad)
            for seed, message in bad:
                print(f"\nseed {seed}: {message}", flush=True)
            if sys.stderr.isatty():
                rate = done / (time.monotonic() - started)
                print(f"\r{done:,} of {args.schedules:,}, {rate:,.0f}/s ", end="", file=sys.stderr)
            if found >= _MOST_FAILURES:
                break
    seconds = time.monotonic() - started
    print(
        f"{done:,} schedules (seeds {begin} to {begin + done - 1}) in {seconds:,.0f} s, "
        f"{done / max(seconds, 1e-9):,.0f}/s: {found} failed"
    )
    return int(bool(found))


def _map(batches: list[range], states: bool, jobs: int) -> Iterator[list[tuple[int, str]]]:
    """Yield `failures` of each batch, in order, from the given number of processes."""
    of_batch = partial(failures, states=states)
    if jobs == 1:
        yield from map(of_batch, batches)
        return
    with ProcessPoolExecutor(jobs, initializer=_silence) as pool:
        try:
            yield from pool.map(of_batch, batches)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _silence() -> None:
    logging.getLogger("octavo").setLevel(logging.CRITICAL)


def _replay(schedule: Schedule, seed: int) -> int:
    if not fails(schedule):
        print(f"seed {seed} passes")
        return 0
    schedule = shrink(schedule, fails)
    try:
        run(schedule)
    except Exception:
        traceback.print_exc()
    print(f"\nseed {seed}, made smaller:\n\nSchedule(\n    {schedule.settings},\n    (")
    for event in schedule.events:
        print(f"        {event},")
    print("    ),\n)")
    return 1


if __name__ == "__main__":
    sys.exit(main())
