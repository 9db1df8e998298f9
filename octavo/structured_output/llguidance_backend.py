"""Grammar backend llguidance: a lexer by derivatives and an Earley parser, both under limits."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from octavo.errors import GrammarError
from octavo.messages import GrammarSpec
from octavo.structured_output.base import (
    CompiledGrammar,
    Grammar,
    GrammarBackend,
    check_satisfiable,
    is_ebnf,
)
from octavo.structured_output.json_schema import (
    counts_repeated,
    parse_choices,
    parse_json,
    schemas_of,
)
from octavo.structured_output.lark import lark_from_ebnf, lark_from_tag
from octavo.structured_output.regex import Set, Token, parse, to_rust, whole
from octavo.structured_output.rewrite import combined, rewrite
from octavo.structured_output.vocabulary import Vocabulary

# Maximum number of lexer states; each uses 1 to 2 kB.
_MAX_LEXER_STATES = 25_000
# Maximum number of parser items at one place of a text: each optional property uses 4.
_MAX_ITEMS = 5_000
_ESCAPED = "%[0-9a-fA-F]{2}"
_HOST = rf"(?:[\w.~!$&'()*+,;=-]|{_ESCAPED})*"
_USER = rf"(?:[\w.~!$&'()*+,;=:-]|{_ESCAPED})*@"
_PATH = rf"(?:[\w.~!$&'()*+,;=:@-]|{_ESCAPED})"
_TAIL = rf"(?:[\w.~!$&'()*+,;=:@/?-]|{_ESCAPED})*"
_NAME = rf"(?:\w|{_ESCAPED})+(?:\.(?:\w|{_ESCAPED})+)*(?::[1-9]\d{{0,3}}|\*)?"
# Formats that the library does not know, of RFC 3986 and RFC 6570.
_PATTERNS = {
    "uri-reference": (
        r"^(?:(?:[A-Za-z][A-Za-z0-9+.-]*:)?"
        rf"(?://(?:{_USER})?(?:\[[0-9a-fA-Fv:.]+\]|{_HOST})(?::\d*)?(?:/{_PATH}*)*"
        rf"|/(?:{_PATH}+(?:/{_PATH}*)*)?)"
        rf"|[A-Za-z][A-Za-z0-9+.-]*:(?:{_PATH}+(?:/{_PATH}*)*)?"
        rf"|(?:(?:[\w.~!$&'()*+,;=@-]|{_ESCAPED})+(?:/{_PATH}*)*)?)"
        rf"(?:\?{_TAIL})?(?:#{_TAIL})?$"
    ),
    "uri-template": (
        rf"^(?:[!#$&-;=?-\[\]_a-z~\u{{a0}}-\u{{d7ff}}\u{{e000}}-\u{{10ffff}}]|{_ESCAPED}"
        rf"|\{{[+#./;?&=,!@|]?{_NAME}(?:,{_NAME})*\}})*$"
    ),
}
# Keywords of old drafts that the library does not know.
_IGNORED = ("divisibleBy", "extends", "disallow")


class LLGuidanceBackend(GrammarBackend):
    """Backend llguidance. The import takes 0.2 s and 7 MiB.

    Args:
        vocabulary: the model's vocabulary.
    """

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(vocabulary)))
        self._limits = llguidance.LLParserLimits(
            max_items_in_row=_MAX_ITEMS, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
        )

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Implement `GrammarBackend`."""
        try:
            source = _source(spec, self._vocabulary.special_tokens)
        except GrammarError:
            raise
        except KeyError as error:
            raise _refusal(f"the field {error} is missing") from None
        except (ValueError, RecursionError, TypeError, AttributeError) as error:
            raise _refusal(str(error)) from None
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        compiled = _Compiled(matcher, self._vocabulary)
        check_satisfiable(compiled, self._vocabulary.size, self.name)
        return compiled


