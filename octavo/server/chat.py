"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.body import read_model
from octavo.server.generation import (
    Generation,
    Prompt,
    encode,
    finite,
    prompt_logprobs_json,
    raw,
)
from octavo.server.schema import BatchChatBody, ChatBody, ChatFields, Message, Tool, ToolCall
from octavo.server.state import state_of
from octavo.system.offload import offload
from octavo.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM


async def create_chat_completion(request: Request) -> Response:
    """Writes the next message of a chat."""
    limit = state_of(request).config.max_request_bytes
    return await ChatCompletion.respond(request, await read_model(request, ChatBody, limit))


async def create_batch_chat_completion(request: Request) -> Response:
    """Writes the next message of each of several chats; the choices are in their order."""
    limit = state_of(request).config.max_request_bytes
    return await ChatCompletion.respond(request, await read_model(request, BatchChatBody, limit))


async def render_messages(
    template: ChatTemplate,
    messages: list[Message],
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: dict[str, Any] | None,
    tools: list[Tool] | None = None,
    documents: list[dict[str, str]] | None = None,
) -> str:
    """Return the prompt text of a chat.

    Args:
        template: the chat template.
        messages: the chat so far. "developer" is OpenAI's newer word for "system".
        add_generation_prompt: begin the answer; default: unless `continue_final_message`.
        continue_final_message: leave the last message open, so that the answer goes on with it.
        template_kwargs: more variables for the template.
        tools: definitions of tools, for templates that know them.
        documents: texts for retrieval, likewise.

    Raises:
        RequestError: the template refuses the chat, leaves its tool calls out, or takes too much
            time or memory for it.
        ModelError: the template is broken.
    """
    num_calls = sum(len(message.tool_calls or ()) for message in messages)
    plain = await offload(len(messages) + num_calls, _plain_messages, messages)
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    return await asyncio.wrap_future(
        template.submit(
            plain,
            tools=[_plain_tool(tool) for tool in tools or []],
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=bool(continue_final_message),
            template_kwargs=template_kwargs,
            may_drop_tool_calls=False,
        )
    )


def _plain_messages(messages: list[Message]) -> list[dict[str, object]]:
    plain: list[dict[str, object]] = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        plain.append({"role": role, "content": message.content})
        if message.name is not None:
            plain[-1]["name"] = message.name
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


