"""Process that renders chat templates, within limits of memory and time.

A template is a program that is part of a model, and one filter or operator can exhaust memory or
time. So it runs in this process, isolated from the server, in a sandbox with the extras that
Hugging Face transformers provides (`raise_exception`, `strftime_now`, `tojson`, loop controls,
`generation` blocks), and `from_json` for Octavo's own templates. Data of requests are never run as
a template.

Requests arrive one at a time through the socket that is standard input; its end ends the process.
Too much memory is an error of the render. Too much processor time ends the process at any point;
`text/template_client.py` then starts another one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec
from jinja2.exceptions import SecurityError

from octavo.errors import ModelError, OctavoError, RequestError, UnsupportedError
from octavo.system.limited_process import limit_memory, serve
from octavo.text.template_client import RenderRequest, RenderResult

MAX_RENDERED_CHARS = 2**24
# "Private use" characters distinguish the marks from texts of templates and users.
_CONTINUE_MARK = "\ue000octavo-continue\ue001"
_PROBE = "octavoprobe"
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
_PROBED_ROLES = ("", "user", "system", "developer", "assistant")
_MEDIA = ("image", "audio", "video")
"""Types of parts that stand for media; `octavo/media/content.py` makes them."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}

Message = dict[str, Any]


def main() -> None:
    """Render until standard input ends. Arguments: seconds of one render, bytes of memory."""
    max_seconds, max_nbytes = float(sys.argv[1]), int(sys.argv[2])
    limit_memory(max_nbytes)

    def too_large() -> list[bytes]:
        return [
            _encode_error(
                RequestError(
                    "The chat template was stopped: rendering takes more than "
                    f"{max_nbytes // 2**20} MiB.",
                    "messages",
                )
            )
        ]

    serve(lambda data: [_answer(data)], too_large, max_seconds)


def _answer(data: memoryview) -> bytes:
    """Return the encoded result of an encoded request."""
    try:
        request = msgspec.msgpack.decode(data, type=RenderRequest)
        templates = _templates(
            tuple(request.sources.items()), tuple(request.special_tokens.items())
        )
        if request.messages is None:
            templates.compile_all()
            return msgspec.msgpack.encode(RenderResult())
        return msgspec.msgpack.encode(RenderResult(templates.render(request)))
    except OctavoError as error:
        return _encode_error(error)
    except RecursionError:
        return _encode_error(RequestError("messages is nested too deeply.", "messages"))
    except UnicodeEncodeError:
        return _encode_error(RequestError("The rendered chat is not valid Unicode.", "messages"))
    except msgspec.ValidationError as error:
        return _encode_error(ModelError(f"The chat template is not usable: {error}."))


def _encode_error(error: OctavoError) -> bytes:
    # A message may quote text that UTF-8 cannot express.
    message = str(error).encode("utf-8", "replace").decode()
    param = error.param if isinstance(error, RequestError) else None
    return msgspec.msgpack.encode(
        RenderResult(error=message, error_kind=type(error).__name__, param=param)
    )


@functools.lru_cache(maxsize=32)
def _templates(
    sources: tuple[tuple[str, str], ...], special_tokens: tuple[tuple[str, str], ...]
) -> _Templates:
    return _Templates(dict(sources), dict(special_tokens))


