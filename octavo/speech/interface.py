"""Interface of speech models: the requests for a window of sound, and their answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from octavo.errors import RequestError
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.speech.segments import Decoded, Transcript
from octavo.speech.tokens import Task
from octavo.speech.windows import Samples, SplitSound, Window

T = TypeVar("T")

WINDOWS_AT_ONCE = 16
"""Windows of a sound that are computed together, which bounds the memory of their features."""


@dataclass(frozen=True)
class TranscriptionOptions:
    """Options of a transcription."""

    task: Task = "transcribe"
    language: str | None = None
    """Code or English name of the language that is spoken; None: it is detected."""
    prompt: str = ""
    """Text before the sound, which shows names and style."""
    temperature: float = 0.0
    """0: temperatures rise while an answer is bad."""
    timestamps: bool = False
    """True for segments between timestamps."""
    seed: int = 0
    """Seed of answers at temperatures above 0."""
    words: bool = False
    """True for the times of words, which one more request for each window computes."""
    condition_on_previous_text: bool = False
    """True if each window continues the text of the windows before, as in OpenAI's Whisper. Then
    the windows are computed one after the other."""


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
        sound: the sound.

    Attributes:
        sound: the sound.
        language: code of the language; "": none was given, and the model needs none. None until
            `detect` has found it.
    """

    language: str | None

    def __init__(self, sound: SplitSound) -> None:
        self.sound = sound

    @property
    def windows(self) -> list[Window]:
        """Parts of the sound in which somebody may be speaking."""
        return self.sound.windows

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
    def start(self, samples: Samples | Iterator[Samples], options: TranscriptionOptions) -> Job:
        """Return the transcription of a sound.

        Args:
            samples: float32 [samples] at 16 kHz, or parts of it; see `SplitSound`.
            options: the options.

        Raises:
            RequestError: the model does not support an option.
        """


def tokens_of(output: RequestOutput) -> list[int]:
    """Return the tokens of an answer.

    Raises:
        RequestError: the request has failed.
    """
    answer = output.outputs[0]
    if answer.finish_reason == "error":
        raise RequestError(f"The sound cannot be transcribed: {answer.stop_reason}.")
    return list(answer.token_ids)
