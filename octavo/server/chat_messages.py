"""Messages and tools in the bodies of chats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from octavo.compat import request_fields as known_fields
from octavo.errors import RequestError, UnsupportedError
from octavo.media.content import HTTP_PARTS
from octavo.server.body import Body
from octavo.server.errors import show
from octavo.server.old_functions import convert_message

MAX_CHATS = 4096
MAX_ROLE_LENGTH = 64
MAX_DOCUMENTS = 4096
MAX_TOOLS = 128


def _check_content(value: object) -> object:
    """Return text; join a list of text parts with newlines. With media the list stays as it is."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    has_media = False
    for i, part in enumerate(value):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise RequestError(
                f'content[{i}]={show(part)} is not allowed; a part is {{"type": "text", '
                '"text": "..."}.',
                "messages",
            )
        if kind in HTTP_PARTS:
            has_media = True  # `read_media` checks it, when the model is known
            continue
        if kind != "text":
            raise UnsupportedError(
                f"content[{i}] is of type {show(kind)}, which is not supported; use text, "
                "image_url, input_audio, audio_url or video_url.",
                "messages",
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise RequestError(
                f"content[{i}].text={show(text)} is not allowed; it is a string.", "messages"
            )
        texts.append(text)
    if has_media:
        return [{"type": "text", "text": part} if isinstance(part, str) else part for part in value]
    return "\n".join(texts)


def _check_allowed_tools(value: dict[str, Any]) -> dict[str, Any]:
    """Return the choice of some tools if it has the right form."""
    allowed = value.get("allowed_tools")
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        raise RequestError(
            f"tool_choice.allowed_tools={show(allowed)} is not allowed; give "
            '{"mode": "auto" or "required", "tools": [...]}.',
            "tool_choice",
        )
    tools = allowed.get("tools")
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise RequestError(
            f"tool_choice.allowed_tools.tools={show(tools)} is not allowed; it is a list of 1 to "
            f"{MAX_TOOLS} tools.",
            "tool_choice",
        )
    for i, tool in enumerate(tools):
        _refuse_kind(tool, "tool_choice")
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"tool_choice.allowed_tools.tools[{i}]={show(tool)} names no function; give "
                '{"type": "function", "function": {"name": "..."}}.',
                "tool_choice",
            )
    return value


class ContentPart(Body):
    """Part of a message's content."""

    type: str
    """Kind of the part: text, image_url, input_audio, audio_url, video_url, image_embeds or
    audio_embeds. A model refuses the media that it does not read."""
    text: str | None = None
    """Text of a part of type text."""
    image_url: str | dict[str, Any] | None = None
    """Picture of a part of type image_url: {"url": ...}, with a URL of the kind data:, https:,
    http: or file:."""
    input_audio: dict[str, Any] | None = None
    """Sound of a part of type input_audio: {"data": base64, "format": "wav"}."""
    audio_url: str | dict[str, Any] | None = None
    """Sound of a part of type audio_url: {"url": ...}."""
    video_url: str | dict[str, Any] | None = None
    """Video of a part of type video_url: {"url": ...}."""
    image_embeds: str | dict[str, Any] | None = None
    """Rows of the encoder in place of a picture, for a part of type image_embeds, with
    --enable-mm-embeds: a tensor saved with torch.save or numpy.save, in base64, or an object with
    it and image_grid_thw or image_sizes."""
    audio_embeds: str | dict[str, Any] | None = None
    """Rows of the encoder in place of a sound, for a part of type audio_embeds."""
    detail: str | None = None
    """Resolution of a picture; no effect."""
    uuid: str | None = None
    """Name of the part's content. A later request of the same client may leave the content out."""


class FunctionCall(Body):
    """Function of a tool call, with its arguments."""

    name: str
    """Name of the function."""
    arguments: str | dict[str, Any] | None = None
    """Arguments, as an object or as JSON text."""


_CALL_PARTS: Mapping[str, type[Body]] = {"function": FunctionCall}


class ToolCall(Body):
    """Tool call of the assistant in an earlier message."""

    inner = _CALL_PARTS

    id: str | None = None
    """Id of the call, repeated in the tool's message."""
    type: Literal["function"] = "function"
    """Kind of the tool: function."""
    function: FunctionCall
    """Called function."""


