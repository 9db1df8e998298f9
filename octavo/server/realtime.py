"""GET /v1/realtime: transcription of a stream of sound over a WebSocket.

It is the transcription mode of OpenAI's Realtime API: a client appends sound to a buffer, and each
part that it commits, or that ends with a silence, becomes an item with a transcript.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import time
from collections.abc import Hashable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from starlette.websockets import WebSocket, WebSocketDisconnect

from octavo.errors import DeadlineError, OctavoError, RequestError, UnsupportedError
from octavo.media.audio import Samples
from octavo.server.abilities import check_hears
from octavo.server.audio import TranscriptionCall
from octavo.server.audio_schema import AudioBody
from octavo.server.auth import flow_of
from octavo.server.body import validate
from octavo.server.errors import UnavailableError, error_json, log_unexpected, show
from octavo.server.middleware import RequestContext
from octavo.server.realtime_schema import RATE, SessionSettings
from octavo.server.sockets import (
    GOING_AWAY,
    IDLE_SECONDS,
    INTERNAL_ERROR,
    as_request,
    error_text,
    event_text,
    new_id,
)
from octavo.server.state import ServerState, state_of
from octavo.server.upload import check_origin
from octavo.speech.interface import TranscriptionOptions
from octavo.speech.resample import to_16_khz
from octavo.speech.turns import TurnDetector
from octavo.system.offload import offload

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

MAX_BUFFER_SECONDS = 300
"""Most seconds of sound that are not committed."""
MAX_ITEMS = 16
"""Most items of a session that wait for their transcripts."""
_BYTES_PER_SECOND = 2 * RATE
# OpenAI's API takes no shorter part.
_LEAST_BYTES = _BYTES_PER_SECOND // 10
# Bytes of a message that are read in a microsecond.
_READ_SPEED = 400


async def realtime(websocket: WebSocket) -> None:
    """Serve a session, until the client or its idle time ends it."""
    context: RequestContext = websocket.scope["octavo"]
    request = as_request(websocket, context)
    check_origin(request)
    state = state_of(request)
    engine = await state.get_engine()
    check_hears(engine.spec)
    model = websocket.query_params.get("model")
    if model is not None:
        state.find_adapter(model)
    tenant = state.tenant(context.api_key)
    sender = flow_of(context.address) if tenant is None else tenant
    with state.hearing.places.hold(sender):
        offered = websocket.scope.get("subprotocols", [])
        await websocket.accept("realtime" if "realtime" in offered else None)
        session = _Session(websocket, state, engine, model, sender)
        try:
            await session.run()
        except WebSocketDisconnect:
            return
        except Exception as error:
            log_unexpected(error)
            with contextlib.suppress(Exception):
                await websocket.close(INTERNAL_ERROR)


@dataclass
class _Item:
    """Part of the sound that was committed."""

    id: str
    data: bytes
    """int16 samples at 24 kHz."""
    settings: SessionSettings


class _Session:
    """Session of a client.

    Args:
        websocket: the connection.
        state: the server.
        engine: its engine.
        model: model that the address names.
        sender: sender of the sound, with whom it shares places and memory.
    """

    def __init__(
        self,
        websocket: WebSocket,
        state: ServerState,
        engine: AsyncLLM,
        model: str | None,
        sender: Hashable,
    ) -> None:
        self._websocket, self._state, self._engine = websocket, state, engine
        self._hearing, self._sender = state.hearing, sender
        self._context: RequestContext = websocket.scope["octavo"]
        self.id = f"sess_{self._context.request_id}"
        self._settings = SessionSettings()
        self._settings.audio.input.transcription.model = model or state.model_names[0]
        self._buffer = bytearray()
        self._first = 0
        """Samples of the session before the buffer."""
        self._detector = self._make_detector()
        self._item = new_id("item")
        self._last_item: str | None = None
        self._items: asyncio.Queue[_Item] = asyncio.Queue()
        self._num_items = 0
        """Number of items without a transcript."""
        self._held = 0
        """Bytes of sound that the session holds."""
        self._sound_at = time.monotonic()
        """Second of `time.monotonic` of the last `_LEAST_BYTES` of new sound."""
        self._new_bytes = 0
        """Bytes of sound since then."""

    async def run(self) -> None:
        """Serve the client's events.

        Raises:
            WebSocketDisconnect: the client ended the session.
        """
        await self._send("session.created", session=self._shown())
        worker = asyncio.create_task(self._transcribe_all())
        stopping = asyncio.create_task(self._state.drain_began.wait())
        try:
            while True:
                receiving = asyncio.create_task(self._websocket.receive())
                idle_at = self._idle_at()
                try:
                    done, _ = await asyncio.wait(
                        {receiving, worker, stopping},
                        timeout=max(0.0, idle_at - time.monotonic()),
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                finally:
                    if not receiving.done():
                        receiving.cancel()
                if worker in done:
                    worker.result()
                if stopping in done:
                    await self._stop(worker)
                    return
                if time.monotonic() >= self._idle_at():
                    error = RequestError(
                        f"The session had no new sound for {IDLE_SECONDS:.0f} s, and ends.",
                        None,
                        "session_idle",
                    )
                    await self._send_error(error, None)
                    await self._websocket.close(GOING_AWAY)
                    return
                if receiving not in done:
                    continue
                message = receiving.result()
                if message["type"] == "websocket.disconnect":
                    return
                await self._take_message(message.get("text"))
        finally:
            worker.cancel()
            stopping.cancel()
            await asyncio.gather(worker, stopping, return_exceptions=True)
            self._give_back(self._held)

    def _idle_at(self) -> float:
        """Return the second of `time.monotonic` at which a session without new sound ends."""
        if self._num_items:
            self._sound_at = time.monotonic()
        return self._sound_at + IDLE_SECONDS

    async def _stop(self, worker: asyncio.Task[None]) -> None:
        """End the session, as the server stops, after the transcripts of its items."""
        finishing = asyncio.create_task(self._items.join())
        try:
            await asyncio.wait({finishing, worker}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            finishing.cancel()
        error = UnavailableError("The server is shutting down; the session ends.")
        await self._send_error(error, None)
        await self._websocket.close(GOING_AWAY)

    async def _take_message(self, text: str | None) -> None:
        event: Any = None
        try:
            if text is None:
                raise RequestError("The message is binary; send events in JSON as text.")
            microseconds = len(text) // _READ_SPEED
            async with self._hearing.message_turns.hold(self._sender):
                await asyncio.sleep(0)  # between two messages, the server does other work
                event = await offload(microseconds, _read_json, text)
                if not isinstance(event, dict) or not isinstance(event.get("type"), str):
                    raise RequestError("The event has no type.", "type")
                sound = await offload(microseconds, _sound_of, event)
            await self._take_event(event, sound)
        except OctavoError as error:
            given = event.get("event_id") if isinstance(event, dict) else None
            await self._send_error(error, given if isinstance(given, str) else None)

    async def _take_event(self, event: dict[str, Any], sound: bytes) -> None:
        """Serve an event with its sound.

        Raises:
            RequestError: it is wrong, or not supported.
        """
        match event["type"]:
            case "session.update":
                await self._update(event.get("session"))
            case "input_audio_buffer.append":
                await self._append(sound)
            case "input_audio_buffer.commit":
                await self._commit(len(self._buffer))
                self._detector = self._make_detector()
            case "input_audio_buffer.clear":
                self._drop(len(self._buffer))
                self._detector = self._make_detector()
                await self._send("input_audio_buffer.cleared")
            case _:
                raise UnsupportedError(
                    f"The event {show(event['type'])} is not supported: a session here transcribes "
                    "only. Use session.update and input_audio_buffer.append, commit or clear.",
                    "type",
                )

    async def _update(self, given: object) -> None:
        settings = self._settings.updated(given)
        wanted = settings.audio.input.transcription
        self._state.find_adapter(wanted.model)
        model = await self._state.hearing.model(self._engine)
        options = TranscriptionOptions(language=wanted.language, prompt=wanted.prompt)
        model.start(np.empty(0, np.float32), options)  # raises the error of a wrong option
        changed = settings.turns != self._settings.turns
        self._settings = settings
        if changed:
            self._detector = self._make_detector()
        await self._send("session.updated", session=self._shown())

    def _make_detector(self) -> TurnDetector | None:
        turns = self._settings.turns
        end = self._first + len(self._buffer) // 2
        return None if turns is None else TurnDetector(turns, RATE, end)

    async def _append(self, data: bytes) -> None:
        if len(self._buffer) + len(data) > MAX_BUFFER_SECONDS * _BYTES_PER_SECOND:
            raise RequestError(
                f"The buffer would have more than {MAX_BUFFER_SECONDS} s of sound; commit or clear "
                "it first.",
                "audio",
                "input_audio_buffer_full",
            )
        self._hearing.sound_memory.take(len(data), self._sender, self._engine.request_memory)
        self._held += len(data)
        self._new_bytes += len(data)
        if self._new_bytes >= _LEAST_BYTES:
            self._new_bytes, self._sound_at = 0, time.monotonic()
        self._buffer += data
        if self._detector is None:
            return
        for change in self._detector.feed(np.frombuffer(data, "<i2")):
            if change.kind == "started":
                start = max(change.at, self._first)
                self._drop(2 * (start - self._first))
                await self._send(
                    "input_audio_buffer.speech_started",
                    item_id=self._item,
                    audio_start_ms=start * 1000 // RATE,
                )
            else:
                await self._send(
                    "input_audio_buffer.speech_stopped",
                    item_id=self._item,
                    audio_end_ms=change.at * 1000 // RATE,
                )
                nbytes = 2 * (change.at - self._first)
                try:
                    await self._commit(nbytes)
                except RequestError as error:  # the turn is lost, the next ones are not
                    self._drop(nbytes)
                    self._item = new_id("item")
                    await self._send_error(error, None)
        if not self._detector.speaking:  # silence before a turn
            self._drop(max(0, len(self._buffer) - 2 * self._detector.padding))

    async def _commit(self, nbytes: int) -> None:
        """Make an item of the first bytes of the buffer."""
        if nbytes < _LEAST_BYTES:
            raise RequestError(
                f"The buffer has {1000 * nbytes // _BYTES_PER_SECOND} ms of sound; append at least "
                "100 ms before you commit it.",
                None,
                "input_audio_buffer_commit_empty",
            )
        if self._items.qsize() >= MAX_ITEMS:
            raise RequestError(
                f"{MAX_ITEMS} items wait for their transcripts already; send this sound later.",
                None,
                "too_many_items",
            )
        item = _Item(self._item, bytes(self._buffer[:nbytes]), self._settings)
        del self._buffer[:nbytes]
        self._first += nbytes // 2
        before, self._last_item, self._item = self._last_item, item.id, new_id("item")
        await self._send("input_audio_buffer.committed", item_id=item.id, previous_item_id=before)
        self._num_items += 1
        self._items.put_nowait(item)

    def _drop(self, nbytes: int) -> None:
        """Forget the first bytes of the buffer."""
        del self._buffer[:nbytes]
        self._first += nbytes // 2
        self._give_back(nbytes)

    def _give_back(self, nbytes: int) -> None:
        """Count bytes that the session holds no longer."""
        self._held -= nbytes
        memory = self._engine.request_memory
        self._hearing.sound_memory.give_back(nbytes, self._sender, memory)

    # Transcripts

    async def _transcribe_all(self) -> None:
        while True:
            item = await self._items.get()
            kind = "conversation.item.input_audio_transcription."
            place = {"item_id": item.id, "content_index": 0}
            try:
                async with aclosing(self._transcribe(item)) as texts:
                    async for fields in texts:
                        last = "delta" if "delta" in fields else "completed"
                        await self._send(kind + last, **place, **fields)
            except WebSocketDisconnect:
                raise
            except Exception as error:
                log_unexpected(error)
                shown = msgspec.json.decode(error_json(error))["error"]
                await self._send(kind + "failed", **place, error=shown)
            finally:
                self._num_items -= 1
                self._give_back(len(item.data))
                self._items.task_done()

    async def _transcribe(self, item: _Item) -> Any:
        """Yield the fields of the events of an item: the text of each part, and the whole text."""
        wanted = item.settings.audio.input.transcription
        context = RequestContext(
            f"{self._context.request_id}-{item.id}",
            time.monotonic(),
            self._context.address,
            self._context.api_key,
            self._context.is_admin,
        )
        body = validate(
            AudioBody,
            {
                "model": wanted.model,
                "language": wanted.language,
                "prompt": wanted.prompt,
                "cache_salt": self._websocket.query_params.get("cache_salt") or None,
            },
        )

        async def read() -> Samples:
            return await offload(len(item.data) // 100, _samples, item.data)

        request = as_request(self._websocket, context)
        call = TranscriptionCall(request, body, "transcribe", read)
        try:
            async with (
                asyncio.timeout_at(call.deadline),
                aclosing(call.texts(self._engine)) as texts,
            ):
                async for text in texts:
                    if text:
                        yield {"delta": text}
        except TimeoutError:
            raise DeadlineError("The transcript was not complete at its deadline.") from None
        finally:
            if context.story is not None:
                context.story.end_http(None, time.monotonic())
        transcript = call.transcript
        yield {
            "transcript": transcript.text,
            "usage": {"type": "duration", "seconds": round(transcript.duration, 3)},
        }

    # Events

    def _shown(self) -> dict[str, Any]:
        settings = msgspec.to_builtins(self._settings)
        return {"id": self.id, "object": "realtime.transcription_session", **settings}

    async def _send(self, kind: str, **fields: Any) -> None:
        await self._websocket.send_text(event_text(kind, fields))

    async def _send_error(self, error: OctavoError, event_id: str | None) -> None:
        """Send an error event; the session goes on."""
        await self._websocket.send_text(error_text(error, event_id))


def _read_json(text: str) -> Any:
    """Return the value of a message.

    Raises:
        RequestError: it is not JSON.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise RequestError("The message is not valid JSON.", None, "invalid_json") from None


def _sound_of(event: dict[str, Any]) -> bytes:
    """Return the sound of an event, int16 samples at 24 kHz; b"" if events of its type have none.

    Raises:
        RequestError: it is missing or wrong.
    """
    if event["type"] != "input_audio_buffer.append":
        return b""
    audio = event.get("audio")
    if not isinstance(audio, str):
        raise RequestError("audio is missing; it is pcm16 in base64.", "audio")
    try:
        data = base64.b64decode(audio, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("audio is not valid base64.", "audio") from None
    if len(data) % 2:
        raise RequestError("audio has half a sample; pcm16 has 2 bytes for each.", "audio")
    return data


def _samples(data: bytes) -> Samples:
    """Return the samples of an item at 16 kHz, float32 [samples]."""
    return to_16_khz(np.frombuffer(data, "<i2").astype(np.float32) / np.float32(2**15))
