"""Sources of answers: a model in this process, or a server. Both return text and figures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from octavo.server.usage import Usage
from octavo.terminal.screen import note, show

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.outputs import RequestOutput
    from octavo.sampling_params import SamplingParams

Message = dict[str, str]


class Source(Protocol):
    """Source of answers; `octavo.server.client.Client` is one."""

    model: str
    """Name of the model."""
    usage: Usage | None
    """Tokens of the latest answer, as far as known."""
    defaults: dict[str, Any]
    """The model's own sampling parameters by name, as far as known."""

    def chat(self, messages: Sequence[Message], params: dict[str, Any]) -> Iterator[str]:
        """Stream the answer to a chat, with sampling parameters by name."""

    def complete(self, prompt: str, params: dict[str, Any]) -> Iterator[str]:
        """Stream the continuation of a text."""


class LocalModel:
    """Model in this process as a `Source`."""

    def __init__(self, llm: LLM, name: str) -> None:
        self.model = name
        self.usage: Usage | None = None
        self._llm = llm
        # Without a limit on the number of tokens, instead of the API's 16.
        self._default = msgspec.structs.replace(llm.get_default_sampling_params(), max_tokens=None)
        self.defaults = msgspec.structs.asdict(self._default)

    def chat(self, messages: Sequence[Message], params: dict[str, Any]) -> Iterator[str]:
        """Implement `Source`."""
        text = self._llm.render_chat(messages)
        return self._text(self._llm.stream(text, self._params(params), add_special_tokens=False))

    def complete(self, prompt: str, params: dict[str, Any]) -> Iterator[str]:
        """Implement `Source`."""
        return self._text(self._llm.stream(prompt, self._params(params)))

    def _params(self, given: dict[str, Any]) -> SamplingParams:
        return msgspec.structs.replace(self._default, **given)

    def _text(self, outputs: Iterator[RequestOutput]) -> Iterator[str]:
        num_tokens = 0
        self.usage = None
        with closing(outputs):  # type: ignore[type-var]  # it is a generator
            for output in outputs:
                answer = output.outputs[0]
                num_tokens += len(answer.token_ids)
                num_prompt = len(output.prompt_token_ids)
                self.usage = Usage(num_prompt, num_tokens, output.num_cached_tokens)
                yield answer.text


def show_answer(source: Source, pieces: Iterator[str]) -> tuple[str, bool]:
    """Show an answer as it arrives, then a line of figures.

    Ctrl-C only ends the answer.

    Args:
        source: source of the answer.
        pieces: text of the answer.

    Returns:
        The text, and True if Ctrl-C ended it.
    """
    begin = time.monotonic()
    first: float | None = None
    parts: list[str] = []

    def timed() -> Iterator[str]:
        nonlocal first
        for piece in pieces:
            if piece and first is None:
                first = time.monotonic()
            parts.append(piece)
            yield piece

    stopped = False
    try:
        with closing(pieces):  # type: ignore[type-var]  # it is a generator
            show(timed())
    except KeyboardInterrupt:
        stopped = True
    end = time.monotonic()
    note(_figures(source.usage, begin, first, end, stopped))
    return "".join(parts), stopped


def _figures(
    usage: Usage | None, begin: float, first: float | None, end: float, stopped: bool
) -> str:
    """Format `[12 tokens | first token 30 ms | 40.1 tokens/s | 16 of 20 prompt tokens cached]`."""
    facts = ["stopped"] if stopped else []
    if usage is not None:
        facts.append(f"{usage.completion_tokens} tokens")
    if first is not None:
        facts.append(f"first token {(first - begin) * 1000:.0f} ms")
        if usage is not None:
            seconds = end - first
            rate = f"{(usage.completion_tokens - 1) / seconds:.1f}" if seconds > 0 else "-"
            facts.append(f"{rate} tokens/s")
    if usage is not None and usage.cached_tokens is not None:
        facts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
    elif usage is not None:
        facts.append(f"{usage.prompt_tokens} prompt tokens")
    return f"[{' | '.join(facts) or 'no answer'}]"
