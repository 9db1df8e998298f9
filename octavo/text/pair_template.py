"""Template of a reranker that is a decoder: one text of a query and a document."""

from __future__ import annotations

import re
from concurrent.futures import Future

from octavo.text.chat_template import ChatTemplate, HasTemplates

_NAMED = "rerank"
"""Name of a template for pairs beside that of chats."""
_ROLES = [re.compile(rf"""["']{role}["']""") for role in ("query", "document")]


class PairTemplate:
    """Chat template for the roles query and document, and system for an instruction.

    Args:
        template: the template.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    @classmethod
    def find(cls, tokenizer: HasTemplates, override: str | None = None) -> PairTemplate | None:
        """Return the template for pairs; None: the model's tokenizer joins the two texts.

        The model's own template counts if it reads the roles query and document: many rerankers
        have kept the template of the chat model from which they were made.

        Args:
            tokenizer: has the model's templates and special tokens.
            override: a template file, or the template itself.

        Raises:
            ConfigError: `override` is neither a readable file nor a template, or does not compile.
        """
        if override is not None:
            return cls(ChatTemplate.from_tokenizer(tokenizer, override))
        sources = tokenizer.chat_templates
        source = sources.get(_NAMED, sources.get("default", ""))
        if not all(role.search(source) for role in _ROLES):
            return None
        return cls(ChatTemplate({"default": source}, tokenizer.special_tokens))

    def submit(self, query: str, document: str, instruction: str | None = None) -> Future[str]:
        """Start to make the text of a pair; return its future.

        The future raises RequestError if the template rejects the pair, or needs too much time or
        memory for it, and ModelError if the template is broken.

        Args:
            query: the query.
            document: the document.
            instruction: task of the reranker, as the message of the role system; None: the
                template's own.
        """
        messages = [] if instruction is None else [{"role": "system", "content": instruction}]
        messages += [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return self._template.submit(messages)
