"""Uploads: a form (multipart/form-data) with one file, which is written to disk as it arrives."""

from __future__ import annotations

import asyncio
from typing import Protocol
from urllib.parse import urlsplit

from python_multipart.exceptions import FormParserError, MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from octavo.errors import DeadlineError, RequestError
from octavo.server.errors import ClientDisconnectError, MediaTypeError, show
from octavo.server.file_store import FileTooLargeError
from octavo.server.http_state import http_state_of
from octavo.server.middleware import context_of

# An upload may take `_PATIENCE` seconds, and a second more for each `_LEAST_SPEED` bytes that have
# arrived.
_PATIENCE = 60.0
_LEAST_SPEED = 32 * 2**10
_MAX_FIELDS = 32
_MAX_FIELD_BYTES = 4096
_MAX_NAME = 255
MAX_SOUND_BYTES = 25 * 2**20
"""Most bytes of a sound file, as in OpenAI's API."""
# Bytes of a form besides its file.
_FORM_BYTES = 2**18


class FileSink(Protocol):
    """Receiver of an uploaded file."""

    @property
    def max_file_bytes(self) -> int:
        """Most bytes of the file."""

    def too_large(self) -> RequestError:
        """Return the error of a larger file."""

    def take(self, nbytes: int) -> None:
        """Count bytes that may be written next.

        Raises:
            RequestError: there is no room for them.
        """

    def write(self, data: bytes) -> None:
        """Write the next bytes, on any thread.

        Raises:
            RequestError: the file becomes too large.
            StorageError: the bytes cannot be written.
        """


class MemoryFile:
    """File that is being uploaded into memory; its bytes count as those of a body.

    Args:
        request: the request.
        max_file_bytes: most bytes of the file.
    """

    def __init__(self, request: Request, max_file_bytes: int) -> None:
        self._state, self._context = http_state_of(request), context_of(request)
        self.max_file_bytes = max_file_bytes
        self.data = bytearray()

    def forget(self) -> None:
        """Free the file's memory."""
        self._context.body_bytes -= len(self.data)
        self._state.body_bytes -= len(self.data)
        self.data = bytearray()

    def too_large(self) -> RequestError:
        """Return the error of a larger file."""
        return FileTooLargeError(self.max_file_bytes, "compress it, or send it in parts")

    def take(self, nbytes: int) -> None:
        """Count bytes that have arrived."""
        self._context.body_bytes += nbytes
        self._state.body_bytes += nbytes
        self._state.check_bodies(len(self.data) + nbytes)

    def write(self, data: bytes) -> None:
        """Add the next bytes."""
        self.data += data
        if len(self.data) > self.max_file_bytes:
            raise self.too_large()


class OriginError(RequestError):
    """Request that a web page of another site makes in a visitor's browser."""

    status = 403

    def __init__(self, origin: str) -> None:
        super().__init__(
            f"Requests of web pages at {show(origin)} are not accepted; to accept them, start the "
            "server with --allowed-origins.",
            None,
            "origin_not_allowed",
        )


def check_origin(request: Request) -> None:
    """Reject a request that a browser sends for a page of another site without asking first.

    A form, and a POST without a body, need no permission of the server (CORS).

    Raises:
        OriginError: the page's site is not one of --allowed-origins.
    """
    origin = request.headers.get("origin")
    allowed = http_state_of(request).config.allowed_origins
    if origin is None or origin in allowed or "*" in allowed:
        return
    try:
        site = urlsplit(origin).netloc
    except ValueError:
        site = ""
    if not site or site != request.headers.get("host"):
        raise OriginError(origin)