class _Tokens:
    """Vocabulary with the attributes that llguidance expects.

    It has one token more, which stands for the end of the text: the library matches no end token
    in a grammar, but a stop token may be a part of one.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.tokens = [*vocabulary.token_bytes, b""]
        for text, token in vocabulary.special_tokens.items():
            self.tokens[token] = text.encode()
        self.eos_token_id = vocabulary.size
        self.bos_token_id = None
        self.special_token_ids = [
            *vocabulary.stop_token_ids,
            *vocabulary.special_tokens.values(),
            self.eos_token_id,
        ]

    def __call__(self, text: str) -> list[int]:
        # Not the space that sentencepiece puts before a text: the library would fail on it.
        return self._vocabulary.tokenize(text, b"", 4 * len(text))


class _Compiled(CompiledGrammar):
    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self.stop_token_ids = frozenset(vocabulary.stop_token_ids)
        self._stop_row = np.zeros(-(-vocabulary.size // 32), np.int32)
        for token in vocabulary.stop_token_ids:
            self._stop_row[token // 32] |= np.uint32(1 << token % 32).view(np.int32)

    def start(self) -> Grammar:
        """Implement `CompiledGrammar`."""
        return _Grammar(self._matcher.deep_copy(), self._vocabulary, self._stop_row)


class _Grammar(Grammar):
    def __init__(
        self, matcher: LLMatcher, vocabulary: Vocabulary, stop_row: NDArray[np.int32]
    ) -> None:
        self._matcher, self._vocabulary, self._stop_row = matcher, vocabulary, stop_row
        self._stops = frozenset(vocabulary.stop_token_ids)
        self._terminated = False  # stored here: the library cannot roll back a stop token
        self._last: list[int] = []

    def accept_tokens(self, token_ids: Sequence[int]) -> int:
        """Implement `Grammar`."""
        for count, token in enumerate(token_ids):
            if self._terminated or token >= self._vocabulary.size:
                return count
            if token in self._stops:
                if not (self._matcher.is_accepting() or self._matcher.validate_tokens([token])):
                    return count
                self._terminated = True
            elif self._matcher.is_stopped() or not self._matcher.try_consume_tokens([token]):
                self._check()
                return count
            self._last.append(token)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Implement `Grammar`."""
        if not num_tokens:
            return
        del self._last[-num_tokens:]
        num_tokens -= self._terminated
        self._terminated = False
        if num_tokens:
            self._matcher.rollback(num_tokens)
            self._check()

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        """Implement `Grammar`."""
        if self._terminated:
            row[:] = self._stop_row
            return
        end = self._vocabulary.size
        mask = np.empty(end // 32 + 1, np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        mask[-1] &= (1 << end % 32) - 1  # no token is beyond it
        row[:] = mask[: len(row)]
        if self._matcher.is_accepting():  # the mask may contain the end even if not
            row |= self._stop_row

    @property
    def is_terminated(self) -> bool:
        """Implement `Grammar`."""
        return self._terminated

    def forced_tokens(self, most: int) -> list[int]:
        """Implement `Grammar`."""
        if self._terminated or self._matcher.is_stopped():
            return []
        # A special token is 0xff and its number.
        data = self._matcher.compute_ff_bytes().partition(b"\xff")[0]
        text = data.decode("utf-8", "ignore")
        before = self._vocabulary.token_bytes[self._last[-1]] if self._last else b""
        return self._vocabulary.tokenize(text, before, most) if text else []

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refusal(self._matcher.get_error())


def _source(spec: GrammarSpec, special_tokens: Mapping[str, int]) -> str:
    """Return the source of a grammar in the library's format."""
    if spec.kind == "json_object":
        return LLMatcher.grammar_from_json_schema(_write_schema({"type": "object"}, spec))
    if spec.kind == "json":
        schema = _write_schema(parse_json(spec.text), spec)
        return LLMatcher.grammar_from_json_schema(schema)
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(to_rust(whole(parse(spec.text), spec.text)))
    if spec.kind == "choice":
        choices = parse_choices(spec.text)
        literals = " | ".join(
            json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in choices
        )
        # One terminal, since a rule with thousands of them exceeds the parser's limits.
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + literals)
    if spec.kind == "grammar":
        return LLMatcher.grammar_from_lark(
            lark_from_ebnf(spec.text) if is_ebnf(spec.text) else spec.text
        )
    return lark_from_tag(
        parse_json(spec.text), lambda schema: _write_schema(schema, spec), special_tokens
    )