class ChatCompletion(Generation[ChatFields]):
    """One request; its choices are numbered chat by chat."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    prompt_param = "messages"

    def __init__(self, request: Request, body: ChatFields) -> None:
        super().__init__(request, body)
        # Where no answer is begun, what comes belongs to the last message.
        opened = body.add_generation_prompt
        if opened is None:
            opened = not body.continue_final_message
        last = [messages[-1] for messages in body.conversations]
        role = self.state.config.response_role
        self._roles = [role if opened else message.role for message in last]
        """Of the answers to each chat."""
        self._echoed = [
            message.content if body.echo and message.role == role else ""
            for message, role in zip(last, self._roles, strict=True)
        ]
        """Texts of the last messages, if they are to stand before the answers."""

    @property
    def num_prompts(self) -> int:
        """A chat is one prompt."""
        return len(self.body.conversations)

    async def prepare(self, engine: AsyncLLM) -> tuple[Sequence[Prompt], SamplingParams, bool]:
        """See `Generation.prepare`."""
        body = self.body
        tokenizer = self.state.tokenizer(engine, "messages")
        limit = self.state.engine_config.model.max_logprobs
        asked = body.top_logprobs or 0
        if 0 <= limit < (engine.spec.vocab_size if asked == -1 else asked):
            raise RequestError(
                f"top_logprobs={body.top_logprobs} is more than this server gives: {limit} "
                "(--max-logprobs).",
                "top_logprobs",
            )
        given_limit = body.max_completion_tokens
        if given_limit is None:
            given_limit = body.max_tokens
        params = await self.sampling_params(
            # Without a limit of anybody's the answer may fill the context.
            {"max_tokens": None, **engine.spec.generation_config},
            max_tokens=given_limit,
            logprobs=(body.top_logprobs or 0)
            if body.logprobs and not body.logprob_token_ids
            else None,
        )
        template = await self.state.chat_template(tokenizer)
        without_tools = (
            body.tool_choice == "none" and self.state.config.exclude_tools_when_tool_choice_none
        )
        prompts = [
            await render_messages(
                template,
                messages,
                body.add_generation_prompt,
                body.continue_final_message,
                self.state.template_kwargs(body.chat_template_kwargs, body.reasoning_effort),
                None if without_tools else body.tools,
                body.documents,
            )
            for messages in body.conversations
        ]
        # The template writes the special tokens itself.
        special = bool(body.add_special_tokens)
        return prompts, params, special

    def choices(self, index: int, output: RequestOutput) -> Iterator[dict[str, object]]:
        """See `Generation.choices`."""
        for completion in sorted(output.outputs, key=lambda c: c.index):
            choice: dict[str, object] = {
                "index": index * self.n + completion.index,
                "message": {
                    "role": self._roles[index],
                    "content": self._echoed[index] + completion.text,
                    "refusal": None,
                    "reasoning": None,
                },
                "logprobs": self._logprobs(completion),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            choice["token_ids"] = completion.token_ids if self.body.return_token_ids else None
            yield choice

    def extras(self, outputs: list[RequestOutput]) -> dict[str, object]:
        """See `Generation.extras`."""
        if len(outputs) > 1:  # there is no place for those of several chats
            return {"prompt_logprobs": None, "prompt_token_ids": None}
        (output,) = outputs
        ids = output.prompt_token_ids if self.body.return_token_ids else None
        return {
            "prompt_logprobs": prompt_logprobs_json(output.prompt_logprobs),
            "prompt_token_ids": ids,
        }

    def opening(self, output: RequestOutput) -> list[dict[str, object]]:
        """See `Generation.opening`: the role of each answer, and what is echoed before it."""
        (role,), (echoed,) = self._roles, self._echoed  # several chats are not streamed
        deltas = [{"role": role, "content": ""}]
        if echoed:
            deltas.append({"content": echoed})
        opening: list[dict[str, object]] = []
        for number in range(self.n):
            for delta in deltas:
                choice: dict[str, object] = {
                    "index": number,
                    "delta": delta,
                    "logprobs": None,
                    "finish_reason": None,
                }
                opening.append({"choices": [choice]})
        ids = output.prompt_token_ids if self.body.return_token_ids else None
        opening[0]["prompt_token_ids"] = ids
        return opening

    def chunks(self, index: int, output: RequestOutput) -> list[bytes]:
        """See `Generation.chunks`."""
        body = self.body
        chunks = []
        for completion in output.outputs:
            has_tokens = bool(completion.token_ids)
            finished = completion.finish_reason is not None
            if finished or (has_tokens and (body.logprobs or body.return_token_ids)):
                # The reason comes with the last text, as with vLLM.
                choice: dict[str, object] = {
                    "index": completion.index,
                    "delta": {"content": completion.text},
                    "logprobs": self._logprobs(completion) if has_tokens else None,
                    "finish_reason": completion.finish_reason,
                }
                if finished:
                    choice["stop_reason"] = completion.stop_reason
                if body.return_token_ids:
                    choice["token_ids"] = completion.token_ids
                chunks.append(encode(choice))
            elif completion.text:
                chunks.append(
                    b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}'
                    % (completion.index, encode(completion.text))
                )
        return chunks

    def _logprobs(self, completion: CompletionOutput) -> dict[str, object] | None:
        if not self.body.logprobs:
            return None
        asked = self.body.top_logprobs or 0
        content = []
        for token_id, row in zip(completion.token_ids, completion.logprobs or [], strict=True):
            # The token itself is in the row even if it is not among the most probable ones.
            best = list(row.items())
            if not self.body.logprob_token_ids:
                best.sort(key=lambda item: -item[1].logprob)
                best = best if asked == -1 else best[:asked]
            top = [self._candidate(t, e) for t, e in best]
            content.append(raw({**self._candidate(token_id, row[token_id]), "top_logprobs": top}))
        return {"content": content, "refusal": None}

    def _candidate(self, token_id: int, entry: Logprob) -> dict[str, object]:
        text = self.token_text(token_id, entry)
        data = text.encode() if self.tokenizer is None else self.tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": finite(entry.logprob), "bytes": list(data)}
