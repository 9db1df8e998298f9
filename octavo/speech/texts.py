"""Models that answer a window of a sound with its text alone: Moonshine, Voxtral and Qwen3-ASR."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from octavo.checkpoints.base import Checkpoint
from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError, RequestError, UnsupportedError
from octavo.media.audio import SAMPLE_RATE
from octavo.models.blocks.wave import MIN_SAMPLES
from octavo.models.spec import ModelSpec
from octavo.multimodal.processors.sounds import (
    LogMelProcessor,
    read_feature_settings,
    read_sound_processor,
)
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.speech.interface import (
    WINDOWS_AT_ONCE,
    Job,
    SpeechToText,
    Steps,
    TranscriptionOptions,
    tokens_of,
)
from octavo.speech.joins import join
from octavo.speech.languages import NAMES, find_language
from octavo.speech.segments import TEMPERATURES, Decoded, Segment, Transcript
from octavo.speech.windows import Samples, SplitSound, Window
from octavo.text.tokenizer import Tokenizer


class TextModel(SpeechToText):
    """Speech model whose answers have no timestamps: each window is one segment."""

    seconds: int
    """Longest window."""
    takes_context = False
    """True if a text may show names and style (the option `prompt`)."""

    @property
    def window_nbytes(self) -> int:
        """Implement `SpeechToText`: samples, or features with no more numbers."""
        return 4 * self.seconds * SAMPLE_RATE

    @abstractmethod
    def read(self, samples: Samples) -> Any:
        """Return what the model reads of a window's samples."""

    @abstractmethod
    def prompt(self, features: Any, language: str, context: str) -> dict[str, Any]:
        """Return the engine's prompt for a window.

        Args:
            features: what the model reads of it.
            language: code of the language; "": none was given.
            context: text that shows names and style; "": none was given.

        Raises:
            RequestError: the context has tokens of the prompt's form.
        """

    @abstractmethod
    def max_tokens(self, prompt: dict[str, Any], seconds: float) -> int:
        """Return the most tokens of the answer to a window of this length."""

    def split(self, tokens: list[int], text: str) -> tuple[str, str]:
        """Return the code of the language that an answer tells, "" if it tells none, and its text.

        Args:
            tokens: the answer.
            text: text of the answer.
        """
        return "", text

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
            "prompt": "" if model.takes_context else options.prompt.strip(),
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
        self._context = options.prompt.strip()
        if self._context:
            model.prompt(None, self.language, self._context)  # raises the error of a wrong one
        self._languages: dict[int, str] = {}
        """Code of the language that the answer for a window tells, by the window's begin."""
        self._text = ""
        """Text of the windows that were added."""
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
        prompt = model.prompt(features, self.language or "", self._context)
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
            language, text = model.split(tokens, answer.text)
            self._languages[window.begin] = language
            decoded = Decoded(tokens, mean, 0.0, temperature, text.strip())
            if decoded.is_good:
                break
        return decoded

    def add(self, window: Window, decoded: Decoded) -> str:
        """Implement `Job`."""
        if not decoded.text:
            return ""
        begin, end = window.begin / SAMPLE_RATE, window.end / SAMPLE_RATE
        text = join(self._text, decoded.text)
        self._text += text
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
        seconds = self.sound.seconds
        told = (name for _, name in sorted(self._languages.items()) if name)
        language = self.language or next(told, "")
        return Transcript("transcribe", language, seconds, self._text, self._segments)


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
        settings = read_feature_settings(checkpoint) or ConfigJson({}, "preprocessor_config.json")
        settings.refuse("do_normalize", False, "samples are read as they are")
        settings.refuse("sampling_rate", SAMPLE_RATE, "only this rate is supported")
        return cls(max_model_len)

    def read(self, samples: Samples) -> Samples:
        """Implement `TextModel`."""
        least = MIN_SAMPLES - len(samples)
        return np.pad(samples, (0, max(0, least)))[:, None]

    def prompt(self, features: Samples, language: str, context: str) -> dict[str, Any]:
        """Implement `TextModel`; the model knows one language."""
        return {"encoder_prompt": {"input_features": features}}

    def max_tokens(self, prompt: dict[str, Any], seconds: float) -> int:
        """Implement `TextModel`."""
        return min(self._max_model_len - 1, 1 + round(self._TOKENS_PER_SECOND * seconds))


