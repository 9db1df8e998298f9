"""Traces of the engine's threads and kernels over time, for Perfetto or chrome://tracing.

Spans cover the host side (schedule, prepare inputs, forward, sample, update) and every kernel call.
The native side records the kernels' spans for the whole process, so a process can record only one
profile at a time. Without a profile `span` does nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec

from octavo.errors import ConfigError, ProfilerError

logger = logging.getLogger(__name__)

# 450 bytes each, so a profile uses at most about 100 MB. That is a thousand steps of a model of 22
# layers.
MAX_EVENTS = 200_000


class TraceEvent(NamedTuple):
    """Span of one thread."""

    name: str
    start: float
    """Start in seconds of `time.monotonic`, which is the kernels' clock too."""
    end: float
    thread: str
    """Name of the thread; each has a separate track, on which spans nest."""
    args: dict[str, float | int | str]
    """Further data: "step", "requests", "tokens"; for a kernel "bytes", "flops", "rows"."""


def write_chrome_trace(path: str | Path, events: Iterable[TraceEvent]) -> None:
    """Write a trace in Chrome's JSON format ("X" events, microseconds from the first start).

    The file appears once it is complete; only this user can read it.

    Raises:
        OSError: the file cannot be written.
    """
    # A span precedes those inside it.
    ordered = sorted(events, key=lambda event: (event.start, -event.end))
    origin = ordered[0].start if ordered else 0.0
    path, pid = Path(path), os.getpid()
    part = path.with_name(f".{path.name}.{pid}.part")
    part.unlink(missing_ok=True)
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
            file.write(b",\n".join(_entries(ordered, origin, pid)))
            file.write(b"\n]}\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _entries(events: list[TraceEvent], origin: float, pid: int) -> Iterator[bytes]:
    encode = msgspec.json.Encoder().encode
    tids: dict[str, int] = {}
    for event in events:
        tid = tids.setdefault(event.thread, len(tids) + 1)
        # Nanoseconds: equal times stay equal, so that nested spans stay inside.
        start, end = (round((t - origin) * 1e6, 3) for t in (event.start, event.end))
        yield encode(
            {
                "name": event.name,
                "ph": "X",
                "ts": start,
                "dur": round(end - start, 3),
                "pid": pid,
                "tid": tid,
                "args": event.args,
            }
        )
    names = [("process_name", 0, "octavo"), *(("thread_name", t, n) for n, t in tids.items())]
    for kind, tid, name in names:
        yield encode({"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})


def take_kernel_events() -> list[TraceEvent]:
    """Return the kernels' spans since the last call, on the calling thread's track."""
    from octavo import _native

    thread = threading.current_thread().name
    return [
        TraceEvent(name, start, end, thread, {"bytes": nbytes, "flops": flops, "rows": rows})
        for name, start, end, nbytes, flops, rows in _native.take_spans()
    ]


class Profiler:
    """Recorder of profiles, one after the other, into files `octavo-<pid>-<n>.trace.json`.

    Args:
        directory: folder of the files; created if it does not exist.
        max_events: maximum number of spans of a profile; later ones are counted and dropped.

    Raises:
        ConfigError: the directory cannot be created or written to.
    """

    _numbers = itertools.count(1)

    def __init__(self, directory: str | Path, *, max_events: int = MAX_EVENTS) -> None:
        self.directory = Path(directory).expanduser()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"profiler_dir={str(directory)!r} cannot be made: {error.strerror}."
            ) from None
        if not os.access(self.directory, os.W_OK | os.X_OK):
            raise ConfigError(f"profiler_dir={str(directory)!r} cannot be written to.")
        self._max_events = max_events
        self._events: list[TraceEvent] = []
        self._dropped = 0

    @property
    def recording(self) -> bool:
        """True if a profile is being recorded."""
        return _active is self

    def start(self) -> None:
        """Begin a profile.

        Raises:
            ProfilerError: a profile is already being recorded in this process.
        """
        global _active
        if _active is not None:
            raise ProfilerError("A profile is being recorded already; stop it first.")
        from octavo import _native

        self._events, self._dropped = [], 0
        _native.take_spans()  # discards spans of an earlier profile
        _native.set_profiling(True)
        _active = self

    def stop(self) -> Path:
        """End the profile and write it; return its file.

        Raises:
            ProfilerError: no profile is being recorded, or the file cannot be written.
        """
        global _active
        if _active is not self:
            raise ProfilerError("No profile is being recorded; start one first.")
        from octavo import _native

        _native.set_profiling(False)
        drain_kernels()
        _active = None
        events, self._events = self._events, []
        path = self.directory / f"octavo-{os.getpid()}-{next(self._numbers)}.trace.json"
        try:
            write_chrome_trace(path, events)
        except OSError as error:
            raise ProfilerError(
                f"The profile could not be written to {path}: {error.strerror}."
            ) from None
        if self._dropped:
            logger.warning(
                "the profile has its first %d spans; %d later ones were dropped: profile for a "
                "shorter time",
                len(events),
                self._dropped,
            )
        logger.info("profile of %d spans written to %s", len(events), path)
        return path

    def add(self, events: list[TraceEvent]) -> None:
        """Add spans, up to `max_events`."""
        room = max(0, self._max_events - len(self._events))
        self._events += events[:room]
        self._dropped += len(events[room:])


# Active profiler; every span reads it, so it is a plain variable.
_active: Profiler | None = None


def drain_kernels() -> None:
    """Collect the kernels' spans; their thread must call this once a step."""
    if _active is not None:
        _active.add(take_kernel_events())


class _Span:
    """Span being recorded; a call adds arguments for the trace."""

    __slots__ = ("_args", "_name", "_profiler", "_start")

    def __init__(self, profiler: Profiler, name: str) -> None:
        self._profiler = profiler
        self._name = name
        self._args: dict[str, float | int | str] = {}

    def __call__(self, **args: float | int | str) -> None:
        self._args.update(args)

    def __enter__(self) -> _Span:
        self._start = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._profiler is _active:  # otherwise the profile has ended meanwhile
            end, thread = time.monotonic(), threading.current_thread().name
            self._profiler.add([TraceEvent(self._name, self._start, end, thread, self._args)])


class _NoSpan:
    """Result of `span` while nothing is recorded."""

    def __call__(self, **args: float | int | str) -> None:
        pass


_OFF = contextlib.nullcontext(_NoSpan())


def span(name: str) -> AbstractContextManager[_Span | _NoSpan]:
    """Record the time spent in a `with` block: `with span("schedule") as note: note(tokens=3)`."""
    return _OFF if _active is None else _Span(_active, name)
