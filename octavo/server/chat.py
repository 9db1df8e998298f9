"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError, UnsupportedError
from octavo.frontend.open_media import check_processor_kwargs
from octavo.media.content import MediaItem, MediaKind, Modality, read_media, with_media_io
from octavo.messages import RequestOptions
from octavo.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.parsers.answer import AnswerParser, Format
from octavo.parsers.bare_calls import has_bare_calls
from octavo.parsers.detect import schemas_of, without_notes
from octavo.parsers.parts import CallArguments, CallStart, Part, Reasoning, Role, Text
from octavo.sampling_params import StructuredOutputsParams
from octavo.server import generation_answers
from octavo.server.body import read_model
from octavo.server.chat_messages import AllowedTools, Message, NamedTool, Tool, ToolCall
from octavo.server.generation import (
    Generation,
    Prompt,
    Reading,
    finite,
    make_sampling_params,
    prompt_logprobs_json,
    prompt_text,
    raw,
    stopped_by_guard,
)
from octavo.server.parts import Delta, fold
from octavo.server.recent_prompts import message_at
from octavo.server.schema import BatchChatBody, ChatBody, ChatFields
from octavo.server.state import ServerState, state_of
from octavo.system.offload import offload
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import MAX_TOKENS, Tokenizer

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM
    from octavo.frontend.chat_media import ChatMedia


async def create_chat_completion(request: Request) -> Response:
    """Write the next message of a chat."""
    limit = state_of(request).max_chat_bytes
    return await ChatCompletion.respond(request, await read_model(request, ChatBody, limit))


async def create_batch_chat_completion(request: Request) -> Response:
    """Write the next message of several chats; the choices are in the order of the chats."""
    limit = state_of(request).max_chat_bytes
    return await ChatCompletion.respond(request, await read_model(request, BatchChatBody, limit))


class RenderedChat(NamedTuple):
    """Chat as the template wrote it."""

    pieces: list[str]
    """Pieces of the text that are tokenised separately; nearly always one."""
    items: list[MediaItem]
    """Media, in the order of their placeholders in the text."""

    @property
    def text(self) -> str:
        """Whole text."""
        return "".join(self.pieces)


