"""Proxy of a request to a server, or to another one after a failure, and of its answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import OctavoError, RequestError
from octavo.router.job import Job
from octavo.router.media import unknown_media
from octavo.router.pool import Hold, Pool, Upstream
from octavo.router.sent_answer import SentAnswer
from octavo.router.stored_objects import NOT_FOUND_CODES, id_of, unknown_object
from octavo.router.streams import (
    MEDIA_TYPES,
    complete_parts,
    data_of,
    failure_writer,
    next_number,
    openai_failure,
)
from octavo.server.errors import ClientDisconnectError, UnavailableError, log_unexpected

if TYPE_CHECKING:
    from octavo.router.proxy_state import ProxyState

logger = logging.getLogger(__name__)

# Statuses that describe the server rather than the request; 429: it is full.
_ELSEWHERE = frozenset([429, 502, 503, 504])
# Codes of errors, also within a stream, of servers that cannot continue.
_LOST_CODES = frozenset(["engine_unavailable", "unavailable", 503])
# Number of servers that may die during a request, one after the other without text between, before
# the request is considered the cause.
_MOST_DEATHS = 3
# Maximum bytes of an event, and of an answer that is not a stream: more than any server sends.
_MOST_EVENT = 16 * 2**20
_MOST_ANSWER = 256 * 2**20
# Seconds within which a stream ends after its last event.
_END_SECONDS = 1.0
_DONE = b"[DONE]"
_AT_ONCE = contextlib.nullcontext()
# Headers of a single connection, or of the router itself.
_NOT_PASSED_BACK = frozenset(
    [
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "content-length",
        "date",
        "server",
        "x-request-id",
    ]
)


class ServerLostError(OctavoError):
    """Error of a server that did not deliver the whole answer; another server may.

    Args:
        message: description of the failure.
        took: True if the server had received the request, which may have killed it.
    """

    def __init__(self, message: str, *, took: bool) -> None:
        super().__init__(message)
        self.took = took


@dataclass(slots=True)
class Answer:
    """Complete answer."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class ProxyResponse(Response):
    """Response to a job, from one or several servers.

    If a server refuses the connection, breaks it, or reports that it cannot serve now, another one
    replaces it at any time: the part that the client already has is omitted from the new answer.

    Args:
        state: the router.
        job: the request.
        answering: the servers.
        prefilling: servers that compute prompts for them; None: they do so themselves.
        turn: context of the work, entered before a server is chosen; it may wait.
    """

    def __init__(
        self,
        state: ProxyState,
        job: Job,
        answering: Pool,
        prefilling: Pool | None = None,
        turn: AbstractAsyncContextManager[None] = _AT_ONCE,
    ) -> None:
        super().__init__()
        self._state = state
        self._job = job
        self._answering, self._prefilling = answering, prefilling
        self._turn = turn
        self._sent = SentAnswer()
        self._started = False
        self._arrival = time.monotonic()
        self._home: Upstream | None = None
        """The only server that can answer, as it has what the request names."""
        self._seeks = False
        """True if it is unknown which server stores what the request names."""
        self._lacking: set[Upstream] = set()
        """Servers that do not store what the request names."""
        self._write_failure = failure_writer(job.path)
        self._next_number = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, until it ends or the client disconnects."""
        try:
            with self._state.admit(), self._state.view.claim(self._job):
                await self._state.run(receive, self._take_turn(send), None)
        except ClientDisconnectError:
            raise
        except Exception as error:
            if not self._started or not (self._job.generates or self._write_failure):
                raise
            log_unexpected(error)
            if self._write_failure is None:
                last = openai_failure(error)
            else:
                last = self._write_failure(error, self._next_number)
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _take_turn(self, send: Send) -> None:
        async with self._turn:
            await self._pass_on(send)

    async def _pass_on(self, send: Send) -> None:
        state, job, pool = self._state, self._job, self._answering
        tried: dict[Upstream, int] = {}
        refusal: Answer | None = None
        deaths = 0
        self._find_home()
        while True:
            upstream = pool.choose(job.pieces, tried, self._home, job.model)
            if upstream is None:
                if refusal is not None and not self._started:
                    self._check_asked(refusal)
                    await self._send_answer(send, refusal)
                    return
                if job.media.recalled and len(pool.upstreams) > 1:
                    raise unknown_media()
                timeout = state.router.failover_timeout
                if not await pool.wait_ready(tried, timeout, self._home):
                    raise UnavailableError(
                        "No server could answer the request: "
                        + ("none is ready" if not tried else "each failed or is busy")
                        + "; try again later."
                    )
                continue
            epoch, num_sent = upstream.epoch, self._sent.num_sent
            try:
                with pool.hold(upstream, job.weight) as hold:
                    answer = await self._attempt(send, hold)
                if answer is None:
                    return
                if refusal is None or answer.status in _ELSEWHERE:
                    refusal = answer
                state.metrics.retries.labels("refused").inc()
            except ServerLostError as error:
                logger.warning(
                    "request is sent to another server",
                    extra={"server": upstream.name, "reason": str(error)},
                )
                state.metrics.retries.labels("lost" if error.took else "unreachable").inc()
                pool.suspect(upstream)
                if self._sent.num_sent > num_sent:
                    deaths, tried = 0, {}
                deaths += error.took
                if self._started and not job.generates:
                    raise UnavailableError(
                        "The server that answered was lost in the middle of its answer; send the "
                        "request again."
                    ) from None
                if deaths >= _MOST_DEATHS:
                    raise UnavailableError(
                        f"{deaths} servers in a row were lost over this request; it is not tried "
                        "again."
                    ) from None
            tried[upstream] = epoch

    async def _attempt(self, send: Send, hold: Hold) -> Answer | None:
        """Have a server answer; return its answer if another server may do better, else None.

        Raises:
            ServerLostError: the server did not deliver the whole answer.
        """
        job, upstream = self._job, hold.upstream
        body = await self._handed_over() if self._prefilling is not None else job.body
        response = await self._send_request(upstream, body)
        if response.status == 200:
            self._answering.note_media(job.api_key, job.media, upstream)
        try:
            hold.begin()
            media_type = response.headers.get("content-type", "").partition(";")[0].strip()
            if response.status == 200 and media_type in MEDIA_TYPES:
                await self._pass_on_stream(send, upstream, response)
                return None
            answer = Answer(
                response.status,
                _head(response),
                await self._whole(upstream, response, _MOST_ANSWER),
            )
        finally:
            response.close()
        if answer.status in _ELSEWHERE:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # a proxy's page
                _check_error(answer.body)
            return answer
        if self._seeks and _lacks_object(answer):
            self._lacking.add(upstream)
            return answer
        if (
            job.model is not None
            and _lacks_model(answer)
            and self._answering.note_lack(upstream, job.model, self._home)
        ):
            return answer
        if self._started:
            raise UnavailableError(
                "The server that answered was lost, and another one refused to continue: "
                + answer.body[:500].decode(errors="replace")
            )
        self._count(answer)
        if answer.status == 200:
            self._note_home(upstream, answer.body)
        await self._send_answer(send, answer)
        return None

    # Stored objects

    def _find_home(self) -> None:
        """Find the server that has what the request names.

        Raises:
            RequestError: the client's key has no such object, and no server could tell; or no
                server is known to have its media.
        """
        state, job = self._state, self._job
        self._home = self._answering.find_media(job.api_key, job.media)
        for names in job.objects:
            found = [state.stored.find(job.api_key, name) for name in names]
            home = next((u for u in found if u in self._answering.upstreams), None)
            if home is None and state.shares_key:
                raise unknown_object(names[0], in_path=not job.fields)
            self._home = self._home or home
        self._seeks = bool(job.objects) and self._home is None

    def _note_home(self, upstream: Upstream, data: bytes) -> None:
        """Remember that a server stores what it made, and what the request names."""
        job, note = self._job, self._state.stored.note
        if job.creates and (name := id_of(data)) is not None:
            note(job.api_key, name, upstream)
        for names in job.objects:
            if len(names) == 1:
                note(job.api_key, names[0], upstream)

    def _check_asked(self, refusal: Answer) -> None:
        """Raise UnavailableError if a server that did not answer may have the object."""
        if self._seeks and _lacks_object(refusal):
            missing = set(self._answering.upstreams) - self._lacking
            if missing:
                raise UnavailableError(
                    "No server that is ready has what the request names, and "
                    f"{len(missing)} are not ready; try again later."
                )

    def _count(self, answer: Answer) -> None:
        """Count the tokens of a whole answer."""
        if self._job.generates and answer.status == 200:
            self._state.metrics.note_usage(*_usage_of(answer.body))

    # Answers

    async def _pass_on_stream(
        self, send: Send, upstream: Upstream, response: aiohttp.ClientResponse
    ) -> None:
        if not self._job.generates:
            await self._pass_on_parts(send, upstream, response)
            return
        self._sent.begin_again()
        async for events in _events(self._chunks(upstream, response)):
            out: list[bytes] = []
            done = False
            try:
                for data in events:
                    if data == _DONE:
                        self._sent.check_complete()
                        out.append(b"data: [DONE]\n\n")
                        done = True
                        break
                    out += self._take(data)
            finally:  # stored parts count as sent, even if the next event is an error
                if out:
                    await self._start(send, response)
                    await send(
                        {"type": "http.response.body", "body": b"".join(out), "more_body": not done}
                    )
            if done:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with asyncio.timeout(_END_SECONDS):
                        await response.content.readany()  # empty; frees the connection
                return
        raise ServerLostError("its stream ended before the answer", took=True)

    async def _pass_on_parts(
        self, send: Send, upstream: Upstream, response: aiohttp.ClientResponse
    ) -> None:
        """Send a stream of an API that no other server continues, in complete events.

        So the client can read an error after them.
        """
        media_type = response.headers["content-type"].partition(";")[0].strip()
        chunks = self._chunks(upstream, response)
        try:
            async for parts in complete_parts(chunks, MEDIA_TYPES[media_type], _MOST_EVENT):
                if not self._started and (self._job.creates or self._job.objects):
                    self._note_home(upstream, data_of(parts[0]))
                await self._start(send, response)
                if self._job.path.startswith("/v1/responses"):
                    self._next_number = next_number(parts[-1]) or self._next_number
                body = b"".join(parts)
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except ValueError as error:
            raise ServerLostError(str(error), took=True) from None
        await self._start(send, response)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _take(self, data: bytes) -> list[bytes]:
        """Return the parts of an event to send."""
        try:
            if b'"error"' in data:
                _check_error(data)
            if b'"usage":{' in data and b'"choices":[]' in data:
                self._state.metrics.note_usage(*_usage_of(data))
            kept = self._sent.take(data)
        except (msgspec.MsgspecError, ValueError) as error:
            if isinstance(error, OctavoError):
                raise
            raise ServerLostError(f"it sent an invalid event: {error}", took=True) from None
        return [] if kept is None else [b"data: " + kept + b"\n\n"]

    async def _start(self, send: Send, response: aiohttp.ClientResponse) -> None:
        if self._started:
            return
        self._started = True
        headers = _head(response)
        await send({"type": "http.response.start", "status": response.status, "headers": headers})

    async def _send_answer(self, send: Send, answer: Answer) -> None:
        self._started = True
        length = (b"content-length", str(len(answer.body)).encode())
        await send(
            {
                "type": "http.response.start",
                "status": answer.status,
                "headers": [*answer.headers, length],
            }
        )
        await send({"type": "http.response.body", "body": answer.body, "more_body": False})

    # Servers

    async def _handed_over(self) -> bytes:
        """Return the body for the answering server, after a prefill server has computed the prompt.

        If no server can compute the prompt, the answering one does.
        """
        state, job, pool = self._state, self._job, self._prefilling
        assert pool is not None
        if not job.splits:
            return job.body
        try:
            home = pool.find_media(job.api_key, job.media)
        except RequestError:  # the answering server has them
            state.metrics.prefills.labels("local").inc()
            return job.body
        tried: dict[Upstream, int] = {}
        deaths = 0
        while (
            deaths < _MOST_DEATHS
            and (upstream := pool.choose(job.pieces, tried, home, job.model)) is not None
        ):
            epoch = upstream.epoch
            try:
                with pool.hold(upstream, job.weight):
                    response = await self._send_request(upstream, job.prefill_body())
                    try:
                        answer = await self._whole(upstream, response, _MOST_EVENT)
                    finally:
                        response.close()
            except ServerLostError as error:
                logger.warning(
                    "prefill is sent to another server",
                    extra={"server": upstream.name, "reason": str(error)},
                )
                pool.suspect(upstream)
                deaths += error.took
            else:
                if response.status == 200:
                    pool.note_media(job.api_key, job.media, upstream)
                params = _transfer_params(answer) if response.status == 200 else None
                if params is not None:
                    state.metrics.prefills.labels("remote").inc()
                    return job.decode_body(params)
                if response.status not in _ELSEWHERE:
                    break  # the answering server reports the same, or needs no prefill
            tried[upstream] = epoch
        state.metrics.prefills.labels("local").inc()
        return job.body

    async def _send_request(self, upstream: Upstream, body: bytes) -> aiohttp.ClientResponse:
        """Send the request; return when the head of the answer has arrived.

        Raises:
            ServerLostError: the server could not be reached, or broke the connection.
        """
        job = self._job
        headers = [(name, self._header(name, value)) for name, value in job.headers]
        try:
            async with upstream.guard():
                return await upstream.ask(job.method, job.path, headers, body)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ServerLostError(f"cannot be reached: {error}", took=False) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLostError(_reason(error), took=True) from None

    def _header(self, name: str, value: str) -> str:
        if name in ("x-deadline-ms", "x-max-ttft-ms") and value.isdecimal():
            elapsed = int((time.monotonic() - self._arrival) * 1000)
            return str(max(1, int(value) - elapsed))
        return value

    async def _chunks(
        self, upstream: Upstream, response: aiohttp.ClientResponse
    ) -> AsyncIterator[bytes]:
        """Yield the body of an answer as it arrives.

        Raises:
            ServerLostError: the connection broke.
        """
        while True:
            try:
                async with upstream.guard():
                    chunk = await response.content.readany()
            except (aiohttp.ClientError, OSError) as error:
                raise ServerLostError(_reason(error), took=True) from None
            if not chunk:
                return
            yield chunk

    async def _whole(
        self, upstream: Upstream, response: aiohttp.ClientResponse, limit: int
    ) -> bytes:
        body = bytearray()
        async for chunk in self._chunks(upstream, response):
            body += chunk
            if len(body) > limit:
                raise ServerLostError(f"its answer has more than {limit} bytes", took=True)
        return bytes(body)


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """Yield the data of complete server-sent events, all available ones at a time."""
    rest = b""
    async for chunk in chunks:
        *events, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(rest) > _MOST_EVENT:
            raise ServerLostError(f"it sent an event of more than {_MOST_EVENT} bytes", took=True)
        found = [data for event in events if (data := data_of(event))]
        if found:
            yield found


def _check_error(data: bytes) -> None:
    """Raise ServerLostError for an error that another server may not have."""
    event = msgspec.json.decode(data)
    error = event.get("error") if isinstance(event, dict) else None
    if isinstance(error, dict) and error.get("code") in _LOST_CODES:
        # A server that is shut down does not die of the request.
        took = error["code"] != "unavailable"
        raise ServerLostError(f"it said: {str(error.get('message'))[:200]}", took=took)


def _lacks_object(answer: Answer) -> bool:
    """Return True if a server answered that it does not have what the request names."""
    return answer.status in (400, 404) and _code_of(answer) in NOT_FOUND_CODES


def _lacks_model(answer: Answer) -> bool:
    """Return True if a server answered that it does not have the model."""
    return answer.status == 404 and _code_of(answer) in ("model_not_found", 404)


def _code_of(answer: Answer) -> str | int | None:
    """Return the code of an error; None: it has none."""
    try:
        code = msgspec.json.decode(answer.body)["error"]["code"]
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError):
        return None
    return code if isinstance(code, str | int) else None


def _transfer_params(answer: bytes) -> Any:
    try:
        decoded = msgspec.json.decode(answer)
    except (msgspec.MsgspecError, ValueError):
        return None
    return decoded.get("kv_transfer_params") if isinstance(decoded, dict) else None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Counted(msgspec.Struct):
    usage: _Usage | None = None


def _usage_of(answer: bytes) -> tuple[int, int]:
    """Return the tokens of prompt and answer, as reported by the server."""
    try:
        usage = msgspec.json.decode(answer, type=_Counted).usage or _Usage()
    except msgspec.MsgspecError:
        usage = _Usage()
    return usage.prompt_tokens, usage.completion_tokens


def _reason(error: Exception) -> str:
    return "is silent" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


def _head(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer that are passed on."""
    headers = [(name.lower(), value) for name, value in response.raw_headers]
    return [header for header in headers if header[0].decode("latin-1") not in _NOT_PASSED_BACK]
