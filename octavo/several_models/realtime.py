"""GET /v1/realtime at a server of several models: the choice of a session's model."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.websockets import WebSocket

from octavo.errors import OctavoError, RequestError
from octavo.router.app import head_of
from octavo.router.realtime import SocketProxy, code_for
from octavo.server.errors import UnavailableError, error_status, show
from octavo.server.realtime_schema import SessionSettings
from octavo.server.sockets import (
    GOING_AWAY,
    IDLE_SECONDS,
    as_request,
    error_text,
    event_text,
)
from octavo.server.upload import check_origin
from octavo.several_models.state import ModelsState, OneModel, models_of

_UPDATE = "session.update"


async def realtime(websocket: WebSocket) -> None:
    """Pass a session of a stream of sound on to the server of its model.

    The address names the model, or else the first event if it is `session.update`; otherwise the
    session has the first model that hears. A session keeps its model, and ends if that is to be
    unloaded.
    """
    context = websocket.scope["octavo"]
    request = as_request(websocket, context)
    check_origin(request)
    state = models_of(request)
    proxy = _ModelSocket(websocket, state, head_of(request)[1])
    with state.admit(), state.sessions.hold(proxy.sender):
        name, first = websocket.query_params.get("model"), None
        if name is None:
            settings = msgspec.to_builtins(SessionSettings())
            shown = {"id": f"sess_{context.request_id}", "object": proxy.kind, **settings}
            await websocket.accept(proxy.subprotocol)
            await websocket.send_text(event_text("session.created", {"session": shown}))
            first = await _first_message(proxy, websocket, state)
            if first is None:
                return
            name = _model_in(first)
        try:
            model = await state.default(["transcribe"]) if name is None else state.find(name)
        except OctavoError as error:
            if first is None:
                raise
            await proxy.end(error_text(error), code_for(error_status(error)))
            return
        proxy.model = model
        await proxy.serve(model.pool, name, state.set.use(model), first)


async def _first_message(
    proxy: SocketProxy, websocket: WebSocket, state: ModelsState
) -> str | None:
    """Return the first text of a client; None: the session has ended without one."""
    receiving = asyncio.create_task(websocket.receive())
    stopping = asyncio.create_task(state.drain_began.wait())
    try:
        await asyncio.wait(
            {receiving, stopping}, timeout=IDLE_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if receiving.done():
            message = receiving.result()
            if message["type"] == "websocket.disconnect":
                return None
            return message.get("text") or ""
        error: RequestError = UnavailableError("The server is shutting down; the session ends.")
        if not stopping.done():
            error = RequestError(
                f"The session had no message for {IDLE_SECONDS:.0f} s, and ends.",
                None,
                "session_idle",
            )
        await proxy.end(error_text(error), GOING_AWAY)
        return None
    finally:
        receiving.cancel()
        stopping.cancel()


def _model_in(text: str) -> str | None:
    """Return the model that a `session.update` names; None: the message names none."""
    try:
        event = msgspec.json.decode(text, type=_Event)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None  # the model's server rejects a wrong message
    return event.session.audio.input.transcription.model if event.type == _UPDATE else None


class _Transcription(msgspec.Struct):
    model: str | None = None


class _Input(msgspec.Struct):
    transcription: _Transcription = msgspec.field(default_factory=_Transcription)


class _Audio(msgspec.Struct):
    input: _Input = msgspec.field(default_factory=_Input)


class _Session(msgspec.Struct):
    audio: _Audio = msgspec.field(default_factory=_Audio)


class _Event(msgspec.Struct):
    type: str
    session: _Session = msgspec.field(default_factory=_Session)


class _ModelSocket(SocketProxy):
    """Session that keeps its model."""

    kind = "realtime.transcription_session"
    model: OneModel
    """The model of the session."""

    async def must_end(self) -> OctavoError:
        """Implement `SocketProxy`: the model's turn may end, too."""
        stopping = asyncio.create_task(super().must_end())
        leaving = asyncio.create_task(self.model.leaving.wait())
        try:
            await asyncio.wait({stopping, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return stopping.result()
        finally:
            stopping.cancel()
            leaving.cancel()
        return UnavailableError(
            f"The model {show(self.model.names[0])} is about to be unloaded; begin another "
            "session, and send the sound without a transcript again."
        )

    def check_message(self, text: str) -> str | None:
        """Implement `SocketProxy`: reject another model of this server."""
        if _UPDATE not in text:
            return None
        name = _model_in(text)
        state = self._state
        assert isinstance(state, ModelsState)
        other = None if name is None else state.look_up(name)
        if name is None or other is None or other is self.model:
            return None
        error = RequestError(
            f"The session has the model {show(self.model.names[0])}; begin another session for "
            f"{show(name)}.",
            "model",
        )
        return error_text(error)
