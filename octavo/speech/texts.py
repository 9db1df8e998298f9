"""Models that answer a window of a sound with its text alone: Moonshine and Voxtral."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.checkpoints.base import Checkpoint
from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError, RequestError, UnsupportedError
from octavo.media.audio import SAMPLE_RATE
from octavo.models.blocks.wave import MIN_SAMPLES
from octavo.models.spec import ModelSpec
from octavo.multimodal.processors.sounds import LogMelProcessor, read_sound_processor
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.speech.interface import (
    WINDOWS_AT_ONCE,
    Job,
    SpeechToText,
    Steps,
    TranscriptionOptions,
    tokens_of,
)
from octavo.speech.languages import NAMES, find_language
from octavo.speech.segments import TEMPERATURES, Decoded, Segment, Transcript
from octavo.speech.windows import Samples, SplitSound, Window
from octavo.text.tokenizer import Tokenizer


class TextModel(SpeechToText):
    """Speech model whose answers have no timestamps: each window is one segment."""

    seconds: int
    """Longest window."""

    @property
    def window_nbytes(self) -> int:
        """Implement `SpeechToText`: samples, or features with no more numbers."""
        return 4 * self.seconds * SAMPLE_RATE

    @abstractmethod
    def read(self, samples: Samples) -> Any:
        """Return what the model reads of a window's samples."""

    @abstractmethod
    def prompt(self, features: Any, language: str) -> dict[str, Any]:
        """Return the engine's prompt for a window; the language is "" if none was given."""

    @abstractmethod
    def max_tokens(self, prompt: dict[str, Any], seconds: float) -> int:
        """Return the most tokens of the answer to a window of this length."""

    def start(self, samples: Samples | Iterator[Samples], options: TranscriptionOptions) -> Job:
        """Implement `SpeechToText`."""
        return _TextJob(self, SplitSound(samples, SAMPLE_RATE, self.seconds), options)


@dataclass(frozen=True)
class _Question:
    prompt: dict[str, Any]
    params: SamplingParams


