"""Regular expressions: one syntax with one meaning, and its form for each backend.

The meaning is ECMAScript's with the flag u, and the whole text has to match. Syntax that Rust or
another common dialect reads differently is rejected, so an expression means the same everywhere.
`parse` reads an expression; `to_rust` and `to_ebnf` write it so that llguidance and xgrammar cannot
misread it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from octavo.errors import GrammarError

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
Ranges = tuple[tuple[int, int], ...]
"""Ranges of code points, each with its first and last one."""


def _complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return all characters except the given ones; a surrogate is no character."""
    result, start = [], 0
    for first, last in sorted([*ranges, _SURROGATES]):
        if start < first:
            result.append((start, first - 1))
        start = max(start, last + 1)
    return (*result, (start, _LAST)) if start <= _LAST else tuple(result)


_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = (
    *((9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_SETS = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
_QUANTIFIER = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})(\??)")
_GROUP = re.compile(r"\((?:\?(?::|i:|P?<[A-Za-z_][A-Za-z0-9_]*>))?(?!\?)")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_=]+\}")
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")


@dataclass(frozen=True)
class Set:
    """Set that matches one character."""

    parts: tuple[tuple[int, int] | str, ...]
    """Ranges; names of sets (D, W, S) and properties (`p{L}`)."""
    is_negated: bool = False

    @cached_property
    def ranges(self) -> Ranges:
        """Characters of the set, in order.

        Raises:
            GrammarError: the set has a Unicode property, which cannot be listed here.
        """
        found: list[tuple[int, int]] = []
        for part in self.parts:
            if not isinstance(part, str):
                found.append(part)
            elif part in ("D", "W", "S"):
                found += _complement(_SETS[part.lower()])
            else:
                raise GrammarError(
                    f"xgrammar does not support \\{part} in a regular expression; list the "
                    "characters, or let another backend be chosen."
                )
        negated = _complement(found)
        return negated if self.is_negated else _complement(negated)


@dataclass(frozen=True)
class Mark:
    """Other token: `(`, `(?:`, `(?i:`, `(?i)`, `)`, `|`, `^`, `$`, or a quantifier."""

    text: str


Token = Set | Mark


