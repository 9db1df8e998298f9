"""Sounds: read from files of strangers, as float32 samples with one channel at 16 kHz.

FFmpeg's libraries, which PyAV brings, decode, mix and resample in a helper process
(`media/audio_jobs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.media.process import Limits, MediaProcesses, Result
from octavo.system.limited_process import Buffer

SAMPLE_RATE = 16_000
"""Samples a second of every sound that was read."""
MAX_SECONDS = 7200
"""Longest sound in seconds."""
MAX_SECONDS_IN_PARTS = 24 * 3600
"""Longest sound in seconds that is read in parts."""
MAX_BYTES_IN_PARTS = 4 * 2**30
"""Largest file that is read in parts."""
_LIMITS = Limits(seconds=60.0, nbytes=2 * 2**30, output_nbytes=4 * SAMPLE_RATE * MAX_SECONDS)

Samples = NDArray[np.float32]
T = TypeVar("T")


class AudioReader:
    """Helper processes that read sounds; they start at the first one."""

    def __init__(self) -> None:
        self._processes = MediaProcesses("octavo.media.audio_jobs", "audio", _LIMITS)

    @property
    def num_processes(self) -> int:
        """Most helper processes."""
        return self._processes.num_processes

    def submit(self, data: Buffer, param: str = "file") -> Future[Samples]:
        """Start to read a sound; the future's result is float32 [samples], finite.

        The arguments and the errors are those of `read`.
        """
        return self.read(data, lambda samples: samples, param)

    def read(
        self,
        data: Buffer,
        make: Callable[[Samples], T],
        param: str = "file",
        max_seconds: int = MAX_SECONDS,
    ) -> Future[T]:
        """Start to read a sound; return a future of what `make` makes of it on a thread.

        Args:
            data: WAV, FLAC, MP3, Ogg (Vorbis, Opus, FLAC), M4A or MP4, WebM, or AAC (ADTS). Of a
                video, the sound is read.
            make: gets the samples, float32 [samples], finite.
            param: field of the request that has the sound, for errors.
            max_seconds: longest sound; the rest of a longer one is not decoded.

        The future's errors:
            RequestError: it is no sound of these formats, damaged, too long, or breaks a limit.
            UnsupportedError: PyAV is not installed.
        """
        if not len(data):
            failed: Future[T] = Future()
            failed.set_exception(RequestError(f"{param} is empty; send a sound.", param))
            return failed

        def made(result: Result) -> T:
            return make(result[1][0])

        return self._processes.submit("decode", [data], max_seconds, param=param, make=made)

    def close(self) -> None:
        """End the processes."""
        self._processes.close()


class AudioParts:
    """Sounds that are read in parts, so that a long one needs little memory.

    Each sound that is open has a helper process of its own, which the next one takes over.
    """

    def __init__(self) -> None:
        self._free: list[MediaProcesses] = []
        self._all: list[MediaProcesses] = []

    def open(self, data: Buffer, size: int, param: str = "file") -> tuple[float, Iterator[Samples]]:
        """Open a sound.

        Args:
            data: as for `AudioReader.read`.
            size: number of samples of a part.
            param: field of the request that has the sound, for errors.

        Returns:
            The seconds of sound that its head announces, or an estimate, 0 if unknown; and its
            parts, float32 [size], finite. The last one has fewer samples, perhaps none. The next
            part is read while the caller uses one.

        Raises:
            RequestError: it is no sound, or too long; also while the parts are read.
            UnsupportedError: PyAV is not installed.
        """
        if not len(data):
            raise RequestError(f"{param} is empty; send a sound.", param)
        if len(data) > MAX_BYTES_IN_PARTS:
            raise RequestError(
                f"{param} has {len(data)} bytes, more than the limit of {MAX_BYTES_IN_PARTS}; "
                "compress the sound, or send parts of it.",
                param,
            )
        if not self._free:
            nbytes = _LIMITS.nbytes + MAX_BYTES_IN_PARTS
            limits = replace(_LIMITS, nbytes=nbytes, output_nbytes=4 * size)
            made = MediaProcesses("octavo.media.audio_jobs", "audio", limits, 1)
            self._free.append(made)
            self._all.append(made)
        process = self._free.pop()

        def submit() -> Future[Samples]:
            return process.submit(
                "proceed", [], param=param, make=lambda result: cast(Samples, result[1][0])
            )

        def parts() -> Iterator[Samples]:
            coming: Future[Samples] | None = submit()
            try:
                while coming is not None:
                    part = coming.result()
                    coming = submit() if len(part) == size else None
                    yield part
            finally:
                self._free.append(process)

        try:
            seconds: float = process.submit(
                "begin",
                [data],
                [MAX_SECONDS_IN_PARTS, size],
                param=param,
                make=lambda result: float(result[0]),
            ).result()
        except BaseException:
            self._free.append(process)
            raise
        return seconds, parts()

    def close(self) -> None:
        """End the processes."""
        for process in self._all:
            process.close()