async def render_messages(
    template: ChatTemplate,
    messages: list[Message],
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: dict[str, Any] | None,
    tools: list[Tool] | None = None,
    documents: list[dict[str, str]] | None = None,
    kinds: Mapping[Modality, MediaKind] | None = None,
) -> RenderedChat:
    """Return the prompt of a chat.

    Args:
        template: the chat template.
        messages: the chat so far. "developer" is OpenAI's newer name of "system".
        add_generation_prompt: start the answer; default: `not continue_final_message`.
        continue_final_message: leave the last message open, so that the answer continues it.
        template_kwargs: additional variables for the template.
        tools: definitions of tools, for templates that support them.
        documents: texts for retrieval, for templates that support them.
        kinds: the media that the model reads; None: none.

    Raises:
        UnsupportedError: the model does not read the media of the chat.
        RequestError: the template rejects the chat, omits its tool calls, or exceeds its limits of
            time or memory.
        ModelError: the template is broken.
    """
    num_calls = sum(len(message.tool_calls or ()) for message in messages)
    plain = await offload(len(messages) + num_calls, _plain_messages, messages)
    # Texts are searched for placeholders.
    length = 0 if kinds is None else sum(len(message.text) for message in messages)
    chat = await offload(length // 100, read_media, plain, kinds or {})
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    rendered = await asyncio.wrap_future(
        template.submit(
            chat.messages,
            tools=chat.protect([_plain_tool(tool) for tool in tools or []]),
            documents=chat.protect(documents),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=bool(continue_final_message),
            template_kwargs=chat.protect(template_kwargs),
            may_drop_tool_calls=False,
            placeholders={name: kind.placeholder for name, kind in (kinds or {}).items()},
        )
    )
    return RenderedChat(await offload(len(rendered), chat.split, rendered), chat.items)


async def read_chat(
    body: ChatFields,
    engine: AsyncLLM,
    state: ServerState,
    num_bytes: int,
    options: RequestOptions,
    preserved: list[int] | None = None,
) -> Reading:
    """Convert a body of `num_bytes` bytes to a request for an engine.

    Args:
        body: the body.
        engine: the engine.
        state: state of the server.
        num_bytes: size of the body.
        options: envelope of its requests.
        preserved: special tokens that belong to the format of answers.

    Raises:
        RequestError: the body cannot be turned into a request for this engine.
    """
    tokenizer = state.tokenizer(engine, "messages")
    limit = state.engine_config.model.max_logprobs
    asked = body.top_logprobs or 0
    if 0 <= limit < (engine.spec.vocab_size if asked == -1 else asked):
        raise RequestError(
            f"top_logprobs={body.top_logprobs} is more than this server allows: {limit} "
            "(--max-logprobs).",
            "top_logprobs",
        )
    given_limit = body.max_completion_tokens
    if given_limit is None:
        given_limit = body.max_tokens
    params = await make_sampling_params(
        body,
        num_bytes,
        # Without a limit the answer may fill the context.
        {"max_tokens": None, **engine.spec.generation_config},
        max_tokens=given_limit,
        preserved_token_ids=preserved,
        logprobs=asked if body.logprobs and not body.logprob_token_ids else None,
    )
    template = await state.chat_template(tokenizer)
    without_tools = body.tool_choice == "none" and state.config.exclude_tools_when_tool_choice_none
    prompts: list[Prompt] = []
    media = engine.chat_media
    settings = read_media_settings(media, body.mm_processor_kwargs, body.media_io_kwargs)
    with collect_media(engine, options) as add:
        for messages in body.conversations:
            rendered = await render_messages(
                template,
                messages,
                body.add_generation_prompt,
                body.continue_final_message,
                state.template_kwargs(body.chat_template_kwargs, body.reasoning_effort),
                None if without_tools else body.tools,
                body.documents,
                None if media is None else media.kinds,
            )
            prompts.append(await read_chat_media(engine, rendered, settings, options, add))
    # The template writes the special tokens itself.
    return Reading(prompts, params, bool(body.add_special_tokens))


def read_media_settings(
    media: ChatMedia | None,
    mm_processor_kwargs: Mapping[str, Any] | None,
    media_io_kwargs: Mapping[str, Any] | None,
) -> Mapping[str, Any] | None:
    """Return the settings of the processors of media for a chat, with or without media.

    Raises:
        UnsupportedError: the model does not read the media that they are for.
        RequestError: a setting is wrong.
    """
    if frames := with_media_io(None, media_io_kwargs):
        if media is None or "video" not in media.kinds:
            raise UnsupportedError(
                "media_io_kwargs.video is not supported by this model, which reads no videos; "
                "leave it out.",
                "media_io_kwargs",
            )
        try:
            media.check_settings(frames)
        except RequestError as error:
            message = error.message.replace("mm_processor_kwargs", "media_io_kwargs.video")
            raise RequestError(message, "media_io_kwargs") from None
    settings = with_media_io(mm_processor_kwargs, media_io_kwargs)
    check_processor_kwargs(media, settings)
    return settings


def collect_media(
    engine: AsyncLLM, options: RequestOptions
) -> AbstractContextManager[Callable[[int], None]]:
    """Count the media of all chats of a request, until the engine counts the request's memory.

    Returns:
        A context with a function that adds bytes; see `RequestMemory.collect`.
    """
    return engine.request_memory.collect("media", None if options.background else options.tenant)


async def read_chat_media(
    engine: AsyncLLM,
    rendered: RenderedChat,
    mm_processor_kwargs: Mapping[str, Any] | None,
    options: RequestOptions,
    add_nbytes: Callable[[int], None],
) -> Prompt:
    """Return the prompt of a rendered chat, with its media; a text if it has none.

    Args:
        engine: the engine.
        rendered: the chat.
        mm_processor_kwargs: settings of the processors.
        options: envelope of the request.
        add_nbytes: counts the media; see `collect_media`.

    Raises:
        RequestError: a file cannot be had or read.
    """
    media = engine.chat_media
    if media is None or (not rendered.items and len(rendered.pieces) == 1):
        return rendered.text
    return await media.read_prompt(
        rendered.pieces,
        rendered.items,
        mm_processor_kwargs,
        add_nbytes,
        options.share,
        options.cache_salt,
    )


async def count_prompt_tokens(
    reading: Reading, engine: AsyncLLM, tokenizer: Tokenizer, options: RequestOptions
) -> int:
    """Return the number of tokens of a request's only prompt.

    Raises:
        RequestError: the prompt is wrong, or much longer than the context.
    """
    (prompt,) = reading.prompts
    special = reading.add_special_tokens
    if isinstance(prompt, str):
        most = max(engine.max_model_len, MAX_TOKENS)
        return len(await offload(len(prompt), tokenizer.encode, prompt, special, most))
    request, _ = await engine.process(prompt, reading.params, "count", options, special)
    return len(request.prompt_token_ids)


def _plain_messages(messages: list[Message]) -> list[dict[str, object]]:
    plain: list[dict[str, object]] = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        plain.append({"role": role, "content": message.content})
        if message.name is not None:
            plain[-1]["name"] = message.name
        reasoning = message.reasoning_content or message.reasoning
        if reasoning is not None:
            plain[-1]["reasoning_content"] = plain[-1]["reasoning"] = reasoning
        if message.tool_calls:
            plain[-1]["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            plain[-1]["tool_call_id"] = message.tool_call_id
    return plain


def _plain_call(call: ToolCall) -> dict[str, object]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {
        **({} if call.id is None else {"id": call.id}),
        "type": call.type,
        "function": function,
    }


def _plain_tool(tool: Tool) -> dict[str, object]:
    return {"type": tool.type, "function": tool.function.model_dump(exclude_unset=True)}


def _thinks(answer_format: Format, prompt: Prompt) -> bool:
    """Return True if a prompt ends inside of reasoning."""
    text = prompt_text(prompt)
    return text is not None and answer_format.opens_thoughts(text)


def _whole_calls(calls: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return calls without their numbers."""
    return [{key: call[key] for key in ("id", "type", "function")} for call in calls]


class ChatCompletion(Generation[ChatFields]):
    """One request; its choices are numbered chat by chat."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    prompt_param = "messages"

    def __init__(self, request: Request, body: ChatFields) -> None:
        super().__init__(request, body)
        # If no answer is opened, the new text belongs to the last message.
        opened = body.add_generation_prompt
        if opened is None:
            opened = not body.continue_final_message
        last = [messages[-1] for messages in body.conversations]
        role = self.state.config.response_role
        self._roles = [role if opened else message.role for message in last]
        """Role of the answers to each chat."""
        self._echoed = [
            message.text if body.echo and message.role == role else ""
            for message, role in zip(last, self._roles, strict=True)
        ]
        """Texts of the last messages, to send before the answers."""
        self._makes_ids = False
        """True: calls get ids of the server, because a grammar wrote those of the model."""
        self._ids: set[str] = set()
        """Ids that the model wrote."""
        self._called: set[int] = set()
        """Choices with the one call of the older form, whose further calls are left out."""
        self._num_calls: dict[int, int] = {}
        """Number of the calls of tools in each choice so far."""
        if not (body.logprobs or body.return_token_ids):
            self.text_chunk = (
                b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}'
            )

    @property
    def num_prompts(self) -> int:
        """Number of chats: each is one prompt."""
        return len(self.body.conversations)

    async def read(self, engine: AsyncLLM) -> Reading:
        """Return the request for the engine; see `Generation.read`."""
        tokenizer = self.state.tokenizer(engine, "messages")
        answer_format = await self.state.answer_format(tokenizer)
        tools = self.body.callable_tools
        if tools and (answer_format is None or answer_format.calls is None):
            field = "functions" if self.body.functions else "tools"
            choice = "function_call" if self.body.functions else "tool_choice"
            raise RequestError(
                f"{field} need a model whose chat template shows how it calls tools, unlike this "
                f'one\'s; send {choice}="none", or start the server with --tool-call-parser.',
                field,
            )
        num_bytes, options = self.context.body_bytes, self.options(0, None)
        if answer_format is None or not (tools or answer_format.thoughts):
            return await read_chat(self.body, engine, self.state, num_bytes, options)
        preserved = self.state.special_ids(tokenizer, answer_format)
        reading = await read_chat(self.body, engine, self.state, num_bytes, options, preserved)
        schemas = schemas_of([_plain_tool(tool) for tool in tools]) if tools else None
        self._parse_with(answer_format, schemas, reading.prompts)
        strict = next((tool for tool in tools if tool.function.strict), None)
        if schemas and reading.params.structured_outputs is None:
            required, form = self.body.must_call, None
            if tokenizer.has_bytes:
                form = await offload(
                    num_bytes // 4, self._form_of_calls, answer_format, schemas, reading.prompts
                )
                reading.params.structured_outputs = form
            elif required:
                raise RequestError(
                    "tool_choice needs a tokenizer whose tokens stand for fixed bytes, unlike this "
                    'model\'s; use tool_choice="auto".',
                    "tool_choice",
                )
            if strict is not None and form is None:
                raise self._strict_error(strict)
            self._makes_ids = required
        elif strict is not None:
            raise self._strict_error(strict)
        return reading

    def _strict_error(self, tool: Tool) -> RequestError:
        """Return the error of a strict tool whose calls no grammar can hold to its schema."""
        name = tool.function.name
        return RequestError(
            f"The function {name!r} is strict, but here no grammar can hold its calls to its "
            'schema; send tool_choice="required", or leave strict out.',
            "tools",
        )

    def _form_of_calls(
        self, answer_format: Format, schemas: Mapping[str, Any], prompts: Sequence[Prompt]
    ) -> StructuredOutputsParams | None:
        """Return the form that holds calls to their schemas; None if no grammar has it.

        Raises:
            RequestError: a schema is too large, or no grammar describes it.
        """
        choice, parallel = self.body.tool_choice, self.body.parallel_tool_calls is not False
        required = self.body.must_call
        if isinstance(choice, NamedTool):
            name, parallel = choice.function.name, False
            schemas = {name: schemas[name]}
        form = answer_format.structural_tag(
            {name: without_notes(schema) for name, schema in schemas.items()},
            required=required,
            parallel=parallel,
            thinks=_thinks(answer_format, prompts[0]),
        )
        if form is None:
            return None
        # xgrammar has no text that begins like no call.
        is_bare = not required and has_bare_calls(answer_format.calls)
        return StructuredOutputsParams(
            structural_tag=form,
            disable_any_whitespace=True,
            backend="llguidance" if is_bare else "auto",
        )

    def _parse_with(
        self,
        answer_format: Format,
        schemas: Mapping[str, Any] | None,
        prompts: Sequence[Prompt],
    ) -> None:
        """Split the answers into text, reasoning and calls of tools."""
        restricted = isinstance(self.body.tool_choice, AllowedTools)
        held = not self.body.must_call and any(
            tool.function.strict for tool in self.body.callable_tools
        )

        def make(prompt: int) -> AnswerParser:
            thinks = _thinks(answer_format, prompts[prompt])
            return AnswerParser(answer_format, schemas, thinks, restricted, held)

        self.make_parser = make

    def _blamed(self, error: RequestError) -> RequestError:
        """Set the field of the body that caused an engine's error; return the error."""
        error = super()._blamed(error)
        made = self.body.constraint() is None
        if made and error.param in ("structured_outputs", "structural_tag"):
            field = "functions" if self.body.functions else "tools"
            return RequestError(f"{field}: {error.message}", field, error.code)
        return error

    def message_at(self, text: str, position: int) -> int | None:
        """Return the index of the message at a character of the prompt."""
        (messages,) = self.body.conversations
        return message_at(text, [message.text for message in messages], position)

    def opening(self, prompt: int) -> list[list[Part]]:
        """Return the role, and the echo; see `Generation.opening`."""
        role: list[Part] = [Role(self._roles[prompt])]
        echoed = self._echoed[prompt]
        return [role, [Text(echoed)]] if echoed else [role]

    def prompt_fields(self, outputs: list[RequestOutput]) -> dict[str, object]:
        """Return the fields about the prompt; see `Generation.prompt_fields`."""
        output = outputs[0] if len(outputs) == 1 else None  # it has no field for several
        asked = output is not None and self.body.return_token_ids
        ids = output.prompt_token_ids if output is not None and asked else None
        if self.body.stream:
            return {"prompt_token_ids": ids}
        rows = None if output is None else output.prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs_json(rows), "prompt_token_ids": ids}

    def write(
        self, delta: Delta
    ) -> generation_answers.ChatChoice | generation_answers.ChatChunkChoice | None:
        """Return a choice; see `Generation.write`."""
        body, completion = self.body, delta.completion
        texts = fold(delta.parts)
        calls = self._write_calls(delta) if CallStart in texts or CallArguments in texts else []
        finish_reason = self.finish_reason(delta.index, completion)
        reasoning = texts.get(Reasoning) if body.include_reasoning is not False else None
        if not body.stream:
            message: dict[str, object] = {
                "role": texts[Role],
                "content": texts.get(Text, None if calls else ""),
                "refusal": None,
                "reasoning": reasoning,
            }
            if reasoning is not None:
                message["reasoning_content"] = reasoning
            if calls and body.functions:
                message["function_call"] = calls[0]["function"]
            elif calls:
                message["tool_calls"] = _whole_calls(calls)
            return {
                "index": delta.index,
                "message": cast("generation_answers.ChatMessage", message),
                "logprobs": self._logprobs(completion),
                "finish_reason": cast("generation_answers.ChatFinishReason", finish_reason),
                "stop_reason": completion.stop_reason,
                "token_ids": completion.token_ids if body.return_token_ids else None,
            }
        finished = completion.finish_reason is not None
        reports_tokens = bool(completion.token_ids) and (body.logprobs or body.return_token_ids)
        changes: dict[str, object] = {}
        if Role in texts:
            changes["role"] = texts[Role]
        if reasoning:
            changes["reasoning"] = changes["reasoning_content"] = reasoning
        if calls and body.functions:
            changes["function_call"] = calls[0]["function"]
        elif calls:
            changes["tool_calls"] = calls
        if not (changes or Text in texts or finished or reports_tokens):
            return None
        if Text in texts or not (reasoning or calls):
            changes["content"] = texts.get(Text, "")
        choice: generation_answers.ChatChunkChoice = {
            "index": delta.index,
            "delta": cast("generation_answers.ChatDelta", changes),
            "logprobs": self._logprobs(completion) if completion.token_ids else None,
            # The reason is in the chunk of the last text, as with vLLM.
            "finish_reason": cast("generation_answers.ChatFinishReason | None", finish_reason),
        }
        if finished:
            choice["stop_reason"] = completion.stop_reason
        if body.return_token_ids and (finished or completion.token_ids):
            choice["token_ids"] = completion.token_ids
        return choice

    def _write_calls(self, delta: Delta) -> list[dict[str, object]]:
        """Return the new parts of the calls of a choice, in OpenAI's form."""
        written: list[dict[str, object]] = []
        for part in delta.parts:
            if (
                isinstance(part, CallStart)
                and self.body.functions
                and self._num_calls.get(delta.index)
            ):
                self._called.add(delta.index)
            if delta.index in self._called:
                continue
            if isinstance(part, CallStart):
                call_id = self.begin_call(delta.index, part)
                number = self._num_calls[delta.index] - 1
                function = {"name": part.text, "arguments": ""}
                written.append(
                    {"index": number, "id": call_id, "type": "function", "function": function}
                )
            elif isinstance(part, CallArguments):
                number = self._num_calls[delta.index] - 1
                if written and written[-1]["index"] == number:
                    function = cast("dict[str, str]", written[-1]["function"])
                    function["arguments"] = function.get("arguments", "") + part.text
                else:
                    written.append({"index": number, "function": {"arguments": part.text}})
        return written

    def finish_reason(self, choice: int, completion: CompletionOutput) -> str | None:
        """Return the finish reason of a choice: tool_calls if it ended with calls."""
        whole = completion.finish_reason == "stop" and not stopped_by_guard(completion)
        called = whole and self._num_calls.get(choice)
        if not called:
            return completion.finish_reason
        return "function_call" if self.body.functions else "tool_calls"

    def begin_call(self, choice: int, start: CallStart) -> str:
        """Count a call of a choice, and return its id: the same after a restart of the engine."""
        number = self._num_calls.get(choice, 0)
        self._num_calls[choice] = number + 1
        if start.id and not self._makes_ids and start.id not in self._ids:
            self._ids.add(start.id)
            return start.id
        digest = hashlib.blake2b(f"{self.id}-{choice}-{number}".encode(), digest_size=12)
        return f"call_{digest.hexdigest()}"

    def _logprobs(self, completion: CompletionOutput) -> generation_answers.ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        asked = self.body.top_logprobs or 0
        content: list[generation_answers.ChatLogprob] = []
        for token_id, row in zip(completion.token_ids, completion.logprobs or [], strict=True):
            # The token itself is in the row even if it is not among the most probable ones.
            best = list(row.items())
            if not self.body.logprob_token_ids:
                best.sort(key=lambda item: -item[1].logprob)
                best = best if asked == -1 else best[:asked]
            top = [self._candidate(t, e) for t, e in best]
            entry: generation_answers.ChatLogprob = {
                **self._candidate(token_id, row[token_id]),
                "top_logprobs": top,
            }
            content.append(raw(entry))
        return {"content": content, "refusal": None}

    def _candidate(self, token_id: int, entry: Logprob) -> generation_answers.Candidate:
        text = self.token_text(token_id, entry)
        data = text.encode() if self.tokenizer is None else self.tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": finite(entry.logprob), "bytes": list(data)}
