"""Whisper's part of a transcription: questions for the engine, and the text of their answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from octavo.messages import ALIGNMENT, AlignmentSpec
from octavo.outputs import Logprob, RequestOutput
from octavo.sampling.logits_processors.whisper import KEY, WhisperRules
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.speech.alignment import ROWS_PER_SECOND, time_words
from octavo.speech.interface import (
    WINDOWS_AT_ONCE,
    Job,
    SpeechToText,
    Steps,
    TranscriptionOptions,
    tokens_of,
)
from octavo.speech.joins import join
from octavo.speech.model import SpeechModel
from octavo.speech.segments import (
    TEMPERATURES,
    Decoded,
    Segment,
    Transcript,
    make_segments,
)
from octavo.speech.windows import Samples, SplitSound, Window

# Candidates among which the token of silence is looked for. If it is not among them, its
# probability is small.
_CANDIDATES = 5
# Above this temperature, a text is no context of the next window, as in OpenAI's Whisper.
_MAX_CONTEXT_TEMPERATURE = 0.5


@dataclass(frozen=True)
class Whisper(SpeechToText):
    """Whisper, or a model that is used in the same way."""

    model: SpeechModel

    @property
    def window_nbytes(self) -> int:
        """Implement `SpeechToText`."""
        return self.model.features.nbytes

    @property
    def alignment_nbytes(self) -> int:
        """Implement `SpeechToText`."""
        rows = ROWS_PER_SECOND * self.model.features.chunk_length
        return 4 * self.model.max_tokens * rows

    def start(self, samples: Samples | Iterator[Samples], options: TranscriptionOptions) -> Job:
        """Implement `SpeechToText`."""
        features = self.model.features
        sound = SplitSound(samples, features.sampling_rate, features.chunk_length)
        return Transcription(self.model, sound, options)


@dataclass(frozen=True)
class Ask:
    """Request for the engine: one answer to one window."""

    features: Samples
    """float32 [frames, mel bands]"""
    prompt_token_ids: list[int]
    params: SamplingParams

    @property
    def prompt(self) -> dict[str, Any]:
        """The engine's prompt."""
        return {
            "encoder_prompt": {"input_features": self.features},
            "decoder_prompt": {"prompt_token_ids": self.prompt_token_ids},
        }