class FunctionDefinition(Body):
    """Function that the model may call."""

    name: str
    """Name of the function."""
    description: str | None = None
    """Purpose of the function."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    """Require a grammar that holds each call to the schema. Default false: with tool_choice auto a
    model may have formats without such a grammar."""


_TOOL_PARTS: Mapping[str, type[Body]] = {"function": FunctionDefinition}


class Tool(Body):
    """Tool that the model may call."""

    inner = _TOOL_PARTS

    type: Literal["function"] = "function"
    """Kind of the tool: function."""
    function: FunctionDefinition
    """Function of the tool."""


class Message(Body):
    """Message of a chat. A list of parts without media is joined to one text."""

    unsupported = known_fields.MESSAGE
    inner: ClassVar[Mapping[str, type[Body]]] = {"content": ContentPart, "tool_calls": ToolCall}

    role: str
    """Role of the speaker: system, user, assistant, tool ..."""
    content: Annotated[
        str | list[dict[str, Any]],
        BeforeValidator(_check_content, json_schema_input_type=str | list[str | ContentPart]),
    ]
    """Text, or a list of parts."""
    name: str | None = None
    """Name of the speaker, for templates that show it."""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    """Calls of tools in an earlier answer of the assistant."""
    reasoning: str | None = None
    """Reasoning of an earlier answer, for templates that show it."""
    reasoning_content: str | None = None
    """Older name of reasoning."""
    tool_call_id: str | None = None
    """Id of the call that a tool's message answers."""

    @property
    def text(self) -> str:
        """Text of the content."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part["text"] for part in self.content if part["type"] == "text")


_OWNERS = {
    "tool_calls": "assistant",
    "reasoning": "assistant",
    "reasoning_content": "assistant",
    "tool_call_id": "tool",
}
"""Roles of the messages that may have a field."""


def _check_messages(value: object, chat: str = "messages") -> object:
    if not isinstance(value, list) or not value:
        raise RequestError(
            f"{chat}={show(value)} is not allowed; give a list of one or more messages.",
            "messages",
        )
    old_calls: list[str] = []
    for i, message in enumerate(value):
        where = f"{chat}[{i}]"
        if not isinstance(message, dict):
            raise RequestError(
                f'{where}={show(message)} is not a message; give {{"role": "user", '
                '"content": "..."}.',
                "messages",
            )
        convert_message(message, where, old_calls)
        role = message.get("role")
        if not isinstance(role, str) or not 1 <= len(role) <= MAX_ROLE_LENGTH:
            raise RequestError(
                f"{where}.role={show(role)} is not allowed; it is a string of 1 to "
                f"{MAX_ROLE_LENGTH} characters, such as system, user or assistant.",
                "messages",
            )
        for name, owner in _OWNERS.items():
            if message.get(name) and role != owner:
                raise RequestError(
                    f"{where}.{name} is not allowed with role {show(role)}; it belongs to messages "
                    f"of role {owner!r}.",
                    "messages",
                )
        may_lack_content = "content" in message or message.get("tool_calls")
        if role == "assistant" and message.get("content") is None and may_lack_content:
            message["content"] = ""  # as in OpenAI's answers without text
        if not isinstance(message.get("content"), str | list):
            raise RequestError(
                f"{where}.content={show(message.get('content'))} is not allowed; it is a string "
                "or a list of parts.",
                "messages",
            )
        try:
            _check_content(message["content"])
        except RequestError as error:
            # Name the message, and keep the type of the error.
            raise type(error)(f"{where}.{error.message}", "messages") from None
    return value


def _check_tool(value: object) -> object:
    return _refuse_kind(value, "tools")


def _refuse_kind(value: object, field: str) -> object:
    """Return a tool of `field` if it is a function; refuse others by their names."""
    kind = value.get("type", "function") if isinstance(value, dict) else "function"
    if kind != "function":
        custom = value.get(kind) if isinstance(kind, str) and isinstance(value, dict) else None
        name = custom.get("name") if isinstance(custom, dict) else None
        of_name = "" if name is None else f", {show(name)},"
        raise UnsupportedError(
            f"A tool{of_name} of type {show(kind)} is not supported; define it as a function with "
            "a schema.",
            field,
        )
    return value


Messages: TypeAlias = Annotated[
    list[Message], Field(fail_fast=True), BeforeValidator(_check_messages)
]
Tools: TypeAlias = (
    Annotated[
        list[Annotated[Tool, BeforeValidator(_check_tool)]],
        Field(max_length=MAX_TOOLS, fail_fast=True),
    ]
    | None
)
Documents: TypeAlias = (
    Annotated[list[dict[str, str]], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None
)


def check_functions(functions: list[FunctionDefinition], field: str, places: str) -> None:
    """Raise RequestError if functions of a field are wrong; `places` has {} for their numbers."""
    names = set[str]()
    for i, function in enumerate(functions):
        _check_function(function, places.format(i))
        if function.name in names:
            raise RequestError(f"{field} has the function {function.name!r} twice.", field)
        names.add(function.name)


def _check_function(function: FunctionDefinition, where: str) -> None:
    """Raise RequestError if a function has a wrong name, or parameters that are no schema."""
    if not _FUNCTION_NAME.fullmatch(function.name):
        raise RequestError(
            f"{where}.name={show(function.name)} is not allowed; use 1 to 128 letters, digits, "
            "and _ - . : /, with a letter or _ first.",
            f"{where}.name",
        )
    schema = function.parameters or {}
    properties, required = schema.get("properties"), schema.get("required")
    right = properties is None or (
        isinstance(properties, dict)
        and all(isinstance(part, dict | bool) for part in properties.values())
    )
    if not right:
        raise RequestError(
            f"{where}.parameters.properties={show(properties)} is not an object of schemas.",
            f"{where}.parameters",
        )
    if required is not None and not (
        isinstance(required, list) and all(isinstance(key, str) for key in required)
    ):
        raise RequestError(
            f"{where}.parameters.required={show(required)} is not a list of names.",
            f"{where}.parameters",
        )


_FUNCTION_NAME = re.compile(r"[A-Za-z_][\w.:/-]{0,127}", re.ASCII)


class NamedFunction(Body):
    """Name of a function."""

    name: str
    """Name of the function."""


_NAMED_PARTS: Mapping[str, type[Body]] = {"function": NamedFunction}


class NamedTool(Body):
    """Tool that the answer must call."""

    inner = _NAMED_PARTS

    type: Literal["function"] = "function"
    """Kind of the tool: function."""
    function: NamedFunction
    """Function to call."""


class AllowedToolList(Body):
    """Tools that the answer may call."""

    inner: ClassVar[Mapping[str, type[Body]]] = {"tools": NamedTool}

    mode: Literal["auto", "required"]
    """auto: the model may call them; required: it calls at least one."""
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]
    """Some of the request's tools."""