def _write_schema(schema: Any, spec: GrammarSpec) -> str:
    """Return a schema, rewritten for the library and with the library's options in it."""
    if schema is True:
        schema = {}
    rewrite(schema, spec.additional_properties, spec.strict)
    if not isinstance(schema, dict):
        raise _refusal(f"the schema {json.dumps(schema)[:80]} allows no text")
    _check_schema(schema)
    _mend(schema)
    _check_bounds(schema)
    # Escapes of printable characters (\u00e9) and surrogate pairs in texts without a pattern.
    options: dict[str, Any] = {"lenient": False, "json_allow_general_unicode_escapes": True}
    if not spec.any_whitespace:
        options |= {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return json.dumps(schema | {"x-guidance": options}, ensure_ascii=False)


def _check_schema(root: Any) -> None:
    """Reject a schema with keywords that the library would ignore or misread."""
    for schema in schemas_of(root):
        for key in _IGNORED:
            if key in schema:
                raise _refusal(f"{key} is not supported")
        if schema is not root and "$id" in schema and "$ref" in schema:
            # The draft decides whether the reference is relative to the $id.
            raise _refusal("$id together with $ref is not supported")
        if counts_repeated(schema):
            raise _refusal("minProperties is not supported where a property may occur twice")


def _check_bounds(root: Any) -> None:
    """Reject bounds such as over 2 and below 2.5, of which the library allows 2.

    The library may merge the bounds of several schemas, so the check merges all of them.
    """
    bounds: dict[str, set[float]] = {}
    for schema in schemas_of(root):
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            value = schema.get(key)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                bounds.setdefault(key, set()).add(value)
    for key, others, sign in (
        ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        whole = {value for value in bounds.get(key, ()) if value == int(value)}
        for other in others:
            for value in bounds.get(other, ()):
                nearest = math.floor(value) if sign > 0 else math.ceil(value)
                if nearest != value and nearest in whole:
                    raise _refusal(
                        f"{key} {nearest} and {other} {value} are not supported together"
                    )


def _mend(root: Any) -> None:
    """Rewrite a schema so that the library accepts no invalid text.

    The library reads names of additional properties with any escape, so "\\u0061" would pass as a
    name other than "a". It spells names that match a pattern in one way only, and "" matches all
    names. Combined schemas need the pattern in one place only; the library considers two patterns
    contradictory.
    """
    parts = {id(schema) for schema in combined(root)}
    for schema in schemas_of(root):
        additional = schema.get("additionalProperties", True)
        if schema.get("format") in _PATTERNS and "pattern" not in schema:
            schema["pattern"] = _PATTERNS[schema.pop("format")]
        pattern, patterns = schema.get("pattern"), schema.get("patternProperties")
        is_open = patterns is None and additional in (True, {}) and id(schema) not in parts
        if schema.get("properties") and is_open:
            schema["patternProperties"] = {"": True}
            schema["additionalProperties"] = False
        if isinstance(pattern, str):
            schema["pattern"] = to_rust(_keep_controls_out(parse(pattern)))
        if isinstance(patterns, dict):
            for name in patterns:
                if _keep_controls_out(parse(name)) != parse(name):
                    raise _refusal(
                        f"the negated set in patternProperties {name[:80]!r} is not supported"
                    )
            schema["patternProperties"] = {to_rust(parse(k)): v for k, v in patterns.items()}


def _keep_controls_out(tokens: list[Token]) -> list[Token]:
    """Exclude control characters from negated sets without quotation marks or backslashes.

    The library allows these two, escaped, if a set has characters such as a line feed.
    """
    return [
        Set((*token.parts, (0, 0x1F)), is_negated=True)
        if isinstance(token, Set) and token.is_negated and not _has_quotes(token)
        else token
        for token in tokens
    ]


def _has_quotes(chars: Set) -> bool:
    return all(any(a <= ord(char) <= b for a, b in chars.ranges) for char in '"\\')


def _refusal(message: str) -> GrammarError:
    lines = [line for line in message.splitlines() if line.strip()]
    return GrammarError(f"llguidance: {' '.join(lines)[:300] or 'the grammar is invalid'}")
