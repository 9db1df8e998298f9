"""Hiding of keys on the command line from the list of processes."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

_KEY_FLAG = re.compile(rb"--(\w+[-_])*(api|admin)[-_]key(=|$)")
# Fields of /proc/PID/stat, counted after the program's name.
_ARG_START, _ARG_END = 45, 46


def hide_keys() -> None:
    """Overwrite the keys in this process' own arguments, which all users may read.

    `sys.argv` keeps them, since Python has copied them. On systems other than Linux this does
    nothing.
    """
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return
    fields = stat.read_text(errors="replace").rpartition(")")[2].split()
    begin, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    if not begin:  # unknown
        return
    for place, size in _find_keys(ctypes.string_at(begin, end - begin)):
        ctypes.memset(begin + place, ord("*"), size)


def _find_keys(arguments: bytes) -> list[tuple[int, int]]:
    """Return place and size of each key among arguments, each of which ends with a zero byte."""
    found: list[tuple[int, int]] = []
    place, is_key = 0, False
    for word in arguments.split(b"\0"):
        flag = _KEY_FLAG.match(word)
        if flag is not None:
            is_key = not flag[3]
            if not is_key:
                found.append((place + flag.end(), len(word) - flag.end()))
        elif word.startswith(b"-"):
            is_key = False
        elif is_key:
            found.append((place, len(word)))
        place += len(word) + 1
    return found
