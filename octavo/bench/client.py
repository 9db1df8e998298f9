"""Streaming client of OpenAI-compatible servers with a low overhead.

It shares two cores with the measured server, so it reads the sockets itself: an asyncio protocol
around the httptools parser, which records the time as soon as the loop delivers bytes. That needs a
quarter of the processor time of an httpx stream, token for token. Each request has its own
connection, like those of different users; its latency includes connecting.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from octavo.bench.datasets import BenchRequest
from octavo.bench.metrics import RequestRecord
from octavo.errors import ConfigError

# Larger than any server's event or error message.
_MAX_EVENT = 1 << 20


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    """Relevant fields of a stream's event."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class Client:
    """Client that sends requests to one endpoint of one server.

    Args:
        base_url: address such as http://localhost:8000.
        model: name of the model.
        endpoint: path under `base_url`. If it ends in /chat/completions, prompts are sent as chats
            of one message, which needs their text; else as completions, as text if available.
        api_key: bearer token, if given.
        timeout: maximum time of a request, in seconds.
        params: additional fields of every request's body, such as temperature or ignore_eos.
        keep_text: True if records contain the answers.

    Raises:
        ConfigError: `base_url` is not an address.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        endpoint: str = "/v1/completions",
        api_key: str | None = None,
        timeout: float = 3600.0,
        params: Mapping[str, Any] | None = None,
        keep_text: bool = False,
    ) -> None:
        try:
            parts = urlsplit(base_url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"{base_url!r} is not an address such as http://localhost:8000.")
        self._host, self._port = host, port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._chat = is_chat(endpoint)
        self._model = model
        self._params = dict(params or {})
        self._timeout = timeout
        self._keep_text = keep_text
        head = f"POST {parts.path.rstrip('/')}{endpoint} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        if api_key is not None:
            head += f"Authorization: Bearer {api_key}\r\n"
        self._head = (
            head + "Content-Type: application/json\r\nAccept: text/event-stream\r\n"
            "Connection: close\r\nContent-Length: "
        ).encode("latin-1")

    async def send(
        self, request: BenchRequest, *, origin: float | None = None, scheduled_time: float = 0.0
    ) -> RequestRecord:
        """Send a request and read its answer to the end.

        Failures are recorded in the record's `error`; none is raised.

        Args:
            request: the request.
            origin: `time.perf_counter` at the origin of the record's times; None: now.
            scheduled_time: value for the record.
        """
        data = self._encode(request)
        start = time.perf_counter()
        stream = _Stream(data, self._chat, self._keep_text)
        try:
            async with asyncio.timeout(self._timeout):
                transport, _ = await asyncio.get_running_loop().create_connection(
                    lambda: stream, self._host, self._port, ssl=self._ssl
                )
                try:
                    error = await stream.ended
                finally:
                    transport.abort()
        except TimeoutError:
            error = f"The answer did not end within {self._timeout:g} s."
        except OSError as failure:  # ssl.SSLError is one
            error = f"Cannot connect: {failure.strerror or failure}"
        origin = start if origin is None else origin
        usage = stream.usage
        num_output = stream.num_tokens if usage is None else usage.completion_tokens
        times = stream.token_times
        if stream.finish_time is not None and len(times) < num_output:
            times.append(stream.finish_time)  # the last token had no text of its own
        if error is None and not times:
            error = "The answer has no tokens."
        num_prompt = len(request.prompt_token_ids or [])
        cached = None if usage is None else usage.prompt_tokens_details
        return RequestRecord(
            num_prompt_tokens=num_prompt if usage is None else usage.prompt_tokens,
            num_output_tokens=num_output,
            scheduled_time=scheduled_time,
            start_time=start - origin,
            token_times=[t - origin for t in times],
            error=error,
            text="".join(stream.text) if self._keep_text else None,
            num_cached_tokens=(cached.cached_tokens or 0) if cached is not None else 0,
        )

    def _encode(self, request: BenchRequest) -> bytes:
        prompt = request.prompt_token_ids if request.prompt is None else request.prompt
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._params,
        }
        if self._chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = prompt
        data = msgspec.json.encode(body)
        return b"%b%d\r\n\r\n%b" % (self._head, len(data), data)


def is_chat(endpoint: str) -> bool:
    """Return True if an endpoint expects messages rather than a prompt."""
    return endpoint.rstrip("/").endswith("/chat/completions")


class _Stream(asyncio.Protocol):
    """Connection with one request; also the parser's callbacks.

    Attributes:
        ended: future of the end of the answer; contains None, or an error message.
        token_times: `time.perf_counter` at each arrival of tokens.
        finish_time: `time.perf_counter` of the finish reason, if it arrived without a token.
        num_tokens: tokens counted by their arrivals, for servers that send no usage.
    """

    def __init__(self, request: bytes, chat: bool, keep_text: bool) -> None:
        self.ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.token_times: list[float] = []
        self.finish_time: float | None = None
        self.num_tokens = 0
        self.usage: _Usage | None = None
        self.text: list[str] = []
        self._request = request
        self._chat = chat
        self._keep_text = keep_text
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._is_stream = False
        self._finished = False
        self._rest = b""
        self._now = 0.0

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)  # uvloop has no subclass

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # an error of this client, not of the server
        except httptools.HttpParserError:
            self._end(f"The answer is not HTTP: {data[:60]!r}.")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._status and not self._is_stream:
            self._refused()
        elif self._finished:
            self._end(None)  # complete, but without [DONE]
        else:
            when = "in the middle of its answer" if self._status else "without an answer"
            self._end(f"The server closed the connection {when}.")

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._is_stream = value.lower().startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._is_stream = self._is_stream and self._status == 200

    def on_body(self, body: bytes) -> None:
        data = self._rest + body if self._rest else body
        if self._is_stream:
            *lines, data = data.split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self._on_event(line[5:].strip())
        self._rest = data
        if len(data) > _MAX_EVENT:
            self._end(f"The server sent an event of more than {_MAX_EVENT} bytes.")

    def on_message_complete(self) -> None:
        self.connection_lost(None)

    def _on_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._end(None if self._finished else "The stream ended before the answer did.")
            return
        try:
            chunk = _decode_chunk(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._end(f"The server sent an event that is not OpenAI's: {data[:60]!r}.")
            return
        if chunk.error is not None:
            self._end(f"The server failed in its answer: {_message(chunk.error)}")
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            self._on_choice(choice)

    def _on_choice(self, choice: _Choice) -> None:
        text, is_opening = choice.text, False
        if choice.delta is not None:
            text = choice.delta.content or choice.delta.reasoning_content
            is_opening = choice.delta.role is not None
        finished = choice.finish_reason is not None
        # A piece without text is a token with pending text, except if it only opens a chat
        # or ends an answer.
        if text or choice.token_ids or not (finished or is_opening):
            self.token_times.append(self._now)
            self.num_tokens += len(choice.token_ids or ()) or 1
        elif finished:
            self.finish_time = self._now
        self._finished = self._finished or finished
        if self._keep_text and text:
            self.text.append(text)

    def _refused(self) -> None:
        if self._status == 200:
            shown = self._rest[:60]
            self._end(f"The answer is not a stream of events: {shown!r}.")
            return
        try:
            body = msgspec.json.decode(self._rest)
            message = _message(
                body["error"] if isinstance(body, dict) and "error" in body else body
            )
        except (msgspec.MsgspecError, UnicodeDecodeError):
            message = repr(self._rest[:200])
        self._end(f"HTTP {self._status}: {message}")

    def _end(self, error: str | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


def _message(error: Any) -> str:
    """Return the text of an error object."""
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)
