"""Messages of answers of `LLM.chat`: text, reasoning and calls of tools."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.outputs import (
    CalledFunction,
    ChatMessage,
    CompletionOutput,
    RequestOutput,
    ToolCall,
)
from octavo.parsers.answer import AnswerParser, Format
from octavo.parsers.detect import schemas_of
from octavo.parsers.parts import CallArguments, CallStart, Part, Reasoning, Text
from octavo.sampling_params import SamplingParams
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.tokenizer import Tokenizer


class MessageReader:
    """Reader of the messages of chats with the same tools.

    Args:
        answer_format: format of the model's answers; None: an answer is text.
        tokenizer: the model's tokenizer.
        tools: definitions of tools, in OpenAI's form; None: what looks like a call is text.

    Raises:
        RequestError: a tool is no function with a name, or the format has no calls.
    """

    def __init__(
        self,
        answer_format: Format | None,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        self._format, self._tokenizer = answer_format, tokenizer
        for i, tool in enumerate(tools or ()):
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise RequestError(
                    f'tools[{i}] is no function; give {{"type": "function", "function": {{"name": '
                    '"...", "parameters": {...}}}.',
                    "tools",
                )
        has_calls = answer_format is not None and answer_format.calls is not None
        self._schemas = schemas_of(tools) if tools and has_calls else None
        self._special = [] if answer_format is None else answer_format.special_ids(tokenizer)

    def limit(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters of a chat, with the format's markers of reasoning."""
        thoughts = None if self._format is None else self._format.thoughts
        if thoughts is None or params.reasoning_markers is not None:
            return params
        return msgspec.structs.replace(params, reasoning_markers=thoughts)

    def read(self, prompt: str, params: SamplingParams, output: RequestOutput) -> None:
        """Set the message of each answer to a prompt."""
        if params.detokenize:
            for completion in output.outputs:
                parts = self._parse(prompt, params, output, completion)
                completion.message = _make_message(parts, f"{output.request_id}-{completion.index}")

    def _parse(
        self,
        prompt: str,
        params: SamplingParams,
        output: RequestOutput,
        completion: CompletionOutput,
    ) -> list[Part]:
        """Return the parts of an answer."""
        if self._format is None:
            return [Text(completion.text)] if completion.text else []
        # The text of the answer may lack the special tokens that the parser needs.
        params = msgspec.structs.replace(params, preserved_token_ids=self._special)
        detokenizer = IncrementalDetokenizer(self._tokenizer, output.prompt_token_ids, params)
        ended = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
        detokenizer.update(completion.token_ids, ended)
        detokenizer.finish()
        thinks = self._format.opens_thoughts(prompt)
        parser = AnswerParser(self._format, self._schemas, thinks)
        return parser.feed(detokenizer.text()) + parser.end()


def _make_message(parts: Sequence[Part], name: str) -> ChatMessage:
    """Return a message; `name` identifies the answer in the ids of its calls."""
    texts: dict[type[Part], list[str]] = {Text: [], Reasoning: []}
    calls: list[ToolCall] = []
    for part in parts:
        if isinstance(part, CallStart):
            digest = hashlib.blake2b(f"{name}-{len(calls)}".encode(), digest_size=12).hexdigest()
            calls.append(ToolCall(part.id or f"call_{digest}", CalledFunction(part.text, "")))
        elif isinstance(part, CallArguments):
            calls[-1].function.arguments += part.text
        else:
            texts[type(part)].append(part.text)
    content, reasoning = "".join(texts[Text]), "".join(texts[Reasoning])
    return ChatMessage(content if content or not calls else None, reasoning or None, calls)
