"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.outputs import CompletionOutput
from octavo.parsers.parts import CallArguments, CallStart, Part, Reasoning
from octavo.sampling_params import SamplingParams
from octavo.server import answers, anthropic_answers
from octavo.server.anthropic_schema import (
    CountTokensBody,
    MessagesBody,
    renamed,
    without_client_noise,
)
from octavo.server.body import read_model
from octavo.server.call import unanswered_options
from octavo.server.chat import ChatCompletion, count_prompt_tokens, read_chat
from octavo.server.errors import anthropic_error_event
from octavo.server.generation import EventStream, stopped_by_guard
from octavo.server.middleware import context_of
from octavo.server.resumable_streams import Events
from octavo.server.schema import ChatBody
from octavo.server.state import state_of
from octavo.system.offload import offload
from octavo.text.markers import marker_tokens

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}

encode = msgspec.json.encode


async def create_message(request: Request) -> Response:
    """Write the next message of a chat."""
    limit = state_of(request).max_chat_bytes
    body = await read_model(request, MessagesBody, limit)
    return await MessageAnswer.respond(request, await _to_chat(request, body))


async def count_tokens(request: Request) -> Response:
    """Return the number of tokens of a chat."""
    state = state_of(request)
    given = await read_model(request, CountTokensBody, state.max_chat_bytes)
    context = context_of(request)

    await state.find_model(request, given.model)

    async def count() -> int:
        body = await _to_chat(request, given)
        with state.admit(1, "messages", state.tenant(context.api_key)):
            engine = await state.get_engine()
            tokenizer = state.tokenizer(engine, "messages")
            options = unanswered_options(state, context, body.cache_salt)
            reading = await read_chat(body, engine, state, context.body_bytes, options)
            return await count_prompt_tokens(reading, engine, tokenizer, options)

    deadline = state.deadline(context.arrival, context.deadline_ms)
    num_tokens = await state.run(request.receive, count(), deadline)
    return answers.respond(anthropic_answers.InputTokens(input_tokens=num_tokens))


async def _to_chat(request: Request, body: CountTokensBody) -> ChatBody:
    """Return a body as that of a chat completion.

    Raises:
        RequestError: a field is wrong; the error has Anthropic's name of it.
    """
    context = context_of(request)
    if state_of(request).config.strip_client_noise and body.system is not None:
        kept = without_client_noise(body.system)
        if kept != body.system:
            body.system = kept
            context.stripped.append("system")
    try:
        return await offload(context.body_bytes // 100, body.to_chat)
    except RequestError as error:
        raise renamed(error) from None


class MessageAnswer(ChatCompletion):
    """One request of the Messages API."""

    id_prefix = "msg"
    reports_cache_misses = False

    def stream(self) -> Response:
        """Return the answer as a stream; it ends with its connection."""
        return EventStream(
            self.state, self.events(), self.deadline, last=b"", write_error=anthropic_error_event
        )

    async def answer(self) -> Response:
        """Return the whole answer."""
        (completion,) = (await self._last_output()).outputs
        explanation = await self.explanation()

        def whole() -> bytes:
            blocks = _Blocks(self)
            for part in self._parse(0, completion):
                blocks.add(part)
            return encode({**self._message(blocks.whole(), completion), **explanation})

        written = await offload(len(completion.text), whole)
        return Response(written, media_type="application/json")

    async def _complete_guard(self, engine: AsyncLLM, params: SamplingParams) -> None:
        """Add the limits of reasoning; a budget that the model cannot have is left out."""
        await super()._complete_guard(engine, params)
        if params.thinking_token_budget is None:
            return
        markers, tokenizer = params.reasoning_markers, engine.tokenizer
        if markers is None or tokenizer is None or not marker_tokens(tokenizer, markers)[1]:
            params.thinking_token_budget = None
            self.context.ignored_fields.append("thinking.budget_tokens")

    def _blamed(self, error: RequestError) -> RequestError:
        """Set the field of the body that caused an engine's error; return the error."""
        return renamed(super()._blamed(error))

    async def events(self) -> Events:
        """Yield the server-sent events of the answer."""
        blocks = _Blocks(self)
        completion: CompletionOutput | None = None
        async with aclosing(self._outputs()) as stream:
            async for _, output in stream:
                if completion is None:
                    yield [_event({"type": "message_start", "message": self._message([], None)})]
                (completion,) = output.outputs
                made = await offload(len(completion.text), self._events_of, completion, blocks)
                if made:
                    yield made
        assert completion is not None
        ended = self._message([], completion)
        delta = {name: ended[name] for name in ("stop_reason", "stop_sequence")}
        usage = {"type": "message_delta", "delta": delta, "usage": ended["usage"]}
        stop = {"type": "message_stop", **await self.explanation()}
        yield [*map(_event, [*blocks.close(), usage, stop])]

    def _events_of(self, completion: CompletionOutput, blocks: _Blocks) -> list[bytes]:
        """Return the events of the new parts of the answer."""
        parts = self._parse(0, completion)
        return [_event(event) for part in parts for event in blocks.add(part)]

    def _message(
        self, content: list[dict[str, Any]], completion: CompletionOutput | None
    ) -> dict[str, Any]:
        """Return the message; without `completion`, as it is when its stream begins."""
        reason, stop = None, None
        if completion is not None:
            finish = self.finish_reason(0, completion)
            reason = _STOP_REASONS.get(finish or "", "end_turn")
            stopped = finish == "stop" and not stopped_by_guard(completion)
            if stopped and isinstance(completion.stop_reason, str):
                reason, stop = "stop_sequence", completion.stop_reason
        usage = self.usage.to_dict(0 if completion is None else None)
        details = usage["prompt_tokens_details"]
        cached = 0 if details is None else details["cached_tokens"]
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._envelope["model"],
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": {
                "input_tokens": usage["prompt_tokens"] - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": usage["completion_tokens"],
            },
        }