class Transcription(Job):
    """Request for a sound, for Whisper.

    Args:
        model: the model.
        sound: the sound.
        options: the options.

    Raises:
        RequestError: the model does not know the language or the task.
    """

    def __init__(
        self, model: SpeechModel, sound: SplitSound, options: TranscriptionOptions
    ) -> None:
        super().__init__(sound)
        self._model, self._options = model, options
        self.language = model.tokens.language_code(options.language, options.task)
        """Code of the language; None until `detect` has found it."""
        text = options.prompt.strip()
        self._previous = model.encode(" " + text) if text else []
        self._text = ""
        """Text of the windows that were added."""
        self._segments: list[Segment] = []
        self._params: dict[tuple[float, int, int | None], SamplingParams] = {}
        """Parameters by temperature, most tokens, and candidates at each token of the prompt."""

    @property
    def windows_at_once(self) -> int:
        """Number of windows that may be computed side by side."""
        return 1 if self._options.condition_on_previous_text else WINDOWS_AT_ONCE

    def features(self, window: Window) -> Samples:
        """Return the features of a window, float32 [frames, mel bands]."""
        return self._model.compute(self.sound.cut(window))

    def detect(self, features: Samples) -> Steps[None]:
        """Find the language of a window, which becomes that of the whole sound."""
        tokens = self._model.tokens
        output = yield Ask(
            features,
            [tokens.start],
            SamplingParams(
                temperature=0.0,
                max_tokens=1,
                allowed_token_ids=sorted(tokens.languages.values()),
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
        )
        (found,) = tokens_of(output)
        self.language = next(code for code, token in tokens.languages.items() if token == found)

    def decode(self, window: Window, features: Samples) -> Steps[Decoded]:
        """Find the text of a window, at the first temperature with a good one, or at the last."""
        given = self._options.temperature
        for temperature in TEMPERATURES if given == 0.0 else (given,):
            output = yield self._ask(features, temperature)
            decoded = self._decoded(output, temperature)
            if decoded.is_good:
                break
        if self._options.words and decoded.text.strip() and not decoded.is_silence:
            decoded = yield from self._time_words(window, features, decoded)
        return decoded

    def _time_words(self, window: Window, features: Samples, decoded: Decoded) -> Steps[Decoded]:
        """Find the times of the words of a window."""
        model, options = self._model, self._options
        tokens = [token for token in decoded.tokens if token < model.tokens.end]
        start = model.tokens.prompt(self.language, options.task, False)
        seconds = (window.end - window.begin) / model.features.sampling_rate
        rows = len(features) // 2
        num_rows = min(rows, max(1, round(seconds * ROWS_PER_SECOND)))
        spec = AlignmentSpec(model.alignment_heads, num_rows)
        output = yield Ask(
            features,
            [*start, *tokens, model.tokens.end],
            SamplingParams(
                temperature=0.0,
                max_tokens=1,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={ALIGNMENT: msgspec.to_builtins(spec)},
            ),
        )
        tokens_of(output)
        assert output.pooled is not None
        weights = np.frombuffer(output.pooled, np.float32).reshape(-1, num_rows)
        words = time_words(weights[len(start) - 1 : -1], tokens, model.decode, self.language)
        return replace(decoded, words=words)

    def add(self, window: Window, decoded: Decoded) -> str:
        """Add the answer for the next window; return the text that it adds."""
        if decoded.is_silence:
            return ""
        rate, text = self._model.features.sampling_rate, join(self._text, decoded.text)
        if self._options.condition_on_previous_text:
            if decoded.temperature > _MAX_CONTEXT_TEMPERATURE:  # the text may be wrong
                self._previous = []
            else:
                end = self._model.tokens.end
                self._previous += [token for token in decoded.tokens if token < end]
        self._text += text
        segments = make_segments(
            decoded,
            self._model.tokens,
            self._model.decode,
            window.begin / rate,
            (window.end - window.begin) / rate,
            len(self._segments),
        )
        if segments:  # their texts make up the whole, with the spaces that `join` adds and drops
            if text[:1].isspace() and not decoded.text[:1].isspace():
                segments[0].text = f" {segments[0].text}"
            segments[-1].text = segments[-1].text.rstrip()
        self._segments += segments
        return text

    def transcript(self) -> Transcript:
        """Return the transcript of the windows that were added."""
        return Transcript(
            self._options.task,
            self.language or "en",
            self.sound.seconds,
            self._text,
            self._segments,
        )

    def _ask(self, features: Samples, temperature: float) -> Ask:
        model, options = self._model, self._options
        half = model.max_tokens // 2
        prompt = model.tokens.prompt(
            self.language, options.task, options.timestamps, self._previous, half
        )
        max_tokens = min(half, model.max_tokens - len(prompt))
        num_of_prompt = None if prompt[-1] == model.tokens.start else _CANDIDATES
        kind = temperature, max_tokens, num_of_prompt
        if (params := self._params.get(kind)) is None:
            rules = WhisperRules(
                end=model.tokens.end,
                suppress=list(model.suppress),
                begin_suppress=list(model.begin_suppress),
                first_timestamp=model.tokens.first_timestamp if options.timestamps else None,
                max_initial=model.max_initial,
            )
            params = self._params[kind] = SamplingParams(
                temperature=temperature,
                max_tokens=max_tokens,
                seed=options.seed,
                logprobs=_CANDIDATES,
                prompt_logprobs=num_of_prompt,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={KEY: msgspec.to_builtins(rules)},
            )
        return Ask(features, prompt, params)

    def _decoded(self, output: RequestOutput, temperature: float) -> Decoded:
        special, answer = self._model.tokens, output.outputs[0]
        all_tokens, logprobs = tokens_of(output), answer.logprobs or ()
        tokens = [token for token in all_tokens if token != special.end]
        total = sum(row[token].logprob for row, token in zip(logprobs, all_tokens, strict=True))
        # The position after the start is the one at which the model tells silence.
        prompt = output.prompt_token_ids or []
        after_start = len(prompt) - prompt[::-1].index(special.start)
        rows = [*(output.prompt_logprobs or [None] * len(prompt)), *logprobs]
        row: dict[int, Logprob] = (rows[after_start] if after_start < len(rows) else None) or {}
        silence = row.get(special.no_speech)
        return Decoded(
            tokens,
            total / len(all_tokens) if all_tokens else 0.0,
            0.0 if silence is None else math.exp(silence.logprob),
            temperature,
            self._model.decode([token for token in tokens if token < special.end]),
        )
