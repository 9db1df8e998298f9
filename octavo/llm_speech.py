"""Offline transcription: `LLM.transcribe`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError, reason_of
from octavo.frontend.input_processor import Prompt
from octavo.frontend.llm_engine import LLMEngine
from octavo.media.audio import AudioReader, Samples
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.speech.interface import Question
from octavo.speech.registry import open_speech_model
from octavo.speech.segments import Transcript
from octavo.speech.tokens import Task
from octavo.speech.transcription import TranscriptionOptions, run_all

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
    ) -> list[Transcript]:
        """Write what is said in each sound; return the transcripts in the order of the sounds.

        A sound longer than a window of the model (30 s) is divided where it is quiet. All windows
        are computed side by side.

        Args:
            sounds: one sound or several: the name of a file, a file's bytes (as for
                `AudioReader.submit`), or samples at 16 kHz, float32 [samples].
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
            use_tqdm: True for progress bars.

        Raises:
            RequestError: the model does not hear, or does not know the language; a sound cannot be
                read, or a request fails.
            ModelError: a file of the model is missing or wrong.
        """
        model = open_speech_model(
            self.llm_engine.checkpoint,
            self.llm_engine.spec,
            self.llm_engine.tokenizer,
            self.llm_engine.memory_plan.max_model_len,
        )
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
        reader = AudioReader()
        try:
            read = [_read(reader, sound, i) for i, sound in enumerate(given)]
            samples = [_wait(one, given[i], i) for i, one in enumerate(read)]
        finally:
            reader.close()
        jobs = [model.start(one, options) for one in samples]

        def generate(asks: list[Question]) -> list[RequestOutput]:
            prompts, params = [ask.prompt for ask in asks], [ask.params for ask in asks]
            return self.generate(prompts, params, use_tqdm=use_tqdm)

        return run_all(jobs, generate)


def _wait(read: Samples | Future[Samples], sound: Sound, index: int) -> Samples:
    """Return a sound's samples; an error names the sound."""
    if isinstance(read, np.ndarray):
        return read
    try:
        return read.result()
    except RequestError as error:
        name = sound if isinstance(sound, str | Path) else f"sounds[{index}]"
        error.message = f"{name}: {error.message}"
        error.args = (error.message,)
        raise


def _read(reader: AudioReader, sound: Sound, index: int) -> Samples | Future[Samples]:
    """Return a sound's samples, or the future of them."""
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
        return sound
    if isinstance(sound, str | Path):
        try:
            sound = Path(sound).read_bytes()
        except OSError as error:
            raise RequestError(f"{where}: {sound!s}: {reason_of(error)}.", where) from None
    return reader.submit(sound, where)
