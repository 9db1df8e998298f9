"""POST /api/chat and /api/generate: Ollama's API."""

from __future__ import annotations

import time
from abc import abstractmethod
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.parsers.parts import CallArguments, CallStart, Part, Reasoning, Text
from octavo.server import answers
from octavo.server.body import read_model
from octavo.server.chat import ChatCompletion
from octavo.server.errors import ollama_error_json, show
from octavo.server.generation import EventStream, Reading, make_sampling_params
from octavo.server.middleware import context_of
from octavo.server.ollama_answers import CalledTool, OllamaToolCall
from octavo.server.ollama_models import served_name
from octavo.server.ollama_schema import (
    OPTION_NAMES,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
)
from octavo.server.parts import fold
from octavo.server.resumable_streams import Events
from octavo.server.state import state_of
from octavo.system.offload import offload

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM
    from octavo.server.schema import ChatBody

MEDIA_TYPE = "application/x-ndjson"

encode = msgspec.json.encode


async def create_ollama_chat(request: Request) -> Response:
    """Write the next message of a chat."""
    limit = state_of(request).max_chat_bytes
    body = await read_model(request, OllamaChatBody, limit)
    return await _respond(request, OllamaChat, body, empty=not body.messages)


async def create_ollama_generation(request: Request) -> Response:
    """Answer a prompt, or continue it."""
    limit = state_of(request).max_chat_bytes
    body = await read_model(request, OllamaGenerateBody, limit)
    return await _respond(request, OllamaGeneration, body, empty=not body.prompt)


async def _respond(
    request: Request, kind: type[OllamaAnswer], body: OllamaBody, *, empty: bool
) -> Response:
    """Answer a body, as a stream or at once; answer an empty body once the model is loaded."""
    state = state_of(request)
    model = served_name(state, body.model)
    if empty:
        await state.get_engine()
        loaded = {**_head(body), **kind.part("", "", []), "done": True, "done_reason": "load"}
        return Response(
            encode(loaded) + b"\n", media_type=MEDIA_TYPE if body.streams else "application/json"
        )
    try:
        work = context_of(request).body_bytes // 8
        answer = kind(request, await offload(work, body.to_chat, model), body)
    except RequestError as error:
        raise _renamed(error) from None
    if body.streams:
        return answer.stream()
    return await state.run(request.receive, answer.answer(), answer.deadline)


def _head(body: OllamaBody) -> dict[str, Any]:
    created = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": body.model, "created_at": created}


def _renamed(error: RequestError) -> RequestError:
    """Return an error about a field of a chat as one about Ollama's field."""
    param = error.param or ""
    name = f"options.{OPTION_NAMES[param]}" if param in OPTION_NAMES else param
    if param == "response_format" or param.startswith("response_format."):
        name = "format"
    if name == param:
        return error
    named = error.message.startswith(param)
    message = name + error.message.removeprefix(param) if named else f"{name}: {error.message}"
    return RequestError(message, name, error.code)