class _Blocks:
    """Content blocks of a message, made from the parts of the answer.

    Args:
        answer: makes the ids of calls, and counts them.
    """

    def __init__(self, answer: MessageAnswer) -> None:
        self._answer = answer
        self._pieces: list[tuple[dict[str, Any], list[str]]] = []
        """Each block without its text, and the pieces of its text."""
        self._kind: type[Part] | None = None
        """Kind of the block that is open."""

    def add(self, part: Part) -> Iterable[dict[str, Any]]:
        """Add a part; return the events that tell it to a client."""
        events: list[dict[str, Any]] = []
        kind = type(part)
        if kind is CallArguments:
            delta = {"type": "input_json_delta", "partial_json": part.text}
        elif isinstance(part, CallStart):
            events += self.close()
            block = {
                "type": "tool_use",
                "id": self._answer.begin_call(0, part),
                "name": part.text,
                "input": {},
            }
            events.append(self._open(kind, block))
            return events
        else:
            if kind is not self._kind:
                events += self.close()
                block = {"type": "text", "text": ""}
                if kind is Reasoning:
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                events.append(self._open(kind, block))
            delta = {"type": "text_delta", "text": part.text}
            if kind is Reasoning:
                delta = {"type": "thinking_delta", "thinking": part.text}
        self._pieces[-1][1].append(part.text)
        index = len(self._pieces) - 1
        return [*events, {"type": "content_block_delta", "index": index, "delta": delta}]

    def _open(self, kind: type[Part], block: dict[str, Any]) -> dict[str, Any]:
        self._kind = kind
        self._pieces.append((block, []))
        index = len(self._pieces) - 1
        return {"type": "content_block_start", "index": index, "content_block": block}

    def close(self) -> list[dict[str, Any]]:
        """Return the events that end the open block."""
        if self._kind is None:
            return []
        index = len(self._pieces) - 1
        events: list[dict[str, Any]] = []
        if self._kind is Reasoning:
            delta = {"type": "signature_delta", "signature": ""}
            events.append({"type": "content_block_delta", "index": index, "delta": delta})
        self._kind = None
        return [*events, {"type": "content_block_stop", "index": index}]

    def whole(self) -> list[dict[str, Any]]:
        """Return the blocks with their texts."""
        blocks = []
        for block, pieces in self._pieces:
            text = "".join(pieces)
            if block["type"] == "tool_use":
                block = block | {"input": _parse_input(text)}
            else:
                block = block | {block["type"]: text}
            blocks.append(block)
        return blocks


def _parse_input(text: str) -> Any:
    """Return the input of a call; {} if its text is cut. A stream has the cut text."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _event(data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), encode(data))
