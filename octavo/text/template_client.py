"""Rendering of chat templates by a separate process, which this module starts and keeps.

`text/template_process.py` is the other side, and explains the reason. The first render starts the
process, which serves all templates of this one. If it ends, the next render starts another.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from octavo.errors import ModelError, RequestError, make_error

MAX_RENDER_SECONDS = 2.0
"""Limit of the processor time of one render."""
MAX_RENDER_BYTES = 512 * 2**20
"""Limit of the process' address space, which is about 40 MiB when idle."""
# A render that waits for a busy machine may take longer than one that computes.
_MAX_WAIT_SECONDS = 10.0
_LENGTH_BYTES = 8


class RenderRequest(msgspec.Struct):
    """Conversation to be rendered; see `ChatTemplate.render`."""

    sources: dict[str, str]
    """Jinja sources by name."""
    special_tokens: dict[str, str]
    messages: Any = None
    """Messages; None: the templates are only compiled."""
    tools: Any = None
    documents: Any = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Any = None
    may_drop_tool_calls: bool = True


class RenderResult(msgspec.Struct):
    """Rendered text, or an error."""

    text: str = ""
    error: str | None = None
    error_kind: str | None = None
    """Name of the error's class in `octavo.errors`."""
    param: str | None = None


class TemplateClient:
    """Rendering process, and the thread that waits for it.

    Renders run one after the other, in the order of submission.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "octavo-templates")
        # An executor starts another thread after a Ctrl-C that interrupts its first `submit`.
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def submit(self, request: RenderRequest) -> Future[str]:
        """Start a render; the future's result is the text.

        The future's errors:
            RequestError: the request cannot be rendered within the limits.
            ModelError: the template is broken, or its process does not answer.
        """
        return self._thread.submit(self._render, request)

    def close(self) -> None:
        """End the process and the thread; cancel waiting renders."""
        self._thread.shutdown(cancel_futures=True)
        self._end()

    def _render(self, request: RenderRequest) -> str:
        try:
            data = msgspec.msgpack.encode(request, enc_hook=_plain_container)
        except RecursionError:
            raise RequestError("messages is nested too deeply.", "messages") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError(
                f"messages can hold JSON's types only: {error}.", "messages"
            ) from None
        result = msgspec.msgpack.decode(self._exchange(data), type=RenderResult)
        if result.error is None:
            return result.text
        failure = make_error(result.error_kind, result.error)
        if isinstance(failure, RequestError):
            failure.param = result.param
        raise failure

    def _exchange(self, data: bytes) -> bytes:
        """Send a request and wait for its answer."""
        with self._lock:
            return self._exchange_alone(data)

    def _exchange_alone(self, data: bytes) -> bytes:
        for last in (False, True):
            connection = self._connect()
            try:
                send(connection, data)
                answer = receive(connection)
            except TimeoutError:
                self._end()
                raise ModelError(
                    "The chat template was stopped: no answer arrived within "
                    f"{_MAX_WAIT_SECONDS:g} s."
                ) from None
            except OSError:
                answer = None
            if answer is not None:
                return answer
            code = self._end()
            if code == -signal.SIGPROF:
                raise RequestError(
                    "The chat template was stopped: rendering took more than "
                    f"{MAX_RENDER_SECONDS:g} s of processor time.",
                    "messages",
                )
            if code != -signal.SIGKILL or last:  # SIGKILL: not the template's fault
                break
        raise ModelError(f"The process that renders chat templates ended with status {code}.")

    def _connect(self) -> socket.socket:
        """Return the socket of a live process."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "octavo.text.template_process",
                        str(MAX_RENDER_SECONDS),
                        str(MAX_RENDER_BYTES),
                    ],
                    stdin=theirs.fileno(),
                    process_group=0,  # a Ctrl-C in the terminal is for the parent, from the start
                )
            # A thread always waits for the process, so it never stays a zombie.
            threading.Thread(target=self._process.wait, daemon=True).start()
        self._socket.settimeout(_MAX_WAIT_SECONDS)
        return self._socket

    def _end(self) -> int:
        """End the process; return its exit status."""
        if self._process is None or self._socket is None:
            return 0
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        self._process.kill()
        code = self._process.wait()
        self._process = self._socket = None
        return code


def _plain_container(value: object) -> object:
    """Convert a container that msgpack does not support."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"not a {type(value).__name__}")


def send(connection: socket.socket, message: bytes) -> None:
    """Send one message."""
    connection.sendall(len(message).to_bytes(_LENGTH_BYTES, "little"))
    connection.sendall(message)


def receive(connection: socket.socket) -> bytes | None:
    """Return the next message; None at the end.

    Raises:
        TimeoutError: the socket has a timeout, and the message was not complete in that time.
    """
    head = _receive_exactly(connection, _LENGTH_BYTES)
    return None if head is None else _receive_exactly(connection, int.from_bytes(head, "little"))


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    timeout = connection.gettimeout()
    deadline = None if timeout is None else time.monotonic() + timeout
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        count = connection.recv_into(view[got:])
        if not count:
            return None
        got += count
    return bytes(data)
