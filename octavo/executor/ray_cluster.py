"""Ray cluster on this machine that ends with the process that needs it; see `RayExecutor`.

If the process that started Ray is killed, Ray ends some of its processes late or never. This
process adopts them, and kills the remaining ones when its standard input ends.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

import ray

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
ADDRESS, ERROR = "address ", "error "
"""Prefixes of the line on standard output: the cluster's address, or an error."""


def main() -> None:
    """Run a cluster in the folder of the argument until standard input ends."""
    folder = sys.argv[1]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
        )
        line = ADDRESS + ray.get_runtime_context().gcs_address
    except Exception as error:
        line = ERROR + " ".join(f"{type(error).__name__}: {error}".split())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # replaces Ray's handler
    print(line, flush=True)
    while sys.stdin.buffer.read(1):
        pass
    _kill_children()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # skips Ray's disconnection


def _kill_children() -> None:
    """Kill all descendants of this process.

    When a child is killed, its own children become children of this process.
    """
    while True:
        for task in Path("/proc/self/task").iterdir():
            for pid in (task / "children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