class _TextJob(Job):
    """Transcription by a `TextModel`."""

    def __init__(self, model: TextModel, sound: SplitSound, options: TranscriptionOptions) -> None:
        super().__init__(sound)
        if options.task != "transcribe":
            raise RequestError(
                "This model cannot translate; send the sound to /v1/audio/transcriptions, or use a "
                "multilingual Whisper.",
                "model",
                "unsupported_task",
            )
        given = {
            "prompt": options.prompt.strip(),
            "timestamp_granularities": options.words,
            "condition_on_previous_text": options.condition_on_previous_text,
        }
        for name, value in given.items():
            if value:
                what = "word" if name == "timestamp_granularities" else repr(value)[:40]
                raise UnsupportedError(
                    f"{name}={what} is not supported by this model; leave it out.", name
                )
        self._model, self._options = model, options
        language = options.language
        self.language = "" if language is None else find_language(language, NAMES)
        self._texts: list[str] = []
        self._segments: list[Segment] = []

    @property
    def windows_at_once(self) -> int:
        """Implement `Job`."""
        return WINDOWS_AT_ONCE

    def features(self, window: Window) -> Any:
        """Implement `Job`."""
        return self._model.read(self.sound.cut(window))

    def detect(self, features: Any) -> Steps[None]:
        """Implement `Job`; it is never needed."""
        raise NotImplementedError

    def decode(self, window: Window, features: Any) -> Steps[Decoded]:
        """Implement `Job`, with the temperatures of Whisper."""
        model, given = self._model, self._options.temperature
        prompt = model.prompt(features, self.language or "")
        seconds = (window.end - window.begin) / SAMPLE_RATE
        for temperature in TEMPERATURES if given == 0.0 else (given,):
            params = SamplingParams(
                temperature=temperature,
                max_tokens=model.max_tokens(prompt, seconds),
                seed=self._options.seed,
                logprobs=0,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            output = yield _Question(prompt, params)
            tokens, answer = tokens_of(output), output.outputs[0]
            rows = zip(answer.logprobs or (), tokens, strict=True)
            mean = sum(row[token].logprob for row, token in rows) / max(1, len(tokens))
            decoded = Decoded(tokens, mean, 0.0, temperature, answer.text.strip())
            if decoded.is_good:
                break
        return decoded

    def add(self, window: Window, decoded: Decoded) -> str:
        """Implement `Job`."""
        if not decoded.text:
            return ""
        begin, end = window.begin / SAMPLE_RATE, window.end / SAMPLE_RATE
        text = f" {decoded.text}" if self._texts else decoded.text
        self._texts.append(text)
        self._segments.append(
            Segment(
                id=len(self._segments),
                seek=round(begin * 100),
                start=round(begin, 2),
                end=round(end, 2),
                text=text,
                tokens=list(decoded.tokens),
                temperature=decoded.temperature,
                avg_logprob=decoded.avg_logprob,
                compression_ratio=decoded.compression_ratio,
                no_speech_prob=decoded.no_speech_prob,
            )
        )
        return text

    def transcript(self) -> Transcript:
        """Implement `Job`."""
        seconds, text = self.sound.seconds, "".join(self._texts)
        return Transcript("transcribe", self.language or "", seconds, text, self._segments)


class Moonshine(TextModel):
    """Moonshine (arXiv:2410.15608), which reads samples.

    Args:
        max_model_len: most tokens of an answer, with the one that begins it.
    """

    seconds = 20
    _TOKENS_PER_SECOND = 13
    """Most tokens of a second of speech; an answer with more repeats itself."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len

    @classmethod
    def open(cls, checkpoint: Checkpoint, tokenizer: Tokenizer, max_model_len: int) -> Moonshine:
        """Return the model of a folder.

        Raises:
            ModelError: a file has an unsupported value.
        """
        name = "preprocessor_config.json"
        try:
            found = json.loads(checkpoint.read_text(name) or "{}")
        except ValueError as error:
            raise ModelError(f"{checkpoint.path / name} is not valid JSON: {error}.") from None
        settings = ConfigJson(found if isinstance(found, dict) else {}, name)
        settings.refuse("do_normalize", False, "samples are read as they are")
        settings.refuse("sampling_rate", SAMPLE_RATE, "only this rate is supported")
        return cls(max_model_len)

    def read(self, samples: Samples) -> Samples:
        """Implement `TextModel`."""
        least = MIN_SAMPLES - len(samples)
        return np.pad(samples, (0, max(0, least)))[:, None]

    def prompt(self, features: Samples, language: str) -> dict[str, Any]:
        """Implement `TextModel`; the model knows one language."""
        return {"encoder_prompt": {"input_features": features}}

    def max_tokens(self, prompt: dict[str, Any], seconds: float) -> int:
        """Implement `TextModel`."""
        return min(self._max_model_len - 1, 1 + round(self._TOKENS_PER_SECOND * seconds))


class Voxtral(TextModel):
    """Voxtral (arXiv:2507.13264), with the prompt of mistral-common's transcriptions.

    Args:
        processor: the model's processor of sounds.
        find: returns the id of a special token.
        encode: returns the tokens of a text.
        max_model_len: most tokens of a prompt and its answer.

    Raises:
        ModelError: a special token is missing.
    """

    _MAX_TOKENS = 500

    def __init__(
        self,
        processor: LogMelProcessor,
        find: Callable[[str], int | None],
        encode: Callable[[str], list[int]],
        max_model_len: int,
    ) -> None:
        self._processor, self._encode, self._max_model_len = processor, encode, max_model_len
        self.seconds = processor.features.chunk_length
        tokens: list[int] = []
        for name in ("<s>", "[INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[/INST]", "[TRANSCRIBE]"):
            token = find(name)
            if token is None:
                raise ModelError(f"The tokenizer lacks the token {name}, which Voxtral needs.")
            tokens.append(token)
        self._begin, self._end = tokens[:-1], tokens[-1]

    @classmethod
    def open(cls, checkpoint: Checkpoint, tokenizer: Tokenizer, max_model_len: int) -> Voxtral:
        """Return the model of a folder.

        Raises:
            ModelError: a file of the model, or a special token, is missing or wrong.
        """
        processor = read_sound_processor(checkpoint)
        assert isinstance(processor, LogMelProcessor)

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        return cls(processor, tokenizer.token_to_id, encode, max_model_len)

    def read(self, samples: Samples) -> Any:
        """Implement `TextModel`."""
        return self._processor.process(samples)

    def prompt(self, features: Any, language: str) -> dict[str, Any]:
        """Implement `TextModel`."""
        named = self._encode(f"lang:{language}") if language else []
        ids = [*self._begin, *named, self._end]
        return {"prompt_token_ids": ids, "multi_modal_data": {"audio": [features]}}

    def max_tokens(self, prompt: dict[str, Any], seconds: float) -> int:
        """Implement `TextModel`."""
        (item,) = prompt["multi_modal_data"]["audio"]
        given: int = len(prompt["prompt_token_ids"]) + item.num_embeds - 1
        return max(1, min(self._MAX_TOKENS, self._max_model_len - given))


_MODELS: dict[str, type[Moonshine] | type[Voxtral]] = {
    "MoonshineForConditionalGeneration": Moonshine,
    "VoxtralForConditionalGeneration": Voxtral,
}


def open_text_model(
    checkpoint: Checkpoint, spec: ModelSpec, tokenizer: Tokenizer, max_model_len: int
) -> TextModel | None:
    """Return the model of a folder; None: it is another kind of speech model.

    Raises:
        ModelError: a file of the model is missing or wrong.
    """
    kind = _MODELS.get(spec.architecture)
    return None if kind is None else kind.open(checkpoint, tokenizer, max_model_len)
