"""POST /v1/audio/transcriptions and /v1/audio/translations, as in OpenAI's API."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.media.audio import Samples
from octavo.outputs import RequestOutput
from octavo.server.abilities import check_hears
from octavo.server.audio_schema import AudioBody, read_fields
from octavo.server.call import Call
from octavo.server.generation import EventStream
from octavo.server.load_report import add_load_report
from octavo.server.middleware import context_of
from octavo.server.pooling import Counts
from octavo.server.state import state_of
from octavo.server.stories import Story
from octavo.server.upload import MAX_SOUND_BYTES, MemoryFile, check_origin, receive_form
from octavo.speech.formats import MEDIA_TYPES, plain, write
from octavo.speech.interface import WINDOWS_AT_ONCE, Job, Question, TranscriptionOptions
from octavo.speech.segments import Transcript
from octavo.speech.tokens import Task
from octavo.speech.transcription import TIMED_FORMATS, run
from octavo.system.offload import offload

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

# Of the features of a window: here, in the request for the engine, and in transit.
_FEATURE_COPIES = 3


async def create_transcription(request: Request) -> Response:
    """Return what is said in a sound file of a form (multipart/form-data)."""
    return await _respond(request, "transcribe")


async def create_translation(request: Request) -> Response:
    """Return what is said in a sound file, in English."""
    return await _respond(request, "translate")


async def _respond(request: Request, task: Task) -> Response:
    check_origin(request)
    state = state_of(request)
    engine = await state.get_engine()
    check_hears(engine.spec)
    sound = MemoryFile(request, MAX_SOUND_BYTES)
    _, fields = await receive_form(request, sound)
    context_of(request).received = time.monotonic()
    body, unknown = read_fields(fields)
    if unknown and state.config.strict_fields:
        raise RequestError(
            f"Unknown fields: {', '.join(unknown)}; leave them out (this server runs with "
            "--strict-fields).",
            unknown[0],
            "unknown_parameter",
        )
    context_of(request).ignored_fields = unknown
    await state.find_model(request, body.model, body.deadline_ms)

    async def read() -> Samples:
        try:
            return await state.hearing.read(sound.data, answer.share)
        finally:
            sound.forget()

    answer = TranscriptionCall(request, body, task, read)
    if body.stream:
        return EventStream(state, answer.events(engine), answer.deadline)
    response = await state.run(request.receive, answer.whole(engine), answer.deadline)
    add_load_report(request, response, engine.metrics)
    return response


class TranscriptionCall(Call):
    """Transcription or translation that is being made.

    Args:
        request: the request.
        body: its fields.
        task: what it asks for.
        read: returns the samples at 16 kHz.
    """

    def __init__(
        self, request: Request, body: AudioBody, task: Task, read: Callable[[], Awaitable[Samples]]
    ) -> None:
        super().__init__(request, body, "trsc")
        self._body, self._read = body, read
        self._options = TranscriptionOptions(
            task,
            body.language,
            body.prompt,
            body.temperature,
            body.response_format in TIMED_FORMATS,
            body.seed,
            body.has_times_of("word"),
        )
        self.share = self.options(0, None).share
        """Sender of the sound, by which turns are given."""
        self._transcription: Job | None = None
        self._counts = Counts()

    async def whole(self, engine: AsyncLLM) -> Response:
        """Return the answer in the form that the request asks for."""
        async with aclosing(self.texts(engine)) as texts:
            async for _ in texts:
                pass
        form = self._body.response_format
        segments, words = self._body.has_times_of("segment"), self._body.has_times_of("word")
        text = write(self.transcript, form, segments=segments, words=words)
        return Response(text.encode("utf-8", "replace"), media_type=MEDIA_TYPES[form])

    async def events(self, engine: AsyncLLM) -> AsyncGenerator[list[bytes], None]:
        """Yield OpenAI's events: the text of each part of the sound, and the whole text."""
        async with aclosing(self.texts(engine)) as texts:
            async for text in texts:
                if text:
                    yield [_event({"type": "transcript.text.delta", "delta": text})]
        yield [_event({"type": "transcript.text.done", **plain(self.transcript)})]

    @property
    def transcript(self) -> Transcript:
        """The transcript, after `texts`."""
        assert self._transcription is not None
        return self._transcription.transcript()

    async def texts(self, engine: AsyncLLM) -> AsyncGenerator[str, None]:
        """Yield the text of each part of the sound."""
        story = self.begin_story(self._counts, 1, time.monotonic())
        hearing = self.state.hearing
        with (
            nullcontext() if story is None else story.at_work(),
            self.admit(1, "file"),
            nullcontext() if self.context.background else hearing.requests.be_present(self.share),
        ):
            model = await hearing.model(engine)
            samples = await self._read()
            nbytes = samples.nbytes + _FEATURE_COPIES * WINDOWS_AT_ONCE * model.window_nbytes
            if self._options.words:
                nbytes += WINDOWS_AT_ONCE * model.alignment_nbytes
            with engine.request_memory.reserve(
                nbytes, self.tenant, background=self.context.background
            ):
                self._transcription = transcription = await offload(
                    len(samples) // 500, model.start, samples, self._options
                )
                if story is not None:
                    story.mark()
                windows = run(
                    transcription,
                    self._asker(engine, story),
                    lambda: hearing.feature_turns.hold(self.share),
                    lambda: hearing.requests.hold(self.share),
                )
                async with aclosing(windows) as texts:
                    async for text in texts:
                        yield text

    def _asker(
        self, engine: AsyncLLM, story: Story | None
    ) -> Callable[[Question], Awaitable[RequestOutput]]:
        """Return the function that asks the engine; `story` gets the stages of each request."""
        headers, asked = self.trace_headers(engine), itertools.count()

        async def generate(ask: Question) -> RequestOutput:
            index, number = next(asked), self.state.next_id()
            result: RequestOutput | None = None
            stream = engine.serve(
                ask.prompt,
                ask.params,
                f"{self.id}-{index}-{number}",
                self.options(index, headers),
                add_special_tokens=False,
                stages=None if story is None else story.begin_prompt(number),
            )
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    result = output
            assert result is not None
            counts = self._counts
            counts.prompt_tokens += len(result.prompt_token_ids)
            counts.cached_tokens += result.num_cached_tokens
            counts.completion_tokens += sum(len(output.token_ids) for output in result.outputs)
            self.context.prompt_tokens = counts.prompt_tokens
            self.context.completion_tokens = counts.completion_tokens
            return result

        return generate


def _event(data: dict[str, object]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
