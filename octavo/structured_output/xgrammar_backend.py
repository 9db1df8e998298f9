"""Grammar backend xgrammar: a pushdown automaton with precomputed token masks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar
from numpy.typing import NDArray

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
from octavo.structured_output.regex import ebnf_literal, mend_ebnf, parse, to_ebnf, whole
from octavo.structured_output.rewrite import rewrite
from octavo.structured_output.vocabulary import Vocabulary
from octavo.structured_output.xgrammar_schema import prepare_schema

# "[08:44:08] /project/cpp/grammar_parser.cc:820: EBNF parser error ..."
_SOURCE = re.compile(r"\[[\d:]+\] \S+:\d+: (Check failed: \S.*? is false: )?")
# UTF-8 of half of a surrogate pair begins so; the library lets it through.
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")


class XGrammarBackend(GrammarBackend):
    """Backend xgrammar. The import takes 1.1 s and 40 MiB if torch is already imported.

    Args:
        vocabulary: the model's vocabulary.
    """

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._not_after_ed = _pack(
            [not 0xA0 <= t[0] <= 0xBF if t else True for t in vocabulary.token_bytes]
        )
        self._compiler = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo(
                [b"" if _SURROGATE.search(t) else t for t in vocabulary.token_bytes],
                vocab_size=vocabulary.size,
                stop_token_ids=vocabulary.stop_token_ids,
            ),
            max_threads=1,
            cache_enabled=False,
        )

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Implement `GrammarBackend`."""
        try:
            grammar = self._compile(spec)
        except (GrammarError, MemoryError):
            raise
        except Exception as error:  # the library raises many kinds
            if "bad_alloc" in str(error):
                raise MemoryError from None
            raise _refusal(str(error)) from None
        compiled = _Compiled(grammar, self._vocabulary, self._not_after_ed)
        check_satisfiable(compiled, self._vocabulary.size, self.name)
        return compiled

    def _compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        compiler, text = self._compiler, spec.text
        if spec.kind == "json_object":
            text = '{"type": "object"}'
        if spec.kind in ("json", "json_object"):
            schema = parse_json(text)
            rewrite(schema, spec.additional_properties, spec.strict)
            prepare_schema(schema)
            text = json.dumps(schema, ensure_ascii=False)
            return compiler.compile_json_schema(text, any_whitespace=spec.any_whitespace)
        if spec.kind == "regex":
            return compiler.compile_grammar(_from_regex(text))
        if spec.kind == "choice":
            literals = " | ".join(ebnf_literal(choice) for choice in parse_choices(text))
            return compiler.compile_grammar("root ::= " + literals)
        if spec.kind == "grammar":
            if not is_ebnf(text):
                raise _refusal("grammars are EBNF here; this one has no rule with ::=")
            check_ebnf(text)
            return compiler.compile_grammar(mend_ebnf(text))
        tag = parse_json(text)
        _prepare_tag(tag, spec)
        if isinstance(tag, dict) and "structures" in tag:
            items = [
                xgrammar.StructuralTagItem(begin=s["begin"], schema=s["schema"], end=s["end"])
                for s in tag["structures"]
            ]
            return compiler.compile_structural_tag(items, tag["triggers"])
        return compiler.compile_structural_tag(json.dumps(tag, ensure_ascii=False))


class _Compiled(CompiledGrammar):
    def __init__(
        self,
        grammar: xgrammar.CompiledGrammar,
        vocabulary: Vocabulary,
        not_after_ed: NDArray[np.int32],
    ) -> None:
        self._grammar, self._vocabulary, self._not_after_ed = grammar, vocabulary, not_after_ed
        self.stop_token_ids = frozenset(vocabulary.stop_token_ids)

    def start(self) -> Grammar:
        """Implement `CompiledGrammar`."""
        return _Grammar(
            xgrammar.GrammarMatcher(self._grammar), self._vocabulary, self._not_after_ed
        )


class _Grammar(Grammar):
    def __init__(
        self,
        matcher: xgrammar.GrammarMatcher,
        vocabulary: Vocabulary,
        not_after_ed: NDArray[np.int32],
    ) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._not_after_ed = not_after_ed
        self._last: list[int] = []

    def accept_tokens(self, token_ids: Sequence[int]) -> int:
        """Implement `Grammar`."""
        for count, token in enumerate(token_ids):
            if self._matcher.is_terminated() or (self._is_after_ed and not self._may_follow(token)):
                return count
            if not self._matcher.accept_token(token):
                return count
            self._last.append(token)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Implement `Grammar`."""
        if num_tokens:
            self._matcher.rollback(num_tokens)
            del self._last[-num_tokens:]

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        """Implement `Grammar`."""
        if self._matcher.is_terminated():
            row[:] = 0
            for token in self._vocabulary.stop_token_ids:
                row[token // 32] |= np.uint32(1 << token % 32).view(np.int32)
            return
        self._matcher.fill_next_token_bitmask(row[np.newaxis])
        if self._is_after_ed:
            row &= self._not_after_ed

    @property
    def _is_after_ed(self) -> bool:
        """True if the text ends in the byte that may begin half of a surrogate pair."""
        return bool(self._last) and self._vocabulary.token_bytes[self._last[-1]].endswith(b"\xed")

    def _may_follow(self, token: int) -> bool:
        return bool(self._not_after_ed[token // 32] >> token % 32 & 1)

    @property
    def is_terminated(self) -> bool:
        """Implement `Grammar`."""
        return bool(self._matcher.is_terminated())

    def forced_tokens(self, most: int) -> list[int]:
        """Implement `Grammar`."""
        if self._matcher.is_terminated():
            return []
        try:
            text = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError:  # the forced text begins or ends within a character
            return []
        before = self._vocabulary.token_bytes[self._last[-1]] if self._last else b""
        return self._vocabulary.tokenize(text, before, most) if text else []


def _pack(flags: list[bool]) -> NDArray[np.int32]:
    """Return a bitmask, as in `Grammar.fill_bitmask`."""
    bits = np.zeros(-(-len(flags) // 32) * 32, np.bool_)
    bits[: len(flags)] = flags
    return np.packbits(bits, bitorder="little").view(np.int32)


def _from_regex(pattern: str) -> str:
    """Return the grammar of a regular expression.

    The library's reader has another syntax than the documented one.
    """
    return "root ::=" + to_ebnf(whole(parse(pattern), pattern))


def _prepare_tag(tag: Any, spec: GrammarSpec) -> None:
    """Rewrite regular expressions and grammars of a structural tag so that the library reads them.

    Raises:
        GrammarError: the tag has parts that the library would ignore.
    """
    todo = [tag]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            value.pop("texts", None)  # special tokens are outside of texts here
            if "not_first" in value:
                raise _refusal("not_first is not supported")
            for key in ("schema", "json_schema"):
                if isinstance(value.get(key), dict):
                    rewrite(value[key], spec.additional_properties, spec.strict)
                    prepare_schema(value[key])
            if value.get("type") == "regex" and isinstance(value.get("pattern"), str):
                grammar = _from_regex(value.pop("pattern"))
                value.update(type="grammar", grammar=grammar)
            elif value.get("type") == "grammar" and isinstance(value.get("grammar"), str):
                value["grammar"] = mend_ebnf(value["grammar"])
            todo += [v for k, v in value.items() if k not in ("schema", "json_schema")]
        elif isinstance(value, list):
            todo += value


def _refusal(message: str) -> GrammarError:
    text = " ".join(_SOURCE.sub("", message).split())[:300]
    return GrammarError(f"xgrammar: {text or 'the grammar is invalid'}")
