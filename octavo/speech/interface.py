"""Interface of models that write what is said: the requests for a window, and their answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.speech.segments import Decoded, Transcript
from octavo.speech.windows import Window

if TYPE_CHECKING:
    from octavo.speech.transcription import TranscriptionOptions

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

    Attributes:
        windows: parts of the sound in which somebody may be speaking.
        language: code of the language; "": none was given, and the model needs none. None until
            `detect` has found it.
    """

    windows: list[Window]
    language: str | None

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
    def start(self, samples: NDArray[np.float32], options: TranscriptionOptions) -> Job:
        """Return the transcription of a sound, float32 [samples] at 16 kHz.

        Raises:
            RequestError: the model does not support an option.
        """
