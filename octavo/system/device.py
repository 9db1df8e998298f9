"""Properties of the device; the only file that queries them.

Does not import torch at module level: the control plane uses the memory and core counts.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_CGROUP = Path("/sys/fs/cgroup")
_NODES = Path("/sys/devices/system/node")
# The C library has no wrapper, so Linux' system call is made by its number.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_BIND = 2
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def num_cpus() -> int:
    """Return the number of cores that this process may use, by affinity and cgroup quota."""
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


def cpu_model() -> str:
    """Return the processor's name as reported by the system."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_memory(numa_node: int | None = None) -> tuple[int, int]:
    """Return (total, available) bytes: the minimum over the machine, the cgroup and a NUMA node.

    Raises:
        ConfigError: the node does not exist.
    """
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
        # Counted as used, but released on demand: recently read files.
        stat = dict(map(str.split, (_CGROUP / "memory.stat").read_text().splitlines()))
        used -= int(stat.get("inactive_file", 0))
        total, available = min(total, limit), min(available, max(0, limit - used))
    except (OSError, ValueError):
        pass
    if numa_node is not None:
        lines = (_node_folder(numa_node) / "meminfo").read_text().splitlines()
        kib = {words[2]: int(words[3]) for words in map(str.split, lines)}
        total = min(total, kib["MemTotal:"] * 1024)
        # Recently read files and the kernel's caches are released on demand.
        reclaimable = kib.get("Inactive(file):", 0) + kib.get("SReclaimable:", 0)
        available = min(available, (kib["MemFree:"] + reclaimable) * 1024)
    return total, available


def numa_cpus(node: int) -> set[int]:
    """Return the cores of a NUMA node that the calling thread may use.

    Raises:
        ConfigError: the node does not exist, or none of its cores may be used.
    """
    text = (_node_folder(node) / "cpulist").read_text().strip()
    allowed = _parse_list(text) & os.sched_getaffinity(0)
    if not allowed:
        raise ConfigError(
            f"numa_node={node}: this process may not use any of its cores ({text or 'none'}); its "
            "affinity or its container forbids them. Choose another node."
        )
    return allowed


def bind_to_numa_node(node: int) -> None:
    """Bind the calling thread, and threads it starts, to a node's cores and memory.

    Memory that was touched before is not moved.

    Raises:
        ConfigError: the node does not exist, none of its cores may be used, or the system does not
            allow it.
    """
    cpus = numa_cpus(node)
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise ConfigError(
            f"numa_node={node} is not supported on {platform.machine()} processors; leave it out "
            f"and start with `numactl --cpunodebind={node} --membind={node}`."
        )
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel ignores the last of the given number of bits.
    if libc.syscall(number, _MPOL_BIND, mask, ctypes.c_ulong(len(mask) * bits + 1)) != 0:
        raise ConfigError(
            f"numa_node={node}: memory cannot be bound ({os.strerror(ctypes.get_errno())}); a "
            "container needs CAP_SYS_NICE for it. Leave it out, or allow set_mempolicy."
        )
    os.sched_setaffinity(0, cpus)
    logger.info("bound to NUMA node %d: %d cores and its memory", node, len(cpus))


def _node_folder(node: int) -> Path:
    if sys.platform != "linux":
        raise ConfigError(f"numa_node={node} is supported on Linux only; leave it out.")
    folder = _NODES / f"node{node}"
    if not folder.is_dir():
        there = sorted(int(p.name[4:]) for p in _NODES.glob("node[0-9]*"))
        raise ConfigError(
            f"numa_node={node} does not exist; this machine has "
            f"{', '.join(map(str, there)) or 'no NUMA nodes'}."
        )
    return folder


def _parse_list(text: str) -> set[int]:
    """Parse Linux' lists of cores: "0-3,8"."""
    cpus: set[int] = set()
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def resident_memory(pid: int | None = None) -> int | None:
    """Return the resident bytes of a process, including shared libraries; None if unknown.

    Args:
        pid: the process; None: this one.
    """
    try:
        status = Path(f"/proc/{pid or 'self'}/status").read_text()
    except OSError:  # not Linux
        return None
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def private_memory(pid: int) -> int:
    """Return the bytes of a process' anonymous memory; 0 if unknown.

    Memory that it shares with the process that it was forked from counts, too.

    Args:
        pid: the process.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # not Linux, or the process is gone
        return 0
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def process_seconds(pid: int) -> float | None:
    """Return the processor time of another process in seconds; None if unknown.

    Args:
        pid: the process.
    """
    try:  # as clock_getcpuclockid does on Linux
        return time.clock_gettime((~pid << 3) | 2)
    except (OSError, OverflowError):  # not Linux, or the process is gone
        return None


def trim_memory() -> None:
    """Return freed memory to the system, if the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


SWITCH_INTERVAL = 0.0002
"""Seconds between two switches among Python threads in an engine.

A worker's thread returns from a kernel, or launches one, many times a step, and must not wait 5 ms
(Python's default) for a busy thread each time."""


def num_cuda_devices() -> int:
    """Return the number of NVIDIA GPUs that this process may use, by the driver, without torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def cuda_cores(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, the minimum number of concurrent programs."""
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


def cuda_name(device: torch.device) -> str:
    """Return the name of a GPU."""
    import torch

    return torch.cuda.get_device_name(device)


def cuda_capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability: (8, 0) is an A100, (9, 0) an H100."""
    import torch

    return torch.cuda.get_device_capability(device)


def cuda_shared_memory(device: torch.device) -> int:
    """Return the most bytes of shared memory that a program on a GPU may have."""
    import torch

    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def cuda_memory(device: torch.device) -> tuple[int, int]:
    """Return (total, free) bytes of a GPU's memory."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return total, free


def check_isa() -> None:
    """Check that there are kernels for the environment variable OCTAVO_ISA.

    Raises:
        ConfigError: this processor has no kernels for it.
    """
    from octavo import _native

    try:
        _native.isa()
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_num_threads(num_threads: int | None) -> int:
    """Check that there is a core for each thread; return the number of cores.

    Raises:
        ConfigError: there are fewer cores.
    """
    cores = num_cpus()
    if num_threads is not None and num_threads > cores:
        raise ConfigError(
            f"num_threads={num_threads} is more than the {cores} cores this process may use; "
            f"threads waiting for each other would make every step slower. Use {cores} or fewer."
        )
    return cores


def set_num_threads(num_threads: int | None) -> int:
    """Set the size of the pool of computing threads; return its size.

    Raises:
        ConfigError: more threads than cores are configured.
    """
    from octavo import _native

    cores = check_num_threads(num_threads)
    _native.set_num_threads(num_threads or cores)
    return num_threads or cores


def signal_at_parents_end(number: signal.Signals) -> None:
    """Have Linux send this process a signal when the thread that started it ends.

    Args:
        number: SIGKILL; or SIGCONT for a process that notices the end itself, but may be stopped
            then.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def is_stopped(pid: int) -> bool:
    """Return True if a signal such as SIGSTOP, but not a debugger, has stopped a child process."""
    try:
        options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, pid, options) is not None
    except ChildProcessError:  # it has ended, and its status was read
        return False
