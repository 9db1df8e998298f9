"""Special tokens of Whisper, and prompts that are made of them.

A. Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision" (arXiv 2212.04356),
figure 1: previous text, start, language, task, and whether there are timestamps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.errors import ModelError, RequestError
from octavo.speech.languages import NAMES, find_language

Task = Literal["transcribe", "translate"]

SECONDS_PER_TIMESTAMP = 0.02
"""Time between two timestamp tokens."""


@dataclass(frozen=True)
class WhisperTokens:
    """Ids of the special tokens."""

    start: int
    """`<|startoftranscript|>`"""
    end: int
    """`<|endoftext|>`; text has smaller ids."""
    previous: int
    """`<|startofprev|>`"""
    no_speech: int
    """`<|nospeech|>`, or its old name `<|nocaptions|>`"""
    no_timestamps: int
    """`<|notimestamps|>`; the token of 0.00 s follows."""
    tasks: Mapping[str, int]
    """`<|transcribe|>` and `<|translate|>`; empty: the model knows English only."""
    languages: Mapping[str, int]
    """Token of each language, by code; empty: the model knows English only."""

    @classmethod
    def read(cls, find: Callable[[str], int | None], is_multilingual: bool) -> WhisperTokens:
        """Read the tokens of a tokenizer.

        Args:
            find: returns the id of a token, None if there is none.
            is_multilingual: False if the model knows English only, though its tokenizer has the
                tokens of languages.

        Raises:
            ModelError: a token is missing.
        """

        def need(*names: str) -> int:
            for name in names:
                if (found := find(f"<|{name}|>")) is not None:
                    return found
            raise ModelError(f"The tokenizer lacks the token <|{names[0]}|>, which Whisper needs.")

        tasks: dict[str, int] = {}
        languages: dict[str, int] = {}
        if is_multilingual:
            tasks = {name: need(name) for name in ("transcribe", "translate")}
            for code in NAMES:
                if (token := find(f"<|{code}|>")) is not None:
                    languages[code] = token
            if not languages:
                raise ModelError("The tokenizer has no token of a language, such as <|en|>.")
        return cls(
            need("startoftranscript"),
            need("endoftext"),
            need("startofprev"),
            need("nospeech", "nocaptions"),
            need("notimestamps"),
            tasks,
            languages,
        )

    @property
    def first_timestamp(self) -> int:
        """Token of 0.00 s."""
        return self.no_timestamps + 1

    def language_code(self, given: str | None, task: Task) -> str | None:
        """Return the code of the language of a request; None: it must be detected.

        Args:
            given: code or name; None: any.
            task: what the request asks for.

        Raises:
            RequestError: the model does not know the language, or the task.
        """
        if self.languages:
            return None if given is None else find_language(given, self.languages)
        if task == "translate":
            raise RequestError(
                "This model knows English only, and cannot translate; use a multilingual one.",
                "model",
                "unsupported_task",
            )
        return "en" if given is None else find_language(given, {"en"})

    def prompt(
        self,
        language: str | None,
        task: Task,
        timestamps: bool,
        previous: Sequence[int] = (),
        max_previous: int = 0,
    ) -> list[int]:
        """Return the first tokens of an answer.

        Args:
            language: code of the language of the sound.
            task: what the answer is.
            timestamps: True for an answer with timestamps.
            previous: text before the sound, of which the end is used.
            max_previous: most tokens of it, with the one that begins it.
        """
        before = [*previous[-(max_previous - 1) :]] if max_previous > 1 else []
        return [
            *([self.previous, *before] if before else []),
            self.start,
            *([self.languages[language]] if self.languages and language is not None else []),
            *([self.tasks[task]] if self.tasks else []),
            *([] if timestamps else [self.no_timestamps]),
        ]

    def seconds(self, token: int) -> float | None:
        """Return the time of a timestamp token; None: it is another token."""
        if token < self.first_timestamp:
            return None
        return (token - self.first_timestamp) * SECONDS_PER_TIMESTAMP
