"""Chat templates: from a list of messages to the text that the model was trained on.

Templates are jinja programs that come with the model; they run in a sandbox with the extras that
Hugging Face transformers gives them (`raise_exception`, `strftime_now`, `tojson`, loop controls,
`generation` blocks). Nothing that a request sends is ever run as a template.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.exceptions import SecurityError

from octavo.errors import ConfigError, ModelError, RequestError, UnsupportedError
from octavo.tokenizer import Tokenizer

MAX_RENDERED_CHARS = 2**24
MAX_RENDER_SECONDS = 10.0
# "Private use" characters keep the marks apart from anything that a template or a person writes.
_CONTINUE_MARK = "\ue000octavo-continue\ue001"
_PROBE = "octavoprobe"
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
_PROBED_ROLES = ("", "user", "system", "developer", "assistant")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}

Message = dict[str, Any]


class ChatTemplate:
    """A model's chat template, or several by name: "default", and "tool_use" for tools.

    Args:
        sources: jinja sources by name.
        special_tokens: variables for the templates ("bos_token" -> "<s>" ...).
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._environment = _make_environment()
        self._compiled: dict[str, jinja2.Template] = {}
        self._habits: dict[tuple[str, str], bool] = {}

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate:
        """The template of the model, or another one given by the operator.

        A model's own template is read at its first use, so a broken one fails chats only.

        Args:
            tokenizer: has the model's templates and special tokens.
            override: a template file, or the template itself.

        Raises:
            ConfigError: `override` is no readable file and no template, or does not compile.
        """
        if override is None:
            return cls(tokenizer.chat_templates, tokenizer.special_tokens)
        source = _read_override(override)
        template = cls({"default": source}, tokenizer.special_tokens)
        try:
            template._compile("default")
        except ModelError as error:
            raise ConfigError(f"chat_template={override[:80]!r}: {error}") from error
        return template

    @property
    def available(self) -> bool:
        """Whether there is a template at all."""
        return bool(self._sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Makes the prompt of a conversation; tokenise it without adding special tokens.

        Messages are OpenAI's. Their content may be text or a list of text parts; it is passed on
        in a form that the template can handle, with parts joined by newlines where it only knows
        text. Arguments of tool calls may be JSON texts or objects, likewise.

        Args:
            messages: the conversation.
            tools: tool definitions (OpenAI's form).
            documents: texts for retrieval, for templates that know them.
            add_generation_prompt: end with the beginning of the assistant's turn.
            continue_final_message: end inside the last message, so that the model goes on with it;
                excludes `add_generation_prompt`.
            template_kwargs: further variables for the template.

        Raises:
            RequestError: the messages are malformed, or the template refuses them.
            ModelError: the template itself is broken.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other.",
                "continue_final_message",
            )
        for name in template_kwargs or {}:
            if name in _RESERVED:
                raise RequestError(
                    f"{name!r} is a variable of its own; do not give it in chat_template_kwargs.",
                    "chat_template_kwargs",
                )
        if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
            raise RequestError("messages must be a list of at least one message.", "messages")
        name = self._choose(bool(tools))
        plain_messages = [self._adapt(name, _plain_message(m, i)) for i, m in enumerate(messages)]
        if continue_final_message:
            _mark_end(plain_messages[-1])
        rendered = self._render(
            name,
            plain_messages,
            {
                "tools": _plain(list(tools), "tools") if tools else None,
                "documents": _plain(list(documents), "documents") if documents else None,
                "add_generation_prompt": add_generation_prompt,
                **_plain(dict(template_kwargs or {}), "chat_template_kwargs"),
            },
        )
        return _cut_at_mark(rendered) if continue_final_message else rendered

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
            except (RecursionError, MemoryError, SyntaxError, TypeError, ValueError) as error:
                raise ModelError(f"The chat template does not compile: {error}") from error
            self._compiled[name] = template
        return template

    def _render(self, name: str, messages: list[Message], variables: Mapping[str, Any]) -> str:
        template = self._compile(name)
        chunks: list[str] = []
        num_chars = 0
        _budget.deadline = time.monotonic() + MAX_RENDER_SECONDS
        try:
            # As one dict: a variable may have any name, "self" included.
            for chunk in template.generate(
                {**self._special_tokens, **variables, "messages": messages}
            ):
                chunks.append(chunk)
                num_chars += len(chunk)
                if num_chars > MAX_RENDERED_CHARS:
                    raise _OverBudgetError(f"it made more than {MAX_RENDERED_CHARS} characters")
                _check_deadline()
        except _RefusedError as error:
            raise RequestError(str(error), "messages") from error
        except (_OverBudgetError, MemoryError) as error:
            raise ModelError(f"The chat template was stopped: {error}.") from error
        except SecurityError as error:
            raise ModelError(f"The chat template does something forbidden: {error}") from error
        except Exception as error:  # templates are programs: anything can go wrong in them
            raise RequestError(
                f"The model's chat template cannot render these messages: {error}", "messages"
            ) from error
        return "".join(chunks)

    def _adapt(self, name: str, message: Message) -> Message:
        """Brings content and tool calls into the form that the template understands."""
        content = message["content"]
        role = message["role"]
        if isinstance(content, list) and not self._takes(name, f"parts:{role}"):
            message["content"] = "\n".join(part["text"] for part in content)
        elif (
            isinstance(content, str)
            and content
            and not self._takes(name, f"text:{role}")
            and self._takes(name, f"parts:{role}")
        ):
            message["content"] = [{"type": "text", "text": content}]
        if message.get("tool_calls") and not self._takes(name, "objects"):
            for function in _functions(message):
                if not isinstance(function.get("arguments"), str):
                    function["arguments"] = json.dumps(
                        function.get("arguments"), ensure_ascii=False
                    )
        return message

    def _takes(self, name: str, habit: str) -> bool:
        """Finds out, once, how a template treats a form of message: by rendering an example."""
        kind, _, role = habit.partition(":")
        if role not in _PROBED_ROLES:
            return kind == "text"
        key = (name, habit)
        if key not in self._habits:
            self._habits[key] = self._probe(name, habit)
        return self._habits[key]

    def _probe(self, name: str, habit: str) -> bool:
        if habit == "objects":
            rendered = self._render_example(name, _call_example({_PROBE: "1"}))
            if rendered is not None:
                return f"{{'{_PROBE}'" not in rendered  # Python's notation: meant for JSON texts
            return self._render_example(name, _call_example(f'{{"{_PROBE}": "1"}}')) is None
        kind, _, role = habit.partition(":")
        content = _PROBE if kind == "text" else [{"type": "text", "text": _PROBE}]
        subject: Message = {"role": role, "content": content}
        user: Message = {"role": "user", "content": "hi"}
        examples = {
            "user": [subject],
            "system": [subject, user],
            "developer": [subject, user],
            "assistant": [user, subject],
        }
        rendered = self._render_example(name, examples[role])
        if rendered is None:
            return kind == "text"  # the example breaks the template's rules, so it tells nothing
        # A template that knows no parts prints the list in Python's or JSON's notation.
        quoted = f"'{_PROBE}'" in rendered or f'"{_PROBE}"' in rendered
        return _PROBE in rendered and not quoted

    def _render_example(self, name: str, messages: list[Message]) -> str | None:
        """Renders messages to see what a template does with them; None if it refuses."""
        try:
            return self._render(
                name, messages, {"tools": None, "documents": None, "add_generation_prompt": False}
            )
        except RequestError:
            return None


def _call_example(arguments: object) -> list[Message]:
    """A conversation with a tool call."""
    function = {"name": "f", "arguments": arguments}
    call = {"id": "call00000", "type": "function", "function": function}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


class _RefusedError(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _OverBudgetError(Exception):
    """The template used too much time or memory."""


class _Budget(threading.local):
    deadline = 0.0


_budget = _Budget()


def _check_deadline() -> None:
    if time.monotonic() > _budget.deadline:
        raise _OverBudgetError(f"it ran for more than {MAX_RENDER_SECONDS:g} seconds")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with a watch on time and memory at every call and product."""

    intercepted_binops = frozenset({"*", "**"})

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_deadline()
        return super().call(context, obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        _check_deadline()
        value = super().getattr(obj, attribute)
        if isinstance(value, str | list) and len(value) > MAX_RENDERED_CHARS:
            raise _OverBudgetError("a value grew too large")
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_deadline()
        if operator == "**":
            small = all(isinstance(v, int | float) and abs(v) <= 1024 for v in (left, right))
            if not small:
                raise _OverBudgetError("a power grew too large")
        for value, times in ((left, right), (right, left)):
            if (
                isinstance(value, str | list | tuple)
                and isinstance(times, int)
                and len(value) * times > MAX_RENDERED_CHARS
            ):
                raise _OverBudgetError("a value grew too large")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: marks the assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012 (the base class has it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _make_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
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
    """JSON without the HTML escapes of jinja's own filter."""
    if isinstance(indent, int):
        indent = min(indent, 16)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _read_override(override: str) -> str:
    """The template that an operator named or wrote."""
    if "{" in override or "\n" in override:
        return override
    path = Path(override).expanduser()
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template={override!r} is neither a template nor a file that can be read: {error}"
        ) from None


def _plain(value: Any, name: str) -> Any:
    """A copy made of JSON's types only: templates get no objects with methods of their own."""
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
    """Checks and copies one message; content becomes text or a list of text parts."""
    where = f"messages[{position}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} needs a role and a content.", "messages")
    plain: Message = _plain({k: v for k, v in message.items() if k != "content"}, "messages")
    content = message.get("content")
    if content is None:
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
        _parse_arguments(function, where)
    return plain


def _plain_part(part: Any, where: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise RequestError(f"{where}.content: each part needs a type and a text.", "messages")
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


def _parse_arguments(function: dict[str, Any], where: str) -> None:
    """Arguments as an object, which is what most templates expect."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise RequestError(
                f"{where}.tool_calls: the arguments of {function.get('name')!r} are not JSON.",
                "messages",
            ) from None
    function["arguments"] = {} if arguments is None else arguments


def _mark_end(message: Message) -> None:
    """Puts a mark, and a space to see whether the template trims, behind the message's text."""
    content = message["content"]
    if not content:
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
