"""Transcription of a sound: windows, requests for the engine, and the transcript of their answers.

Nothing here computes a model. A `Transcription` says what to ask; `run` asks an asynchronous
engine, and `run_all` an engine that answers many requests in one call.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.media.audio import SAMPLE_RATE
from octavo.messages import ALIGNMENT, AlignmentSpec
from octavo.outputs import Logprob, RequestOutput
from octavo.sampling.logits_processors.whisper import KEY, WhisperRules
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.speech.alignment import ROWS_PER_SECOND, time_words
from octavo.speech.interface import Job, Question, Steps
from octavo.speech.model import SpeechModel
from octavo.speech.segments import (
    TEMPERATURES,
    Decoded,
    Segment,
    Transcript,
    make_segments,
)
from octavo.speech.tokens import Task
from octavo.speech.windows import Window
from octavo.system.offload import offload

Samples = NDArray[np.float32]
T = TypeVar("T")

TIMED_FORMATS = ("srt", "vtt", "verbose_json")
"""Forms of a transcript that have times."""
# Candidates among which the token of silence is looked for. If it is not among them, its
# probability is small.
_CANDIDATES = 5
WINDOWS_AT_ONCE = 16
"""Windows of a sound that are computed together, which bounds the memory of their features."""
# Above this temperature, a text is no context of the next window, as in OpenAI's Whisper.
_MAX_CONTEXT_TEMPERATURE = 0.5
# Microseconds in which the features of a window are computed.
_FEATURES_MICROSECONDS = 10_000


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
        samples: the sound, float32 [samples].
        options: the options.
        parts: the rest of the sound, if it is read in parts: each a multiple of `part_unit`, except
            for the last one. `proceed` takes the next one.

    Raises:
        RequestError: the model does not know the language or the task.
    """

    def __init__(
        self,
        model: SpeechModel,
        samples: Samples,
        options: TranscriptionOptions,
        parts: Iterator[Samples] | None = None,
    ) -> None:
        super().__init__(samples, model.features.chunk_length, parts)
        self._model, self._options = model, options
        self.language = model.tokens.language_code(options.language, options.task)
        text = options.prompt.strip()
        self._previous = model.encode(" " + text) if text else []
        self._texts: list[str] = []
        self._segments: list[Segment] = []

    @property
    def windows_at_once(self) -> int:
        """Number of windows that may be computed side by side."""
        return 1 if self._options.condition_on_previous_text else WINDOWS_AT_ONCE

    def features(self, window: Window) -> Samples:
        """Return the features of a window, float32 [frames, mel bands]."""
        return self._model.compute(self.cut(window))

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
        rate, text = self._model.features.sampling_rate, decoded.text
        if not self._texts:
            text = text.lstrip()
        if self._options.condition_on_previous_text:
            if decoded.temperature > _MAX_CONTEXT_TEMPERATURE:  # the text may be wrong
                self._previous = []
            else:
                end = self._model.tokens.end
                self._previous += [token for token in decoded.tokens if token < end]
        self._texts.append(text)
        self._segments += make_segments(
            decoded,
            self._model.tokens,
            self._model.decode,
            window.begin / rate,
            (window.end - window.begin) / rate,
            len(self._segments),
        )
        return text

    def transcript(self) -> Transcript:
        """Return the transcript of the windows that were added."""
        return Transcript(
            self._options.task,
            self.language or "en",
            self.seconds,
            "".join(self._texts).strip(),
            self._segments,
        )

    def _ask(self, features: Samples, temperature: float) -> Ask:
        model, options = self._model, self._options
        half = model.max_tokens // 2
        prompt = model.tokens.prompt(
            self.language, options.task, options.timestamps, self._previous, half
        )
        rules = WhisperRules(
            end=model.tokens.end,
            suppress=list(model.suppress),
            begin_suppress=list(model.begin_suppress),
            first_timestamp=model.tokens.first_timestamp if options.timestamps else None,
            max_initial=model.max_initial,
        )
        params = SamplingParams(
            temperature=temperature,
            max_tokens=min(half, model.max_tokens - len(prompt)),
            seed=options.seed,
            logprobs=_CANDIDATES,
            prompt_logprobs=None if prompt[-1] == model.tokens.start else _CANDIDATES,
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


def tokens_of(output: RequestOutput) -> list[int]:
    """Return the tokens of an answer.

    Raises:
        RequestError: the request has failed.
    """
    answer = output.outputs[0]
    if answer.finish_reason == "error":
        raise RequestError(f"The sound cannot be transcribed: {answer.stop_reason}.")
    return list(answer.token_ids)


async def run(
    transcription: Job, generate: Callable[[Question], Awaitable[RequestOutput]]
) -> AsyncGenerator[str, None]:
    """Ask for all windows, some at a time; yield the text of each, in order.

    Args:
        transcription: what to ask; it has the transcript in the end.
        generate: asks the engine.
    """

    async def drive(steps: Steps[T]) -> T:
        try:
            ask = next(steps)
            while True:
                ask = steps.send(await generate(ask))
        except StopIteration as end:
            result: T = end.value
            return result

    async def features(window: Window) -> Any:
        return await offload(_FEATURES_MICROSECONDS, transcription.features, window)

    async def decode(window: Window) -> Decoded:
        return await drive(transcription.decode(window, await features(window)))

    windows = transcription.windows
    if windows and transcription.language is None:
        await drive(transcription.detect(await features(windows[0])))
    tasks: list[asyncio.Task[Decoded]] = []
    try:
        for i, window in enumerate(windows):
            while len(tasks) < min(len(windows), i + transcription.windows_at_once):
                tasks.append(asyncio.create_task(decode(windows[len(tasks)])))
            yield transcription.add(window, await tasks[i])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_all(
    transcriptions: Iterable[Job],
    generate: Callable[[list[Question]], list[RequestOutput]],
    note: Callable[[float], object] = lambda seconds: None,
) -> list[Transcript]:
    """Ask for all windows of several sounds; return the transcripts.

    Args:
        transcriptions: what to ask; the next one is taken when the sounds before leave room.
        generate: returns the answers to requests.
        note: called with the seconds of sound that are done since the last call.
    """

    def drive(all_steps: list[Steps[T]]) -> list[T]:
        """Run computations side by side."""
        results: dict[int, T] = {}
        answers: dict[int, RequestOutput | None] = dict.fromkeys(range(len(all_steps)))
        while answers:
            asks: dict[int, Question] = {}
            for i, answer in answers.items():
                try:
                    steps = all_steps[i]
                    asks[i] = next(steps) if answer is None else steps.send(answer)
                except StopIteration as end:
                    results[i] = end.value
            outputs = generate(list(asks.values())) if asks else []
            answers = dict(zip(asks, outputs, strict=True))
        return [results[i] for i in range(len(all_steps))]

    waiting: list[_Queue] = []
    results: list[Transcript | None] = []

    def queues() -> Iterator[_Queue]:
        """Yield the sounds that wait, and then new ones."""
        yield from [*waiting]
        for job in coming:
            queue = _Queue(job, len(results))
            waiting.append(queue)
            results.append(None)
            yield queue

    coming = iter(transcriptions)
    while True:
        part: list[tuple[_Queue, Window]] = []
        for queue in queues():
            part += [(queue, window) for window in queue.take(WINDOWS_AT_ONCE - len(part))]
            if len(part) == WINDOWS_AT_ONCE:
                break
        firsts = {queue: window for queue, window in reversed(part) if queue.job.language is None}
        drive([queue.job.detect(queue.job.features(window)) for queue, window in firsts.items()])
        found = drive([queue.job.decode(w, queue.job.features(w)) for queue, w in part])
        for (queue, window), decoded in zip(part, found, strict=True):
            queue.job.add(window, decoded)
        for queue in [*waiting]:
            note(queue.advance())
            if queue.ended:
                results[queue.number] = queue.job.transcript()
                waiting.remove(queue)
        if not part:
            return [transcript for transcript in results if transcript is not None]


class _Queue:
    """Windows of a sound that wait.

    Args:
        job: the sound.
        number: its place among all sounds.
    """

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number = job, number
        self._windows, self._done = [*job.windows], 0.0
        self.ended = False
        """True if the sound has no more windows."""

    def take(self, most: int) -> list[Window]:
        """Return the next windows, whose features must be computed before the next call."""
        while not self._windows and self.job.proceed():
            self._windows = [*self.job.windows]
        self.ended = not self._windows
        count = min(most, self.job.windows_at_once)
        taken, self._windows = self._windows[:count], self._windows[count:]
        return taken

    def advance(self) -> float:
        """Return the seconds of sound that are done since the last call."""
        before, self._done = self._done, self.job.seconds
        if self._windows:
            self._done = self._windows[0].begin / SAMPLE_RATE
        return max(0.0, self._done - before)