class OllamaAnswer(ChatCompletion):
    """One request of Ollama's API.

    Args:
        request: the request.
        chat: the body as that of a chat.
        asked: the body.
    """

    id_prefix = "ollama"
    reports_cache_misses = False

    def __init__(self, request: Request, chat: ChatBody, asked: OllamaBody) -> None:
        super().__init__(request, chat)
        self.asked = asked
        self._call: tuple[str, CallStart, list[str]] | None = None
        """Id, beginning and pieces of the arguments of the call that is being written."""
        self._num_whole_calls = 0

    @staticmethod
    @abstractmethod
    def part(content: str, thinking: str, calls: list[OllamaToolCall]) -> dict[str, Any]:
        """Return the fields of a new part of the answer."""

    async def read(self, engine: AsyncLLM) -> Reading:
        """Return the request for the engine; see `Generation.read`."""
        await self._check(engine)
        return await super().read(engine)

    async def _check(self, engine: AsyncLLM) -> None:
        """Raise RequestError for fields that the engine or the model does not support."""
        options, limit = self.asked.options, engine.max_model_len
        if options is not None and options.num_ctx is not None:
            if options.num_ctx > limit:
                raise RequestError(
                    f"options.num_ctx={options.num_ctx} is more than the context of this server, "
                    f"{limit} tokens; give at most {limit}, or leave it out.",
                    "options.num_ctx",
                )
            if options.num_ctx < limit:
                self.context.ignored_fields.append("options.num_ctx")
        if self.asked.think:
            tokenizer = self.state.tokenizer(engine, "messages")
            found = await self.state.answer_format(tokenizer)
            if found is None or found.thoughts is None:
                raise RequestError(
                    f"think={show(self.asked.think)}: {self.asked.model} does not support "
                    "thinking, as its chat template shows no reasoning; leave think out, or start "
                    "the server with --reasoning-parser.",
                    "think",
                )

    def _blamed(self, error: RequestError) -> RequestError:
        return _renamed(super()._blamed(error))

    def stream(self) -> Response:
        """Return the answer as lines of JSON; the stream ends with its connection."""
        return EventStream(
            self.state,
            self.events(),
            self.deadline,
            last=b"",
            write_error=lambda error: ollama_error_json(error) + b"\n",
            media_type=MEDIA_TYPE,
        )

    async def answer(self) -> Response:
        """Return the whole answer."""
        last = await self._last_output()
        (completion,) = last.outputs
        part = self._new_part(completion)
        return answers.respond({**_head(self.asked), **part, **await self._end(last, completion)})

    async def events(self) -> Events:
        """Yield the lines of the stream."""
        last: tuple[RequestOutput, CompletionOutput] | None = None
        async with aclosing(self._outputs()) as stream:
            async for _, output in stream:
                (completion,) = output.outputs
                last = output, completion
                part = self._new_part(completion)
                if part != self.part("", "", []):
                    yield [encode({**_head(self.asked), **part, "done": False}) + b"\n"]
        assert last is not None
        end = {**_head(self.asked), **self.part("", "", []), **await self._end(*last)}
        yield [encode(end) + b"\n"]

    def _new_part(self, completion: CompletionOutput) -> dict[str, Any]:
        """Return the fields of the new part of the answer: texts, whole calls and logprobs."""
        parts: list[Part] = []
        calls: list[OllamaToolCall] = []
        for part in self._parse(0, completion):
            if isinstance(part, CallArguments):
                assert self._call is not None
                self._call[2].append(part.text)
                continue
            self._end_call(parts, calls)
            if isinstance(part, CallStart):
                self._call = self.begin_call(0, part), part, []
            else:
                parts.append(part)
        if completion.finish_reason is not None:
            self._end_call(parts, calls)
        texts = fold(parts)
        written = self.part(texts.get(Text, ""), texts.get(Reasoning, ""), calls)
        logprobs = self._logprobs(completion) if completion.token_ids else None
        if logprobs is not None:
            written["logprobs"] = logprobs["content"]
        return written

    def _end_call(self, parts: list[Part], calls: list[OllamaToolCall]) -> None:
        """Add the call that is being written to `calls`; one without whole arguments is text."""
        if self._call is None:
            return
        call_id, start, pieces = self._call
        self._call = None
        text = "".join(pieces)
        arguments = _parse_arguments(text)
        if arguments is None:
            parts.append(Text(start.text + text))
            return
        function = CalledTool(index=self._num_whole_calls, name=start.text, arguments=arguments)
        self._num_whole_calls += 1
        calls.append(OllamaToolCall(id=call_id, function=function))

    async def _end(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """Return the last fields of the answer."""
        times, arrival = output.metrics, self.context.arrival
        scheduled, first = times.first_scheduled_time, times.first_token_time
        return {
            "done": True,
            "done_reason": "length" if completion.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(arrival, time.monotonic()),
            "load_duration": _nanoseconds(arrival, scheduled),
            "prompt_eval_count": self.usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(scheduled, first),
            "eval_count": self.usage.completion_tokens,
            "eval_duration": _nanoseconds(first, times.last_token_time),
            **await self.explanation(),
        }


class OllamaChat(OllamaAnswer):
    """One request of /api/chat."""

    @staticmethod
    def part(content: str, thinking: str, calls: list[OllamaToolCall]) -> dict[str, Any]:
        """Return the fields of a new part of the answer; see `OllamaAnswer.part`."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class OllamaGeneration(OllamaAnswer):
    """One request of /api/generate."""

    prompt_param = "prompt"
    asked: OllamaGenerateBody

    @staticmethod
    def part(content: str, thinking: str, calls: list[OllamaToolCall]) -> dict[str, Any]:
        """Return the fields of a new part of the answer; see `OllamaAnswer.part`."""
        return {"response": content, **({"thinking": thinking} if thinking else {})}

    async def read(self, engine: AsyncLLM) -> Reading:
        """Return the request for the engine; see `Generation.read`.

        As with Ollama, a model without a chat template continues the prompt.
        """
        asked, body = self.asked, self.body
        template = await self.state.chat_template(self.state.tokenizer(engine, "prompt"))
        if not asked.raw and (template.available or asked.system):
            return await super().read(engine)
        await self._check(engine)
        params = await make_sampling_params(
            body,
            self.context.body_bytes,
            {"max_tokens": None, **engine.spec.generation_config},
            max_tokens=body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        return Reading([asked.prompt or ""], params, add_special_tokens=True)


def _parse_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call; None if they are not a whole object."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _nanoseconds(begin: float | None, end: float | None) -> int:
    """Return the time between two seconds of `time.monotonic`; 0 if one is unknown."""
    return 0 if begin is None or end is None else max(0, int((end - begin) * 1e9))