class AllowedTools(Body):
    """Choice of some of the tools."""

    inner: ClassVar[Mapping[str, type[Body]]] = {"allowed_tools": AllowedToolList}

    type: Literal["allowed_tools"]
    """Kind of the choice: allowed_tools."""
    allowed_tools: AllowedToolList
    """Tools that the answer may call."""


def check_tool_choice(value: object) -> object:
    """Return `tool_choice` if it has a known form."""
    if isinstance(value, str) and value not in ("none", "auto", "required"):
        raise RequestError(
            f'tool_choice={show(value)} is unknown; use "auto", "none", "required", '
            '{"type": "function", "function": {"name": "..."}} or {"type": "allowed_tools", ...}.',
            "tool_choice",
        )
    if not isinstance(value, dict):
        return value
    if value.get("type") == "allowed_tools":
        return _check_allowed_tools(value)
    if value.get("type", "function") != "function":
        raise UnsupportedError(
            f"tool_choice.type={show(value['type'])} is not supported; use function or "
            "allowed_tools.",
            "tool_choice",
        )
    function = value.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"tool_choice.function={show(function)} has no name; give "
            '{"type": "function", "function": {"name": "..."}}.',
            "tool_choice",
        )
    return value


def check_conversations(value: object) -> object:
    """Return the conversations of a batch of chats, with their messages checked."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHATS:
        raise RequestError(
            f"messages={show(value)} is not allowed; give a list of 1 to {MAX_CHATS} "
            "conversations, each a list of messages.",
            "messages",
        )
    for i, chat in enumerate(value):
        _check_messages(chat, f"messages[{i}]")
    return value
