"""Grammars by xgrammar: a pushdown automaton with token masks that are worked out beforehand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar
from numpy.typing import NDArray

from octavo.device import check_memory
from octavo.errors import GrammarError
from octavo.messages import GrammarSpec
from octavo.structured_output.base import (
    CompiledGrammar,
    Grammar,
    GrammarBackend,
    check_ebnf,
    check_satisfiable,
    is_ebnf,
)
from octavo.structured_output.json_schema import parse_choices, parse_json
from octavo.structured_output.vocabulary import Vocabulary
from octavo.structured_output.xgrammar_schema import check_pattern, check_schema

# "[08:44:08] /project/cpp/grammar_parser.cc:820: EBNF parser error ..."
_SOURCE = re.compile(r"\[[\d:]+\] \S+:\d+: (Check failed: \S.*? is false: )?")
# The library counts less than it takes, so the text's size counts as well.
_NBYTES_PER_CHAR = 50


class XGrammarBackend(GrammarBackend):
    """See `GrammarBackend`. The import takes 1.1 s and 40 MiB, where torch is there already.

    Args:
        vocabulary: the model's.
    """

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiler = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo(
                vocabulary.token_bytes,
                vocab_size=vocabulary.size,
                stop_token_ids=vocabulary.stop_token_ids,
            ),
            max_threads=1,
            cache_enabled=False,
        )

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """See `GrammarBackend`."""
        try:
            grammar = self._compile(spec)
        except GrammarError:
            raise
        except Exception as error:  # the library's own are of many kinds
            check_memory()
            raise _refusal(str(error)) from None
        nbytes = max(grammar.memory_size_bytes, _NBYTES_PER_CHAR * len(spec.text))
        compiled = _Compiled(grammar, self._vocabulary, nbytes)
        check_satisfiable(compiled, self._vocabulary.size, self.name)
        return compiled

    def _compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        compiler, text = self._compiler, spec.text
        if spec.kind == "json_object":
            text = '{"type": "object"}'
        if spec.kind in ("json", "json_object"):
            check_schema(parse_json(text))
            return compiler.compile_json_schema(text, any_whitespace=spec.any_whitespace)
        if spec.kind == "regex":
            check_pattern(text)
            return compiler.compile_regex(text)
        if spec.kind == "choice":
            literals = " | ".join(_literal(choice) for choice in parse_choices(text))
            return compiler.compile_grammar("root ::= " + literals)
        if spec.kind == "grammar":
            if not is_ebnf(text):
                raise _refusal("grammars are EBNF here; this one has no rule with ::=")
            check_ebnf(text)
            return compiler.compile_grammar(text)
        tag = parse_json(text)
        _check_tag(tag)
        if isinstance(tag, dict) and "structures" in tag:
            items = [
                xgrammar.StructuralTagItem(begin=s["begin"], schema=s["schema"], end=s["end"])
                for s in tag["structures"]
            ]
            return compiler.compile_structural_tag(items, tag["triggers"])
        return compiler.compile_structural_tag(text)


class _Compiled(CompiledGrammar):
    def __init__(
        self, grammar: xgrammar.CompiledGrammar, vocabulary: Vocabulary, nbytes: int
    ) -> None:
        self._grammar, self._vocabulary, self.nbytes = grammar, vocabulary, nbytes
        self.stop_token_ids = frozenset(vocabulary.stop_token_ids)

    def start(self) -> Grammar:
        """See `CompiledGrammar`."""
        return _Grammar(xgrammar.GrammarMatcher(self._grammar), self._vocabulary)


class _Grammar(Grammar):
    def __init__(self, matcher: xgrammar.GrammarMatcher, vocabulary: Vocabulary) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._last: list[int] = []

    def accept_tokens(self, token_ids: Sequence[int]) -> int:
        """See `Grammar`."""
        for count, token in enumerate(token_ids):
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                return count
            self._last.append(token)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """See `Grammar`."""
        if num_tokens:
            self._matcher.rollback(num_tokens)
            del self._last[-num_tokens:]

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        """See `Grammar`."""
        if self._matcher.is_terminated():
            row[:] = 0
            for token in self._vocabulary.stop_token_ids:
                row[token // 32] |= np.uint32(1 << token % 32).view(np.int32)
            return
        self._matcher.fill_next_token_bitmask(row[np.newaxis])

    @property
    def is_terminated(self) -> bool:
        """See `Grammar`."""
        return bool(self._matcher.is_terminated())

    def forced_tokens(self, most: int) -> list[int]:
        """See `Grammar`."""
        if self._matcher.is_terminated():
            return []
        try:
            text = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError:  # what must come begins or ends within a character
            return []
        before = self._vocabulary.token_bytes[self._last[-1]] if self._last else b""
        return self._vocabulary.tokenize(text, before, most) if text else []


def _literal(text: str) -> str:
    """A string as EBNF writes it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return (
        '"' + "".join(c if c >= " " and c != "\x7f" else f"\\x{ord(c):02x}" for c in escaped) + '"'
    )


def _check_tag(tag: Any) -> None:
    """Refuses a structural tag that has something in it which the library would ignore."""
    todo = [tag]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            for key in ("schema", "json_schema"):
                if isinstance(value.get(key), dict):
                    check_schema(value[key])
            if value.get("type") == "regex" and isinstance(value.get("pattern"), str):
                check_pattern(value["pattern"])
            todo += [v for k, v in value.items() if k not in ("schema", "json_schema")]
        elif isinstance(value, list):
            todo += value


def _refusal(message: str) -> GrammarError:
    text = " ".join(_SOURCE.sub("", message).split())[:300]
    return GrammarError(f"xgrammar: {text or 'the grammar is invalid'}")
