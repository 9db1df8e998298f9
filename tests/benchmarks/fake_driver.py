"""Engine that answers at once, for the tests of the comparison; see `fakes.py`.

usage: fake_driver.py BEHAVIOUR JOURNAL JOB OUT
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from peers.base import Answer, Generate, Row, Setup, drive

behaviour, journal = sys.argv[1], Path(sys.argv[2])
calls = 0


def load(setup: Setup) -> Generate:
    """Return an engine that is good, short (a token too few), dies (in its third run) or hangs."""
    with journal.open("a") as out:
        out.write("start\n")

    def generate(rows: Sequence[Row], timed: bool) -> list[Answer]:
        global calls
        calls += timed
        if behaviour == "dies" and calls == 3:
            sys.exit("out of memory, says the fake")
        if behaviour == "hangs":
            time.sleep(60)
        now = time.perf_counter()
        short = behaviour == "short" and timed
        return [Answer(now, now + 0.1, row.max_tokens - short) for row in rows]

    return generate


del sys.argv[1:3]
drive(load)