class PromptedModel(TextModel):
    """Decoder that reads the sound in a prompt.

    Args:
        processor: the model's processor of sounds.
        find: returns the id of a special token.
        encode: returns the tokens of a text.
        decode: returns the text of tokens, without special ones.
        max_model_len: most tokens of a prompt and its answer.

    Raises:
        ModelError: a special token is missing.
    """

    _NAMES: tuple[str, ...]
    """Special tokens of the prompt."""
    _MAX_TOKENS = 500

    def __init__(
        self,
        processor: LogMelProcessor,
        find: Callable[[str], int | None],
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        max_model_len: int,
    ) -> None:
        self._processor, self._encode, self._decode = processor, encode, decode
        self._max_model_len = max_model_len
        self.seconds = min(processor.features.chunk_length, processor.max_seconds)
        self._tokens: list[int] = []
        for name in self._NAMES:
            token = find(name)
            if token is None:
                raise ModelError(
                    f"The tokenizer lacks the token {name}, which {type(self).__name__} needs."
                )
            self._tokens.append(token)

    @classmethod
    def open(cls, checkpoint: Checkpoint, tokenizer: Tokenizer, max_model_len: int) -> Self:
        """Return the model of a folder.

        Raises:
            ModelError: a file of the model, or a special token, is missing or wrong.
        """
        processor = read_sound_processor(checkpoint)
        assert isinstance(processor, LogMelProcessor)

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        def decode(ids: list[int]) -> str:
            return tokenizer.decode(ids, skip_special_tokens=True)

        return cls(processor, tokenizer.token_to_id, encode, decode, max_model_len)

    def read(self, samples: Samples) -> Any:
        """Implement `TextModel`."""
        return self._processor.process(samples)

    def max_tokens(self, prompt: dict[str, Any], seconds: float) -> int:
        """Implement `TextModel`."""
        (item,) = prompt["multi_modal_data"]["audio"]
        given: int = len(prompt["prompt_token_ids"]) + item.num_embeds - 1
        return max(1, min(self._MAX_TOKENS, self._max_model_len - given))


class Voxtral(PromptedModel):
    """Voxtral (arXiv:2507.13264), with the prompt of mistral-common's transcriptions."""

    _NAMES = ("<s>", "[INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[/INST]", "[TRANSCRIBE]")

    def prompt(self, features: Any, language: str, context: str) -> dict[str, Any]:
        """Implement `TextModel`."""
        *begin, end = self._tokens
        named = self._encode(f"lang:{language}") if language else []
        ids = [*begin, *named, end]
        return {"prompt_token_ids": ids, "multi_modal_data": {"audio": [features]}}


class Qwen3ASR(PromptedModel):
    """Qwen3-ASR, with the prompt of its authors' package, which vLLM has, too.

    The answer tells the language ("language German<asr_text>Guten Tag") unless the prompt names it.
    """

    _NAMES = (
        *("<|im_start|>", "<|im_end|>"),
        *("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
        "<asr_text>",
    )
    takes_context = True

    def prompt(self, features: Any, language: str, context: str) -> dict[str, Any]:
        """Implement `TextModel`."""
        begin, end, *sound, tag = self._tokens
        ids: list[int] = []
        if context:
            given = self._encode(f"system\n{context}")
            for name, token in zip(self._NAMES, self._tokens, strict=True):
                if token in given:
                    raise RequestError(
                        f"prompt contains {name}, a special token of this model; leave it out.",
                        "prompt",
                    )
            ids += [begin, *given, end, *self._encode("\n")]
        ids += [begin, *self._encode("user\n"), *sound, end, *self._encode("\n")]
        ids += [begin, *self._encode("assistant\n")]
        if language:
            ids += [*self._encode(f"language {NAMES[language].title()}"), tag]
        return {"prompt_token_ids": ids, "multi_modal_data": {"audio": [features]}}

    def split(self, tokens: list[int], text: str) -> tuple[str, str]:
        """Implement `TextModel`; a sound without speech has the language None."""
        tag = self._tokens[-1]
        if tag not in tokens:
            return "", text
        at = len(tokens) - 1 - tokens[::-1].index(tag)
        name = self._decode(tokens[:at]).strip().removeprefix("language ")
        try:
            language = find_language(name, NAMES)
        except RequestError:
            language = ""
        return language, self._decode(tokens[at + 1 :])


_MODELS: dict[str, type[Moonshine] | type[PromptedModel]] = {
    "MoonshineForConditionalGeneration": Moonshine,
    "Qwen3ASRForConditionalGeneration": Qwen3ASR,
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
