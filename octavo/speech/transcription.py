"""Transcription of sounds: questions for the engine, in which order, and their answers.

Nothing here computes a model. A `Job` says what to ask; `run` asks an asynchronous engine, and
`run_all` an engine that answers many questions in one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

from octavo.errors import RequestError
from octavo.media.audio import SAMPLE_RATE
from octavo.outputs import RequestOutput
from octavo.speech.interface import WINDOWS_AT_ONCE, Job, Question, Steps
from octavo.speech.segments import Decoded, Transcript
from octavo.speech.windows import Window
from octavo.system.offload import offload

T = TypeVar("T")

TIMED_FORMATS = ("srt", "vtt", "verbose_json")
"""Forms of a transcript that have times."""
# Microseconds in which the features of a window are computed.
_FEATURES_MICROSECONDS = 10_000


async def run(
    transcription: Job,
    generate: Callable[[Question], Awaitable[RequestOutput]],
    feature_turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ask_turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
) -> AsyncGenerator[str, None]:
    """Ask for all windows, some at a time; yield the text of each, in order.

    Args:
        transcription: what to ask; it has the transcript in the end.
        generate: asks the engine.
        feature_turn: returns the context in which a window's features are computed; it may wait.
        ask_turn: the same for a request for the engine.
    """

    async def drive(steps: Steps[T]) -> T:
        try:
            ask = next(steps)
            while True:
                async with ask_turn():
                    answer = await generate(ask)
                ask = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    async def features(window: Window) -> Any:
        async with feature_turn():
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
    finish: Callable[[int, Transcript], object] = lambda number, transcript: None,
) -> list[Transcript]:
    """Ask for all windows of several sounds; return the transcripts.

    If a sound cannot be read, those that have begun are finished before the error is raised.

    Args:
        transcriptions: the jobs; the next one begins when the sounds before it leave room.
        generate: returns the answers to requests.
        note: called with the seconds of sound that are done since the last call.
        finish: called with the number and the transcript of each sound when it is complete.

    Raises:
        RequestError: a sound cannot be read, or a request has failed.
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
        while not failures:
            try:
                job = next(coming, None)
            except RequestError as error:
                failures.append(error)
                return
            if job is None:
                return
            queue = _Queue(job, len(results))
            waiting.append(queue)
            results.append(None)
            yield queue

    coming = iter(transcriptions)
    failures: list[RequestError] = []
    while True:
        part: list[tuple[_Queue, Window]] = []
        for queue in queues():
            try:
                windows = queue.take(WINDOWS_AT_ONCE - len(part))
            except RequestError as error:
                failures.append(error)
                waiting.remove(queue)
                continue
            part += [(queue, window) for window in windows]
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
                transcript = results[queue.number] = queue.job.transcript()
                waiting.remove(queue)
                finish(queue.number, transcript)
        if not part:
            if failures:
                raise failures[0]
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
        while not self._windows and self.job.sound.proceed():
            self._windows = [*self.job.windows]
        self.ended = not self._windows
        count = min(most, self.job.windows_at_once)
        taken, self._windows = self._windows[:count], self._windows[count:]
        return taken

    def advance(self) -> float:
        """Return the seconds of sound that are done since the last call."""
        before, self._done = self._done, self.job.sound.seconds
        if self._windows:
            self._done = self._windows[0].begin / SAMPLE_RATE
        return max(0.0, self._done - before)
