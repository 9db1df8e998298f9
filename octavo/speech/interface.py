"""Interface of models that write what is said: the requests for a window, and their answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo.media.audio import SAMPLE_RATE
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.speech.segments import Decoded, Transcript
from octavo.speech.windows import Window, part_unit, split, split_part

if TYPE_CHECKING:
    from octavo.speech.transcription import TranscriptionOptions

Samples = NDArray[np.float32]
T = TypeVar("T")


class Question(Protocol):
    """Request for the engine: one answer to one window."""

    @property
    def prompt(self) -> dict[str, Any]:
        """The engine's prompt."""

    @property
    def params(self) -> SamplingParams:
        """Parameters of the answer."""


Steps: TypeAlias = Generator[Question, RequestOutput, T]
"""Steps of a computation: it asks, gets the answer, and in the end returns a result."""


class Job(ABC):
    """Transcription of a sound that is being made.

    Args:
        samples: the sound, float32 [samples] at 16 kHz.
        window_seconds: longest window.
        parts: the rest of the sound, if it is read in parts: each a multiple of `part_unit`, except
            for the last one. `proceed` takes the next one.

    Attributes:
        windows: parts of the samples at hand in which somebody may be speaking.
        language: code of the language; "": none was given, and the model needs none. None until
            `detect` has found it.
    """

    language: str | None

    def __init__(
        self, samples: Samples, window_seconds: float, parts: Iterator[Samples] | None = None
    ) -> None:
        self._samples, self._window_seconds, self._parts = samples, window_seconds, parts
        self._first = self._rest = 0
        """Samples before `_samples`, and those of it that no later window needs."""
        self.windows: list[Window] = []
        if parts is None:
            self.windows = split(samples, SAMPLE_RATE, window_seconds)

    @property
    def seconds(self) -> float:
        """Seconds of the sound so far."""
        return (self._first + len(self._samples)) / SAMPLE_RATE

    def proceed(self) -> bool:
        """Read the next part of the sound, which replaces `windows`; return False at the end.

        The windows before must have their features.

        Raises:
            RequestError: the rest of the sound cannot be read.
        """
        if self._parts is None:
            return False
        first, seconds = self._first + self._rest, self._window_seconds
        part = next(self._parts, None)
        self._samples = self._samples[self._rest :]
        if part is not None:
            self._samples = np.concatenate([self._samples, part])
        if part is None or len(self._samples) % part_unit(SAMPLE_RATE):
            self._parts, self._rest = None, len(self._samples)
            windows = split(self._samples, SAMPLE_RATE, seconds)
        else:
            windows, self._rest = split_part(self._samples, SAMPLE_RATE, seconds)
        self._first = first
        self.windows = [Window(first + window.begin, first + window.end) for window in windows]
        return True

    def cut(self, window: Window) -> Samples:
        """Return the samples of a window."""
        return self._samples[window.begin - self._first : window.end - self._first]

    @property
    @abstractmethod
    def windows_at_once(self) -> int:
        """Number of windows that may be computed side by side."""

    @abstractmethod
    def features(self, window: Window) -> Any:
        """Return what the model reads of a window."""

    @abstractmethod
    def detect(self, features: Any) -> Steps[None]:
        """Find the language of a window, which becomes that of the whole sound."""

    @abstractmethod
    def decode(self, window: Window, features: Any) -> Steps[Decoded]:
        """Find the text of a window."""

    @abstractmethod
    def add(self, window: Window, decoded: Decoded) -> str:
        """Add the answer for the next window; return the text that it adds."""

    @abstractmethod
    def transcript(self) -> Transcript:
        """Return the transcript of the windows that were added."""


class SpeechToText(ABC):
    """Model that writes what is said."""

    @property
    @abstractmethod
    def window_nbytes(self) -> int:
        """Bytes of what the model reads of a window."""

    @property
    def alignment_nbytes(self) -> int:
        """Most bytes of the weights that align a window; 0: it has no times of words."""
        return 0

    @abstractmethod
    def start(
        self,
        samples: Samples,
        options: TranscriptionOptions,
        parts: Iterator[Samples] | None = None,
    ) -> Job:
        """Return the transcription of a sound; `samples` and `parts` as in `Job`.

        Raises:
            RequestError: the model does not support an option.
        """