class _Templates:
    """Chat templates of a model, compiled on first use."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = sources
        self._special_tokens = special_tokens
        self._environment = _make_environment()
        self._compiled: dict[str, jinja2.Template] = {}
        self._habits: dict[tuple[str, str], bool] = {}

    def compile_all(self) -> None:
        """Compile every template.

        Raises:
            ModelError: a template does not compile.
        """
        for name in self._sources:
            self._compile(name)

    def render(self, request: RenderRequest) -> str:
        messages, tools, documents = request.messages, request.tools, request.documents
        if not isinstance(messages, list) or not messages:
            raise RequestError("messages must be a list of at least one message.", "messages")
        name = self._choose(bool(tools))
        if not request.may_drop_tool_calls:
            self._check_tool_calls(name, messages)
        plain_messages = [
            self._adapt(name, _plain_message(m, i), request.placeholders, f"messages[{i}]")
            for i, m in enumerate(messages)
        ]
        if request.continue_final_message:
            _mark_end(plain_messages[-1])
        rendered = self._render(
            name,
            plain_messages,
            {
                **_plain(request.template_kwargs or {}, "chat_template_kwargs"),
                "tools": _plain(tools, "tools") if tools else None,
                "documents": _plain(documents, "documents") if documents else None,
                "add_generation_prompt": request.add_generation_prompt,
            },
        )
        return _cut_at_mark(rendered) if request.continue_final_message else rendered

    def _check_tool_calls(self, name: str, messages: list[Any]) -> None:
        """Raise UnsupportedError for tool calls that the template would omit."""
        for i, message in enumerate(messages):
            has_calls = isinstance(message, Mapping) and message.get("tool_calls")
            if has_calls and not self._takes(name, "calls"):
                raise UnsupportedError(
                    f"messages[{i}].tool_calls: the model's chat template does not support tool "
                    "calls, so the model would not see them; write them into content, or start the "
                    "server with a --chat-template that supports them.",
                    "messages",
                )

    def _choose(self, with_tools: bool) -> str:
        if not self._sources:
            raise RequestError(
                "This model has no chat template. Use /v1/completions, or start the server with "
                "--chat-template.",
                "messages",
            )
        if with_tools and "tool_use" in self._sources:
            return "tool_use"
        if "default" in self._sources:
            return "default"
        if len(self._sources) == 1:
            return next(iter(self._sources))
        raise ModelError(
            f"The model's chat templates are {sorted(self._sources)}; none is called 'default'. "
            "Give one with --chat-template."
        )

    def _compile(self, name: str) -> jinja2.Template:
        template = self._compiled.get(name)
        if template is None:
            try:
                template = self._environment.from_string(self._sources[name])
            except jinja2.TemplateSyntaxError as error:
                raise ModelError(
                    f"The chat template does not compile: line {error.lineno}: {error.message}"
                ) from error
            except (RecursionError, SyntaxError, TypeError, ValueError) as error:
                raise ModelError(f"The chat template does not compile: {error}") from error
            self._compiled[name] = template
        return template

    def _render(self, name: str, messages: list[Message], variables: dict[str, Any]) -> str:
        template = self._compile(name)
        try:
            rendered = template.render({**self._special_tokens, **variables, "messages": messages})
        except _RefusedError as error:
            raise RequestError(str(error), "messages") from error
        except MemoryError:
            raise
        except SecurityError as error:
            raise ModelError(f"The chat template does something forbidden: {error}") from error
        except Exception as error:  # templates are programs and may raise anything
            raise RequestError(
                f"The model's chat template cannot render these messages: {error}", "messages"
            ) from error
        if len(rendered) > MAX_RENDERED_CHARS:
            raise RequestError(
                "The chat template was stopped: it made more than "
                f"{MAX_RENDERED_CHARS} characters.",
                "messages",
            )
        return rendered

    def _adapt(
        self, name: str, message: Message, placeholders: Mapping[str, str], where: str
    ) -> Message:
        """Convert content, thoughts and tool calls to the form that the template supports."""
        role = message["role"]
        content = message["content"] = self._write_media(name, message, placeholders, where)
        if isinstance(content, list) and not self._takes(name, f"parts:{role}"):
            message["content"] = "\n".join(part["text"] for part in content)
        elif (
            isinstance(content, str)
            and content
            and not self._takes(name, f"text:{role}")
            and self._takes(name, f"parts:{role}")
        ):
            message["content"] = [{"type": "text", "text": content}]
        if message.get("tool_calls"):
            for function in _functions(message):
                self._adapt_arguments(name, function, where)
        if role == "assistant" and message.get("reasoning"):
            self._add_thinking(name, message, message["reasoning"])
        return message

    def _write_media(
        self, name: str, message: Message, placeholders: Mapping[str, str], where: str
    ) -> Any:
        """Return a content in which placeholders replace media that the template does not write."""
        content, written = message["content"], []
        if not isinstance(content, list):
            return content
        for part in content:
            kind = part["type"]
            if kind in _MEDIA and not self._takes(name, f"{kind}:{message['role']}"):
                if kind not in placeholders:
                    raise UnsupportedError(
                        f"{where}.content holds a part of type {kind!r}; the model's chat template "
                        "does not support it.",
                        "messages",
                    )
                part = {"type": "text", "text": placeholders[kind]}
            written.append(part)
        return written

    def _adapt_arguments(self, name: str, function: dict[str, Any], where: str) -> None:
        """Convert a call's arguments; a text, of a call that was cut, stays as it is."""
        arguments, takes_objects = function["arguments"], self._takes(name, "objects")
        if not isinstance(arguments, str):
            if not takes_objects:
                function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        elif takes_objects and not self._takes(name, "cut"):
            raise RequestError(
                f"{where}.tool_calls: the arguments of {function.get('name')!r} are not JSON, and "
                "the model's chat template cannot render them; leave the call out, or complete "
                "its arguments.",
                "messages",
            )

    def _add_thinking(self, name: str, message: Message, thought: str) -> None:
        """Add a thought where a template reads it, if that is not in `reasoning`."""
        content = message["content"]
        if self._takes(name, "thinking"):
            # Some templates refuse a text beside the thought and the calls.
            if not (content and message.get("tool_calls")) or self._takes(name, "thinking+text"):
                message.setdefault("thinking", thought)
        elif self._takes(name, "thinking-part"):
            texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            texts = [part for part in texts if part["text"]]
            message["content"] = [{"type": "thinking", "thinking": thought}, *texts]

    def _takes(self, name: str, habit: str) -> bool:
        """Return, after rendering an example once, how a template handles a form of message."""
        kind, _, role = habit.partition(":")
        if role not in _PROBED_ROLES:
            return kind == "text"
        key = (name, habit)
        if key not in self._habits:
            self._habits[key] = self._probe(name, habit)
        return self._habits[key]

    def _probe(self, name: str, habit: str) -> bool:
        if habit == "calls":
            rendered = self._render_example(name, _call_example({}, _PROBE))
            return rendered is None or _PROBE in rendered
        if habit == "cut":
            rendered = self._render_example(name, _call_example(_PROBE))
            return rendered is not None and _PROBE in rendered
        if habit == "objects":
            rendered = self._render_example(name, _call_example({_PROBE: "1"}))
            if rendered is not None:
                return f"{{'{_PROBE}'" not in rendered  # Python's notation: it expects JSON texts
            return self._render_example(name, _call_example(f'{{"{_PROBE}": "1"}}')) is None
        if habit.startswith("thinking"):
            example = _call_example({})
            if habit == "thinking-part":
                example[-1]["content"] = [{"type": "thinking", "thinking": _PROBE}]
            else:
                text = "so" if habit == "thinking+text" else ""
                example[-1] |= {"thinking": _PROBE, "content": text}
            rendered = self._render_example(name, example)
            return rendered is not None and _PROBE in rendered and f"'{_PROBE}'" not in rendered
        kind, _, role = habit.partition(":")
        if kind in _MEDIA:
            return self._takes(name, f"parts:{role}") and self._writes_media(name, kind, role)
        content = _PROBE if kind == "text" else [{"type": "text", "text": _PROBE}]
        return self._takes_content(name, kind, role, content)

    def _writes_media(self, name: str, kind: str, role: str) -> bool:
        """Return True if a template writes another text for a part with media than for others."""
        text = {"type": "text", "text": _PROBE}
        found, other, without = (
            self._render_example(name, _examples({"role": role, "content": content})[role])
            for content in ([{"type": kind}, text], [{"type": _PROBE}, text], [text])
        )
        if found is None or _PROBE not in found:
            return False
        return found != (without if other is None else other)

    def _takes_content(self, name: str, kind: str, role: str, content: object) -> bool:
        subject: Message = {"role": role, "content": content}
        rendered = self._render_example(name, _examples(subject)[role])
        if rendered is None:
            return kind == "text"  # the example breaks the template's rules and is inconclusive
        # A template without support for parts prints the list in Python's or JSON's notation.
        quoted = f"'{_PROBE}'" in rendered or f'"{_PROBE}"' in rendered
        return _PROBE in rendered and not quoted

    def _render_example(self, name: str, messages: list[Message]) -> str | None:
        """Render example messages; return None if the template rejects them."""
        try:
            return self._render(
                name, messages, {"tools": None, "documents": None, "add_generation_prompt": False}
            )
        except RequestError:
            return None


