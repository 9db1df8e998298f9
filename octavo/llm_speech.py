"""Offline transcription: `LLM.transcribe`."""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError, reason_of
from octavo.frontend.llm_engine import LLMEngine
from octavo.frontend.prompts import Prompt
from octavo.media.audio import SAMPLE_RATE, AudioParts, Samples
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.speech.interface import Job, Question, SpeechToText, TranscriptionOptions
from octavo.speech.registry import open_speech_model
from octavo.speech.segments import Transcript
from octavo.speech.tokens import Task
from octavo.speech.transcription import run_all
from octavo.system.limited_process import Buffer

# Samples of a part of a sound that is read, 8 minutes; as many windows as are computed at once.
_PART_SAMPLES = 480 * SAMPLE_RATE

Sound: TypeAlias = str | Path | bytes | NDArray[np.float32]


class SpeechMethods(ABC):
    """Methods of `LLM` for models that write what is said."""

    llm_engine: LLMEngine

    @abstractmethod
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Any = True,
    ) -> list[RequestOutput]:
        """Generate an answer to each prompt."""

    @cached_property
    def _speech_model(self) -> SpeechToText:
        engine = self.llm_engine
        return open_speech_model(
            engine.checkpoint, engine.spec, engine.tokenizer, engine.memory_plan.max_model_len
        )

    def transcribe(
        self,
        sounds: Sound | Sequence[Sound],
        *,
        language: str | None = None,
        task: Task = "transcribe",
        prompt: str = "",
        temperature: float = 0.0,
        timestamps: bool = True,
        word_timestamps: bool = False,
        seed: int = 0,
        condition_on_previous_text: bool = False,
        use_tqdm: bool = False,
        on_transcript: Callable[[int, Transcript], object] = lambda number, transcript: None,
    ) -> list[Transcript]:
        """Write what is said in each sound; return the transcripts in the order of the sounds.

        A sound longer than a window of the model (30 s) is divided where it is quiet. Windows are
        computed side by side. Files are read in parts of 8 minutes, so that a long one needs little
        memory.

        Args:
            sounds: one sound or several: the name of a file, a file's bytes (as for
                `AudioReader.read`), or samples at 16 kHz, float32 [samples].
            language: code or English name of the language that is spoken; None: it is detected in
                the first window.
            task: "transcribe", or "translate" for a translation to English.
            prompt: text before the sound, which shows names and style.
            temperature: temperature of sampling; 0: greedy, and higher ones in turn for a window
                whose text repeats itself or is improbable.
            timestamps: True for segments with times; False: each window is one segment.
            word_timestamps: True for the times of words, `Segment.words`; each window takes one
                more request.
            seed: seed of sampling.
            condition_on_previous_text: True if each window continues the text of the windows
                before, which takes longer: the windows of a sound are computed in turn.
            use_tqdm: True for a progress bar of the seconds of sound.
            on_transcript: called with the number of each sound and its transcript when it is
                complete, so that the error of another sound does not lose it.

        Raises:
            RequestError: the model does not hear, or does not know the language; a sound cannot be
                read, or a request fails.
            ModelError: a file of the model is missing or wrong.
        """
        model = self._speech_model
        options = TranscriptionOptions(
            task=task,
            language=language,
            prompt=prompt,
            temperature=temperature,
            timestamps=timestamps,
            seed=seed,
            words=word_timestamps,
            condition_on_previous_text=condition_on_previous_text,
        )
        given = [sounds] if isinstance(sounds, str | Path | bytes | np.ndarray) else list(sounds)
        parts = AudioParts()
        bar = _Bar() if use_tqdm else None

        def jobs() -> Iterator[Job]:
            for index, sound in enumerate(given):
                seconds, samples = _open(parts, sound, index)
                if bar is not None:
                    bar.expect(seconds)
                yield model.start(samples, options)

        def generate(asks: list[Question]) -> list[RequestOutput]:
            prompts, params = [ask.prompt for ask in asks], [ask.params for ask in asks]
            return self.generate(prompts, params, use_tqdm=False)

        try:
            note = (lambda _: None) if bar is None else bar.advance
            return run_all(jobs(), generate, note, on_transcript)
        finally:
            parts.close()
            if bar is not None:
                bar.close()


class _Bar:
    """Progress bar of the seconds of sound; the total grows when the next file is opened."""

    def __init__(self) -> None:
        from tqdm import tqdm  # slow to import, and many programs show no bar

        self._bar: Any = tqdm(total=0, desc="Transcribed", unit="s")
        self._seconds = 0.0

    def expect(self, seconds: float) -> None:
        """Add the seconds of a sound to the total."""
        self._bar.total = round(self._bar.total + seconds)
        self._bar.refresh()

    def advance(self, seconds: float) -> None:
        """Show that more seconds are done."""
        self._seconds += seconds
        self._bar.total = max(self._bar.total, round(self._seconds))
        self._bar.update(round(self._seconds) - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def _open(parts: AudioParts, sound: Sound, index: int) -> tuple[float, Iterator[Samples]]:
    """Return a sound's seconds, 0 if unknown, and its parts; an error names the sound."""
    where = f"sounds[{index}]"
    if isinstance(sound, np.ndarray):
        if sound.ndim != 1 or sound.dtype != np.float32 or not np.isfinite(sound).all():
            raise RequestError(
                f"{where} is an array {sound.dtype} {list(sound.shape)}; give finite samples at "
                "16 kHz, float32 [samples].",
                where,
            )
        if not len(sound):
            raise RequestError(f"{where} has no samples; give a sound that is not empty.", where)
        cuts = range(0, len(sound) + 1, _PART_SAMPLES)
        return len(sound) / SAMPLE_RATE, (sound[i : i + _PART_SAMPLES] for i in cuts)
    name = where
    if isinstance(sound, bytes):
        data: Buffer = sound
    elif not isinstance(sound, str | os.PathLike):
        raise RequestError(
            f"{where} is a {type(sound).__name__}; give a file's name, its bytes, or samples at 16 "
            "kHz, float32 [samples].",
            where,
        )
    else:
        name = str(sound)
        try:
            data = _content(Path(sound))
        except OSError as error:
            raise RequestError(f"{where}: {sound!s}: {reason_of(error)}.", where) from None

    def named() -> Iterator[Samples]:
        with _naming(name):
            yield from samples

    with _naming(name):
        seconds, samples = parts.open(data, _PART_SAMPLES, where)
    return seconds, named()


def _content(path: Path) -> Buffer:
    """Return a file's content, which the system reads when it is needed."""
    with path.open("rb") as file:
        # A pipe, or an empty file, cannot be mapped.
        if not (path.is_file() and os.fstat(file.fileno()).st_size):
            return file.read()
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Put the name of a sound before the message of an error."""
    try:
        yield
    except RequestError as error:
        error.message = f"{name}: {error.message}"
        error.args = (error.message,)
        raise
