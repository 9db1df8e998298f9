"""Rendering of chat templates by a separate process, which this module starts and keeps.

`text/template_process.py` is the other side, and explains the reason. The first render starts the
process, which serves all templates of this one. If it ends, the next render starts another.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from octavo.errors import ModelError, RequestError, make_error
from octavo.system.limited_process import LimitedProcess, ProcessEndedError

MAX_RENDER_SECONDS = 2.0
"""Limit of the processor time of one render."""
MAX_RENDER_BYTES = 512 * 2**20
"""Limit of the process' address space, which is about 40 MiB when idle."""
# A render that waits for a busy machine may take longer than one that computes.
_MAX_WAIT_SECONDS = 10.0


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
    placeholders: dict[str, str] = {}
    """Texts that stand for media, by modality, for templates that write none themselves. Only
    contents with parts {"type": modality} need them."""


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
        self._process = LimitedProcess("octavo.text.template_process")

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
        self._process.end()

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

    def _exchange(self, data: bytes) -> memoryview:
        """Send a request and wait for its answer."""
        with self._lock:
            try:
                return self._process.exchange(
                    [data], [MAX_RENDER_SECONDS, MAX_RENDER_BYTES], _MAX_WAIT_SECONDS
                )
            except TimeoutError:
                raise ModelError(
                    "The chat template was stopped: no answer arrived within "
                    f"{_MAX_WAIT_SECONDS:g} s."
                ) from None
            except ProcessEndedError as error:
                if error.code == -signal.SIGPROF:
                    raise RequestError(
                        "The chat template was stopped: rendering took more than "
                        f"{MAX_RENDER_SECONDS:g} s of processor time.",
                        "messages",
                    ) from None
                raise ModelError(
                    f"The process that renders chat templates ended with status {error.code}."
                ) from None


def _plain_container(value: object) -> object:
    """Convert a container that msgpack does not support."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"not a {type(value).__name__}")
