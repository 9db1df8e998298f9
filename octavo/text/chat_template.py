"""Chat templates: convert a list of messages to the text format that the model was trained on."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from octavo.errors import ConfigError, ModelError, RequestError
from octavo.text.template_client import RenderRequest, TemplateClient

RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)
"""Variables of templates that callers cannot set by name."""
# Two processes for all templates: a short chat does not wait for the rendering of a long one.
_short_client = TemplateClient()
_long_client = TemplateClient()
atexit.register(_short_client.close)
atexit.register(_long_client.close)
# In characters of the messages, and in messages.
_LONG_TEXT = 20_000
_MANY_MESSAGES = 100


class HasTemplates(Protocol):
    """Interface that is needed of a tokenizer."""

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Jinja sources by name."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Variables for the templates."""


class ChatTemplate:
    """Chat templates of a model by name: "default", and "tool_use" for tools.

    A separate process renders them, so that no template can harm this process.

    Args:
        sources: jinja sources by name.
        special_tokens: variables for the templates ("bos_token" -> "<s>" ...).
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_tokenizer(cls, tokenizer: HasTemplates, override: str | None = None) -> ChatTemplate:
        """Return the template of the model, or another one configured by the operator.

        A model's own template is compiled concurrently, and a broken one only makes chats fail. For
        a model without a template no process starts.

        Args:
            tokenizer: has the model's templates and special tokens.
            override: a template file, or the template itself.

        Raises:
            ConfigError: `override` is neither a readable file nor a template, or does not compile.
        """
        if override is None:
            template = cls(tokenizer.chat_templates, tokenizer.special_tokens)
            if template.available:
                template._compile()
            return template
        source = read_override(override)
        template = cls({"default": source}, tokenizer.special_tokens)
        try:
            template._compile().result()
        except (ModelError, RequestError) as error:
            raise ConfigError(f"chat_template={override[:80]!r}: {error}") from error
        return template

    @property
    def source(self) -> str | None:
        """Template of chats without tools; None without one."""
        return self._sources.get("default")

    @property
    def sources(self) -> str:
        """All templates, joined."""
        return "\n".join(self._sources.values())

    @property
    def available(self) -> bool:
        """True if there is any template."""
        return bool(self._sources)

    def submit(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        may_drop_tool_calls: bool = True,
        placeholders: Mapping[str, str] | None = None,
    ) -> Future[str]:
        """Start to make the prompt of a conversation; return a future of `render`'s result.

        Raises:
            RequestError: as `render`; errors of the template itself are raised by the future.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other.",
                "continue_final_message",
            )
        for name in template_kwargs or {}:
            if name in RESERVED_VARIABLES:
                raise RequestError(
                    f"{name!r} is a reserved variable; do not pass it in chat_template_kwargs.",
                    "chat_template_kwargs",
                )
        if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
            raise RequestError("messages must be a list of at least one message.", "messages")
        request = RenderRequest(
            self._sources,
            self._special_tokens,
            messages,
            tools,
            documents,
            add_generation_prompt,
            continue_final_message,
            template_kwargs,
            may_drop_tool_calls,
            dict(placeholders or {}),
        )
        # Variables of the request may make a template slow, too.
        long = bool(template_kwargs or tools or documents) or _is_long(messages)
        return (_long_client if long else _short_client).submit(request)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Make the prompt of a conversation; tokenise it without adding special tokens.

        Messages are OpenAI's. Their content may be text or a list of text parts. The template
        receives it in a form that it supports, with parts joined by newlines if it only supports
        text. Arguments of tool calls may be JSON texts or objects, and are adapted in the same way.

        Args:
            messages: the conversation.
            options: `tools`: tool definitions (OpenAI's form); `documents`: texts for retrieval,
                for templates that support them; `add_generation_prompt` (default): end with the
                beginning of the assistant's turn; `continue_final_message`: end inside the last
                message, so that the model continues it, which excludes the former;
                `template_kwargs`: further variables for the template; `may_drop_tool_calls`
                (default): render messages with tool calls by a template that omits these;
                `placeholders`: texts for parts {"type": "image"} of contents, by type, if the
                template writes nothing for such parts.

        Raises:
            RequestError: the messages are malformed, or the template rejects them, or needs too
                much time or memory for them.
            ModelError: the template is broken.
        """
        return self.submit(messages, **options).result()

    def _compile(self) -> Future[str]:
        """Start the process, and compile its templates."""
        return _short_client.submit(RenderRequest(self._sources, self._special_tokens))


def _is_long(messages: Sequence[Mapping[str, Any]]) -> bool:
    if len(messages) > _MANY_MESSAGES:
        return True
    contents = [m.get("content") for m in messages if isinstance(m, Mapping)]
    # Parts and tool calls count as long: a check would take as long as it saves.
    several = any(m.get("tool_calls") for m in messages if isinstance(m, Mapping))
    several = several or any(isinstance(c, list) for c in contents)
    return several or sum(len(c) for c in contents if isinstance(c, str)) > _LONG_TEXT


def read_override(override: str) -> str:
    """Return the template that an operator named or wrote.

    Raises:
        ConfigError: it is neither a template nor a readable file.
    """
    if "{" in override or "\n" in override:
        return override
    path = Path(override).expanduser()
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise ConfigError(
            f"chat_template={override!r} is neither a template nor a file that can be read: "
            f"{reason}."
        ) from None