def _examples(subject: Message) -> dict[str, list[Message]]:
    """Return conversations with a message, by its role."""
    user: Message = {"role": "user", "content": "hi"}
    return {
        "user": [subject],
        "system": [subject, user],
        "developer": [subject, user],
        "assistant": [user, subject],
    }


def _call_example(arguments: object, name: str = "f") -> list[Message]:
    """Return a conversation with a tool call."""
    function = {"name": name, "arguments": arguments}
    call = {"id": "call00000", "type": "function", "function": function}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


class _RefusedError(jinja2.TemplateError):
    """Error of a template that called `raise_exception`."""


class _GenerationTag(jinja2.ext.Extension):
    """Tag `{% generation %} ... {% endgeneration %}`: marks the assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012 (the base class has it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.filters["from_json"] = _from_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: object) -> None:
    raise _RefusedError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of jinja's own filter."""
    if isinstance(indent, int):
        indent = min(indent, 16)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _from_json(text: str) -> Any:
    """Return the value that a JSON text has; a text that is no JSON is returned unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _plain(value: Any, name: str) -> Any:
    """Copy a value of JSON's types, so that templates receive no objects with methods.

    Raises:
        RequestError: the value contains another type, or is nested too deeply.
    """
    try:
        return _plain_value(value, name)
    except RecursionError:
        raise RequestError(f"{name} is nested too deeply.", name) from None


def _plain_value(value: Any, name: str) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain_value(item, name) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain_value(item, name) for item in value]
    raise RequestError(f"{name} holds a {type(value).__name__}; only JSON's types may go in.", name)


def _plain_message(message: Mapping[str, Any], position: int) -> Message:
    """Check and copy one message; content becomes text or a list of text parts."""
    where = f"messages[{position}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} needs a role and a content.", "messages")
    plain: Message = _plain({k: v for k, v in message.items() if k != "content"}, "messages")
    content = message.get("content")
    if content is None:
        if message["role"] in ("user", "system"):  # others may have other contents
            raise RequestError(f"{where} has no content; give a text.", "messages")
        content = ""
    if isinstance(content, str):
        plain["content"] = content
    elif isinstance(content, Sequence):
        plain["content"] = [_plain_part(part, where) for part in content]
    else:
        raise RequestError(f"{where}.content must be a text or a list of parts.", "messages")
    calls = plain.get("tool_calls")
    if calls is None:
        plain.pop("tool_calls", None)
        return plain
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise RequestError(f"{where}.tool_calls must be a list of function calls.", "messages")
    for function in _functions(plain):
        _parse_arguments(function)
    return plain


def _plain_part(part: Any, where: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise RequestError(f"{where}.content: each part needs a type and a text.", "messages")
    if kind in _MEDIA:
        return {"type": kind}
    if kind not in _TEXT_PARTS:
        raise UnsupportedError(
            f"{where}.content holds a part of type {kind!r}; only text is supported.", "messages"
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"{where}.content holds a {kind} part without a text.", "messages")
    return {"type": "text", "text": text}


def _functions(message: Message) -> Iterator[dict[str, Any]]:
    return (call["function"] for call in message["tool_calls"])


def _parse_arguments(function: dict[str, Any]) -> None:
    """Parse arguments to an object, which most templates expect; keep a text that is not JSON."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if arguments.strip() else {}
    function["arguments"] = {} if arguments is None else arguments


def _mark_end(message: Message) -> None:
    """Append a mark, and a space to detect trimming, to the message's text."""
    content = message["content"]
    if not content or (isinstance(content, list) and "text" not in content[-1]):
        raise RequestError(
            "continue_final_message needs a last message with text.", "continue_final_message"
        )
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_MARK + " "
    else:
        content[-1]["text"] += _CONTINUE_MARK + " "


def _cut_at_mark(rendered: str) -> str:
    end = rendered.rfind(_CONTINUE_MARK)
    if end < 0:
        raise RequestError(
            "continue_final_message does not work here: the model's chat template leaves the last "
            "message out.",
            "continue_final_message",
        )
    text = rendered[:end]
    trimmed = not rendered.startswith(" ", end + len(_CONTINUE_MARK))
    return text.rstrip() if trimmed else text


if __name__ == "__main__":
    main()