def parse(pattern: str) -> list[Token]:
    """Return the parts of an expression.

    Raises:
        GrammarError: common dialects read a part of the expression differently.
    """
    return list(_Parser(pattern).parse())


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern, self._at = pattern, 0

    def parse(self) -> Iterator[Token]:
        pattern, depth, is_atom = self._pattern, 0, False
        if pattern.startswith("(?i)"):
            self._at = 4
            yield Mark("(?i)")
        while self._at < len(pattern):
            char = pattern[self._at]
            if char in "*+?{":
                if not is_atom:
                    raise self._refusal(f"{char} with nothing to repeat", rf"write \{char}")
                yield self._quantifier()
                is_atom = False
            elif char == "(":
                found = _GROUP.match(pattern, self._at)
                if found is None:
                    raise self._refusal(
                        f"the group {pattern[self._at : self._at + 4]}",
                        "use (...), (?:...), (?i:...), (?<name>...) or (?i) at the beginning",
                    )
                self._at, depth, is_atom = found.end(), depth + 1, False
                yield Mark("(?i:" if found[0] == "(?i:" else "(?:")
            elif char == ")":
                if not depth:
                    raise self._refusal("an unmatched )", r"write \)")
                self._at, depth, is_atom = self._at + 1, depth - 1, True
                yield Mark(")")
            elif char in "|^$":
                self._at, is_atom = self._at + 1, False
                yield Mark(char)
            else:
                is_atom = True
                yield self._set()
        if depth:
            raise self._refusal("an unclosed (", "close it with )")

    def _quantifier(self) -> Mark:
        found = _QUANTIFIER.match(self._pattern, self._at)
        if found is None:
            raise self._refusal("{ without a number of repeats", r"write \{")
        self._at = found.end()
        if self._pattern[self._at : self._at + 1] in {"*", "+", "?", "{"}:
            raise self._refusal("two quantifiers one after the other", "put the first in (?:...)")
        return Mark(found[0].removesuffix("?") if found[1] else found[0])

    def _set(self) -> Set:
        char = self._pattern[self._at]
        if char == ".":
            self._at += 1
            return Set(_LINE_ENDS, is_negated=True)
        if char == "[":
            return self._class()
        part = self._atom(in_class=False)
        if isinstance(part, str) and part in ("D", "W", "S"):
            return Set(_SETS[part.lower()], is_negated=True)
        return Set(part if isinstance(part, tuple) else (part,))

    def _class(self) -> Set:
        pattern = self._pattern
        self._at += 1
        is_negated = pattern.startswith("^", self._at)
        self._at += is_negated
        parts: list[tuple[int, int] | str] = []
        if pattern.startswith("]", self._at):
            raise self._refusal("[] or [^]", r"write \] for a bracket, [\s\S] for any character")
        while not pattern.startswith("]", self._at):
            if self._at >= len(pattern):
                raise self._refusal("an unclosed [", "close it with ]")
            first = self._atom(in_class=True)
            if pattern.startswith("-", self._at) and not pattern.startswith("-]", self._at):
                self._at += 1
                last = self._atom(in_class=True)
                start, end = _single(first), _single(last)
                if start is None or end is None or start > end:
                    raise self._refusal("an invalid range in [...]", r"write \- for a hyphen")
                first = ((start, end),)
            parts += [first] if isinstance(first, str) else first
        self._at += 1
        return Set(tuple(parts), is_negated)

    def _atom(self, in_class: bool) -> Ranges | str:
        """Read one character or one set."""
        pattern, at = self._pattern, self._at
        char = pattern[at : at + 1]
        if char != "\\":
            if in_class and (char == "[" or pattern.startswith(("&&", "--", "~~"), at)):
                raise self._refusal(
                    f"{char} in [...], which has another meaning in Rust than in ECMAScript",
                    f"write \\{char}",
                )
            if 0xD800 <= ord(char or "a") <= 0xDFFF:
                raise self._refusal("half of a surrogate pair", "write the character")
            self._at += 1
            return ((ord(char), ord(char)),) if char else ()
        name = pattern[at + 1 : at + 2]
        self._at += 2
        if name in {"d", "w", "s"}:
            return _SETS[name]
        if name in {"D", "W", "S"}:
            return name
        if found := _PROPERTY.match(pattern, at + 1):
            self._at = found.end()
            return found[0]
        code = self._code(name, at, in_class)
        if code is None:
            self._at = at
            raise self._refusal(
                f"the escape \\{name}, which common dialects do not read alike",
                r"use \d \w \s \D \W \S \n \r \t \f \v \xHH \uHHHH \p{...}, and \ before "
                "punctuation",
            )
        return ((code, code),)

    def _code(self, name: str, at: int, in_class: bool) -> int | None:
        """Return the character of an escape, or None if it has none."""
        pattern = self._pattern
        if name in _CONTROLS:
            return _CONTROLS[name]
        if name == "b" and in_class:
            return 8
        if name == "0":
            return None if pattern[at + 2 : at + 3].isdecimal() else 0
        if name == "c":
            letter = pattern[at + 2 : at + 3]
            self._at += 1
            return ord(letter) % 32 if letter.isascii() and letter.isalpha() else None
        if found := _HEX.match(pattern, at + 1):
            self._at = found.end()
            code = int(found[1] or found[2] or found[3], 16)
            low = _LOW_SURROGATE.match(pattern, self._at)
            if 0xD800 <= code < 0xDC00 and found[2] and low:
                self._at = low.end()
                code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
            return code if code <= _LAST and not 0xD800 <= code <= 0xDFFF else None
        is_punctuation = name.isascii() and name.isprintable() and not name.isalnum()
        return ord(name) if name and is_punctuation else None

    def _refusal(self, what: str, fix: str) -> GrammarError:
        return GrammarError(
            f"The regular expression {self._pattern[:80]!r} has {what}, at {self._at}; {fix}."
        )


def _single(part: Ranges | str) -> int | None:
    return part[0][0] if len(part) == 1 and not isinstance(part, str) else None


def whole(tokens: list[Token], pattern: str) -> list[Token]:
    """Return an expression without the redundant `^` and `$` at its edges.

    Raises:
        GrammarError: the expression has `^` or `$` elsewhere.
    """
    result, depth = list[Token](), 0
    for i, token in enumerate(tokens):
        text = token.text if isinstance(token, Mark) else ""
        depth += text.startswith("(?") and text != "(?i)"
        depth -= text == ")"
        if text not in ("^", "$"):
            result.append(token)
            continue
        beside = i - 1 if text == "^" else i + 1
        at_edge = not 0 <= beside < len(tokens) or tokens[beside] in (Mark("|"), Mark("(?i)"))
        if depth or not at_edge:
            raise GrammarError(
                f"The regular expression {pattern[:80]!r} has {text} inside; leave it out: the "
                "whole text has to match anyway."
            )
    return result


def to_rust(tokens: list[Token]) -> str:
    """Return an expression in the syntax of Rust's crate `regex`."""
    return "".join(t.text if isinstance(t, Mark) else _rust_set(t) for t in tokens)


