"""The only file that asks what the device is and what it has.

Nothing here imports torch at module level: the control plane uses the memory and core counts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")


def num_cpus() -> int:
    """Cores that this process may use: affinity and cgroup quota considered."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return cores


def cpu_memory() -> tuple[int, int]:
    """Memory of the machine or of the cgroup: (total, available) in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    available = total
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        available = os.sysconf("SC_AVPHYS_PAGES") * page
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        # Counted as used, but given back as soon as somebody needs it: files read lately.
        stat = dict(map(str.split, (_CGROUP / "memory.stat").read_text().splitlines()))
        used -= int(stat.get("inactive_file", 0))
        total, available = min(total, limit), min(available, max(0, limit - used))
    except (OSError, ValueError):
        pass
    return total, available


def select_device(name: str) -> torch.device:
    """The torch device for a config's `device`.

    Raises:
        ConfigError: if CUDA is asked for: that path does not exist yet.
    """
    import torch

    if name == "cuda":
        raise ConfigError("device=cuda is not supported yet; use device=cpu.")
    return torch.device("cpu")


def set_num_threads(num_threads: int | None) -> int:
    """Sizes the pool of threads that compute; returns its size.

    The pool is the native kernels'. Torch's operations between them are small: they stay on the
    calling thread, so that no second pool competes for the cores.

    Raises:
        ConfigError: if more threads are asked for than there are cores.
    """
    import torch

    from octavo import _native

    cores = num_cpus()
    if num_threads is not None and num_threads > cores:
        raise ConfigError(
            f"num_threads={num_threads} is more than the {cores} cores this process may use; "
            "threads waiting for each other would make every step slower. Lower it."
        )
    torch.set_num_threads(1)
    _native.set_num_threads(num_threads or cores)
    return num_threads or cores