class _Form:
    """Parts of a form, fed in pieces on any thread.

    Args:
        boundary: separator of the parts.
        writer: receives the bytes of the file.
    """

    def __init__(self, boundary: bytes, writer: FileSink) -> None:
        self.fields: dict[str, bytes] = {}
        self.filename: str | None = None
        """Name of the file; None: there is no file yet."""
        self.complete = False
        self._writer = writer
        self._header = bytearray()
        self._value = bytearray()
        self._disposition: bytes | None = None
        self._name = ""
        self._text: bytearray | None = None
        """Value of a part that is no file."""
        self._pieces: list[bytes] = []
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._add_header_name,
                "on_header_value": self._add_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Parse the next bytes, and write those of the file.

        Raises:
            RequestError: the form is wrong, or the file too large.
            StorageError: the file cannot be written.
        """
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise _bad_form(str(error)) from None
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._writer.write(data)

    def _begin_part(self) -> None:
        self._disposition, self._text = None, None

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise _bad_form("a part has no name")
        self._name = options[b"name"].decode("utf-8", "replace")
        if self._name == "file":
            if b"filename" not in options:
                raise RequestError("file is a text; send a file with a file name.", "file")
            if self.filename is not None:
                raise RequestError("The form has several files; send one.", "file")
            name = options[b"filename"].decode("utf-8", "replace")
            if len(name) > _MAX_NAME or not name.isprintable() or not name:
                raise RequestError(
                    f"The file name {show(name)} is not allowed; give 1 to {_MAX_NAME} printable "
                    "characters.",
                    "file",
                )
            self.filename = name
        else:
            if len(self.fields) >= _MAX_FIELDS:
                raise _bad_form(f"it has more than {_MAX_FIELDS} fields")
            self._text = bytearray()

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._text is None:
            self._pieces.append(data[start:end])
            return
        self._text += data[start:end]
        self._check_length()

    def _check_length(self) -> None:
        if self._text is not None and len(self._text) > _MAX_FIELD_BYTES:
            raise RequestError(
                f"{show(self._name)} has more than {_MAX_FIELD_BYTES} bytes; shorten it.",
                self._name[:_MAX_NAME],
            )

    def _end_part(self) -> None:
        if self._text is not None:
            if self._name.endswith("[]") and self._name in self.fields:  # a list
                self._text = bytearray(self.fields[self._name] + b"," + self._text)
                self._check_length()
            elif self._name in self.fields:
                raise _bad_form(f"it has several values of {show(self._name)}")
            self.fields[self._name] = bytes(self._text)

    def _end(self) -> None:
        self.complete = True


def _bad_form(reason: str) -> RequestError:
    return RequestError(
        f"The body is no valid form: {reason}. Send multipart/form-data with a file.",
        None,
        "invalid_form",
    )


async def receive_form(request: Request, writer: FileSink) -> tuple[str, dict[str, bytes]]:
    """Read a form; write its file.

    Returns:
        The name of the file, and the other fields. Values of one whose name ends with [] are joined
        by commas.

    Raises:
        RequestError: the form is wrong, or there is no room for its file.
        ClientDisconnectError: the client disconnected.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        given = request.headers.get("content-type")
        raise MediaTypeError(
            f"Content-Type is {'missing' if given is None else show(given)}; send the file as "
            "`multipart/form-data; boundary=...`, which HTTP libraries set for forms with a file."
        )
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise MediaTypeError("Content-Encoding is not supported; send the form uncompressed.")
    limit = writer.max_file_bytes + _FORM_BYTES
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise writer.too_large()
    try:
        form = _Form(boundary, writer)
    except FormParserError as error:
        raise _bad_form(str(error)) from None
    nbytes = 0
    loop = asyncio.get_running_loop()
    begin = loop.time()
    while True:
        try:
            async with asyncio.timeout_at(begin + _PATIENCE + nbytes / _LEAST_SPEED):
                message = await request.receive()
        except TimeoutError:
            raise DeadlineError(
                f"The file arrives too slowly, with less than {_LEAST_SPEED} bytes a second."
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnectError
        chunk = message.get("body", b"")
        nbytes += len(chunk)
        if nbytes > limit:
            raise writer.too_large()
        writer.take(len(chunk))
        await asyncio.to_thread(form.feed, chunk)
        if not message.get("more_body", False):
            break
    if not form.complete:
        raise _bad_form("it has no end")
    if form.filename is None:
        raise RequestError("file is missing; it is required.", "file", "missing_parameter")
    return form.filename, form.fields