def _rust_set(chars: Set) -> str:
    if not chars.is_negated and len(chars.parts) == 1:
        (part,) = chars.parts
        if isinstance(part, str) or part[0] == part[1]:
            return _rust_part(part)
    return f"[{'^' if chars.is_negated else ''}{''.join(map(_rust_part, chars.parts))}]"


def _rust_part(part: tuple[int, int] | str) -> str:
    if not isinstance(part, str):
        first, last = part
        return _rust_char(first) + ("-" + _rust_char(last) if last > first else "")
    if part in ("D", "W", "S"):
        return f"[^{''.join(map(_rust_part, _SETS[part.lower()]))}]"
    return "\\" + part


def _rust_char(code: int) -> str:
    char = chr(code)
    return char if char.isalnum() or char == " " else f"\\u{{{code:x}}}"


def to_ebnf(tokens: list[Token]) -> str:
    """Return an expression as the right side of a rule in xgrammar's EBNF.

    Raises:
        GrammarError: xgrammar cannot express it.
    """
    words, is_empty = list[str](), True
    for token in [*tokens, Mark("")]:
        if isinstance(token, Set):
            words.append(f" {_ebnf_set(token)}")
        elif token.text.startswith("(?i"):
            raise GrammarError(
                "xgrammar does not support (?i) in a regular expression; write [aA] for a, or let "
                "another backend be chosen."
            )
        else:
            if is_empty and token.text in ("", "|", ")"):
                words.append(' ""')
            words.append(token.text if _is_quantifier(token) else " " + token.text[:1])
        is_empty = isinstance(token, Mark) and token.text in ("(?:", "|")
    return "".join(words)


def to_xgrammar_pattern(tokens: list[Token]) -> str:
    """Return an expression without quotation marks and backslashes for xgrammar's schemas.

    Raises:
        GrammarError: xgrammar cannot express it.
    """
    return "".join(t.text if isinstance(t, Mark) else _xgrammar_set(t) for t in tokens)


def _xgrammar_set(chars: Set) -> str:
    ranges = _checked(chars.ranges)
    if _is_single(ranges):
        char = chr(ranges[0][0])
        return char if char.isalnum() else f"\\u{{{ord(char):x}}}"
    caret = [r for r in ranges if r[0] == 0x5E]  # it would negate the set at its beginning
    ranges = tuple((0x5F, b) if a == 0x5E else (a, b) for a, b in ranges if (a, b) != (0x5E, 0x5E))
    texts = [_xgrammar_char(a) + ("-" + _xgrammar_char(b) if b > a else "") for a, b in ranges]
    return f"[{''.join(texts)}{'^' if caret else ''}]"


def _xgrammar_char(code: int) -> str:
    return "\\" + chr(code) if chr(code) in "-]" else chr(code)


def max_repeat(tokens: list[Token]) -> int:
    """Return the largest number in a quantifier."""
    numbers = [
        int(number)
        for token in tokens
        if isinstance(token, Mark) and _is_quantifier(token)
        for number in re.findall("[0-9]+", token.text)
    ]
    return max(numbers, default=0)


def _is_quantifier(token: Mark) -> bool:
    return token.text[:1] in {"*", "+", "?", "{"}


def _ebnf_set(chars: Set) -> str:
    ranges = _checked(chars.ranges)
    if _is_single(ranges):
        return f'"{_ebnf_char(ranges[0][0])}"'
    texts = [_ebnf_char(a) + ("-" + _ebnf_char(b) if b > a else "") for a, b in ranges]
    return f"[{''.join(texts)}]"


def _checked(ranges: Ranges) -> Ranges:
    if not ranges:
        raise GrammarError("A set in the regular expression has no characters; leave it out.")
    return ranges


def _is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _ebnf_char(code: int) -> str:
    # Not \x: xgrammar would take every hexadecimal digit that follows.
    return f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}"


def ebnf_literal(text: str) -> str:
    """Return a text as xgrammar's EBNF writes it."""
    return '"' + "".join(c if c.isalnum() else _ebnf_char(ord(c)) for c in text) + '"'


def mend_ebnf(grammar: str) -> str:
    r"""Return a user's grammar with `\xHH` as `\u00HH`, so that exactly two digits count.

    Raises:
        GrammarError: fewer than two digits follow.
    """

    def mend(found: re.Match[str]) -> str:
        if found[0] == "\\x":
            raise GrammarError(r"The grammar has \x without two hexadecimal digits; add them.")
        return f"\\u00{found[1]}" if found[1] else found[0]

    return re.sub(r"\\x([0-9a-fA-F]{2})|\\.", mend, grammar, flags=re.DOTALL)
