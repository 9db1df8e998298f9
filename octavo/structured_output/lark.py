"""EBNF and structural tags in llguidance's notation, Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import llguidance

from octavo.errors import GrammarError
from octavo.structured_output.base import check_ebnf
from octavo.structured_output.regex import parse, to_rust, whole

_EBNF_TOKENS = re.compile(
    r'"(?P<text>(?:[^"\\]++|\\.)*+)"?|\[(?P<set>(?:[^\]\\]++|\\.)*+)\]?'
    r"|(?P<rule>[\w-]+(?=\s*::=))|(?P<name>[\w-]+)|\#[^\n\r]*|\s+|(?P<other>\{[^{}]*\}|::=|.)",
    re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL
)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"} | {c: c for c in "\"'\\/[]-^"}
_LOWER = re.compile(r"[a-z_][a-z0-9_]*")

# Fields of a format that change its meaning if they have another value.
_PLAIN: dict[str, dict[str, Any]] = {
    "json_schema": {
        "style": "json",
        "any_order": False,
        "max_whitespace_cnt": None,
        "excludes": [],
    },
    "any_text": {"excludes": [], "max_tokens": None, "max_chars": None},
    "triggered_tags": {"excludes": []},
}
_QUANTIFIERS = {"optional": "?", "plus": "+", "star": "*"}

Ends = Sequence[str] | None
"""Texts of which one follows a format; empty: the answer ends there; None: another format
follows."""


def lark_from_ebnf(text: str) -> str:
    """Return a grammar in EBNF as Lark.

    Raises:
        GrammarError: the grammar has a token of llama.cpp, or an unknown escape.
        ValueError: the library cannot convert the grammar.
    """
    check_ebnf(text)
    # The converter makes a rule without recursion one terminal, which the lexer reads greedily; it
    # excepts the rule root. With this rule a grammar without recursion is one terminal, and exact.
    names = _Names()
    rules = "".join(_mend(token, names) for token in _EBNF_TOKENS.finditer(text))
    return str(llguidance.grammar_from("grammar", f"root ::= whole\n{rules}"))


class _Names(dict[str, str]):
    """Names of rules that stay different when the converter makes them lower-case."""

    def __init__(self) -> None:
        super().__init__(root="whole")
        self._taken = {"root", "start", "whole"}

    def __missing__(self, name: str) -> str:
        found, number = name.replace("-", "_").lower(), len(self)
        while found in self._taken or not _LOWER.fullmatch(found):
            found, number = f"rule_{number}", number + 1
        self._taken.add(found)
        self[name] = found
        return found


def _mend(token: re.Match[str], names: _Names) -> str:
    """Return a token of EBNF as the library's converter reads it.

    The converter needs each rule in one line, and knows few escapes.
    """
    kind, value = token.lastgroup, token[0]
    if kind in ("text", "set"):
        inner = token[kind]
        if len(value) != len(inner) + 2:
            raise _refusal(f"{value[:80]} has no end")
        chars = _read_chars(inner)
        if kind == "set":
            return _gbnf_set(chars)
        return f'"{"".join(_gbnf_char(char) for char, _ in chars)}" '
    if kind in ("rule", "name"):
        return ("\n" if kind == "rule" else "") + names[value] + " "
    return f"{value} " if kind else " "


def _read_chars(text: str) -> list[tuple[str, bool]]:
    """Return the characters of a text or class, each with True if an escape stands for it.

    Raises:
        GrammarError: an escape is unknown, or stands for no character.
    """
    found = []
    for part in _ESCAPE.finditer(text):
        code = int(part[1] or part[2] or part[3] or "0", 16)
        name = part[4]
        is_unknown = name is not None and name not in _ESCAPED
        if is_unknown or code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise GrammarError(
                f"The grammar has the escape {part[0]}, which stands for no character; use \\n "
                '\\r \\t \\0 \\" \\\\ \\[ \\] \\xHH \\uHHHH \\UHHHHHHHH, or write the character.'
            )
        char = part[5] or (chr(code) if name is None else _ESCAPED[name])
        found.append((char, part[5] is None))
    return found


def _gbnf_set(chars: list[tuple[str, bool]]) -> str:
    """Return a class with escapes for all characters that the library could misread."""
    start = "^" if chars[:1] == [("^", False)] else ""
    chars = chars[len(start) :]
    parts, at = [f"[{start}"], 0
    while at < len(chars):
        first = chars[at][0]
        parts.append(_gbnf_char(first))
        if at + 2 < len(chars) and chars[at + 1] == ("-", False):
            last = chars[at + 2][0]
            if last < first:
                raise _refusal(f"the range {first}-{last} has no characters")
            parts.append(f"-{_gbnf_char(last)}")
            at += 2
        at += 1
    return "".join([*parts, "] "])


def _gbnf_char(char: str) -> str:
    is_plain = char.isalnum() or char == " " or not char.isascii()
    return char if is_plain else f"\\x{ord(char):02x}"


def lark_from_tag(
    tag: Any, write_schema: Callable[[Any], str], special_tokens: Mapping[str, int]
) -> str:
    """Return the grammar of a structural tag: Lark, or JSON with several grammars.

    Args:
        tag: the structural tag, of either form.
        write_schema: returns a schema as the argument of Lark's `%json`.
        special_tokens: special tokens by their text. Where the beginning or the end of a tag
            contains such a text, it stands for the token.

    Raises:
        GrammarError: a part is unsupported.
        KeyError, TypeError, AttributeError: the tag has not the form of a structural tag.
    """
    if isinstance(tag, dict) and "structures" in tag:
        tags = [
            {
                "begin": item["begin"],
                "content": {"type": "json_schema", "json_schema": item["schema"]},
                "end": item["end"],
            }
            for item in _list(tag, "structures")
        ]
        tag = {"format": {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}}
    if not isinstance(tag, dict) or "format" not in tag:
        raise _refusal('a structural tag must have a "format", or "structures" and "triggers"')
    writer = _TagWriter(write_schema, special_tokens)
    start = writer.write(tag["format"], ())
    lark = "\n".join([f"start: {start}", r"TEXT: /(.|\n)*/", *writer.rules])
    if not writer.grammars:
        return lark
    grammars = [("tag", lark), *writer.grammars.items()]
    return json.dumps({"grammars": [{"name": n, "lark_grammar": text} for n, text in grammars]})


class _TagWriter:
    """Writer of the formats of a structural tag; `rules` and `grammars` belong to its results."""

    def __init__(
        self, write_schema: Callable[[Any], str], special_tokens: Mapping[str, int]
    ) -> None:
        self._write_schema = write_schema
        self._special_tokens = special_tokens
        texts = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None
        self.rules: list[str] = []
        self.grammars: dict[str, str] = {}

    def write(self, content: Any, ends: Ends) -> str:
        """Return a format and one of its ends, as the right side of a rule."""
        kind = content["type"]
        for field, value in _PLAIN.get(kind, {}).items():
            if content.get(field, value) != value:
                raise _refusal(f"{field} of the format {kind} is not supported")
        regular = self._write_regular(content)
        if regular is not None:
            if any(map(self._has_token, ends or ())):
                return f"{self._add('T', ': ', regular)} {self._any_text(ends)}"
            return self._add("T", ": ", f"{regular} {_any_of(map(_literal, ends or ()))}")
        if kind == "sequence":
            *others, last = self._merge_regular(_list(content, "elements"))
            return " ".join([*(self.write(e, None) for e in others), self.write(last, ends)])
        if kind == "or":
            return _any_of(self.write(element, ends) for element in _list(content, "elements"))
        if kind in ("any_text", "triggered_tags"):
            return self._write_free(content, ends)
        return f"{self._write_closed(kind, content)} {self._any_text(ends)}"

    def _merge_regular(self, formats: Any) -> list[Any]:
        """Return a sequence with each run of regular languages as one sequence."""
        merged = list[Any]()
        for is_regular, group in groupby(formats, lambda f: self._write_regular(f) is not None):
            run = list(group)
            merged += [{"type": "sequence", "elements": run}] if is_regular else run
        return merged

    def _write_regular(self, content: Any) -> str | None:
        """Return a regular language as the right side of a terminal; None for another format.

        The lexer reads terminals greedily, so a regular expression and the text after it are one.
        """
        kind = content["type"]
        if kind == "const_string":
            return None if self._has_token(content["value"]) else _literal(content["value"])
        if kind == "regex":
            pattern = content["pattern"]
            return f"/(?:{to_rust(whole(parse(pattern), pattern))})/"
        if kind in ("sequence", "or"):
            elements = _list(content, "elements")
            parts = [part for e in elements if (part := self._write_regular(e)) is not None]
            if len(parts) < len(elements):
                return None
            return _any_of(parts) if kind == "or" else f"({' '.join(parts)})"
        if kind not in (*_QUANTIFIERS, "repeat", "tag"):
            return None
        inner = self._write_regular(content["content"])
        if inner is None:
            return None
        if kind == "tag":
            if any(map(self._has_token, [content["begin"], *_ends(content)])):
                return None
            ends = _any_of(map(_literal, _ends(content)))
            return f"({_literal(content['begin'])} {inner} {ends})"
        return f"({inner}){_quantifier(content)}"

    def _write_closed(self, kind: str, content: Any) -> str:
        """Return a format that determines its own end."""
        if kind == "const_string":
            return self._text(content["value"])
        if kind == "json_schema":
            return f"%json {self._write_schema(content['json_schema'])}"
        if kind == "grammar":
            name = f"grammar_{len(self.grammars)}"
            self.grammars[name] = lark_from_ebnf(content["grammar"])
            return f"@{name}"
        if kind == "tag":
            return f"{self._text(content['begin'])} {self._write_content(content)}"
        if kind in (*_QUANTIFIERS, "repeat"):
            return f"({self.write(content['content'], None)}){_quantifier(content)}"
        if kind == "tags_with_separator":
            tags = [self._write_closed("tag", tag) for tag in _list(content, "tags")]
            tag = self._add("r", ": ", _any_of(tags))
            if not content.get("stop_after_first"):
                tag = f"({tag} ({self._text(content['separator'])} {tag})*)"
            return tag if content.get("at_least_one") else f"({tag})?"
        raise _refusal(f"the format {kind} is not supported")

    def _write_free(self, content: Any, ends: Ends) -> str:
        """Return free text up to the first of its ends, with the tags in it."""
        if ends is None or "" in ends:
            raise _refusal("free text is supported at the end, or in a tag with an end, only")
        start = self._write_start(content)
        starts = _any_of(self._write_text_before(end, start) for end in ends) or start
        if content["type"] == "any_text":
            return starts
        finish = _any_of(map(self._write_text_before, ends)) or "TEXT"
        tags = list[str]()
        after: dict[str, list[str]] = {}
        for tag in _list(content, "tags"):
            begin, inner = tag["begin"], self._add("r", ": ", self._write_content(tag))
            tags.append(f"{self._text(begin)} {inner}")
            triggers = [text for text in _list(content, "triggers") if begin.startswith(text)]
            if not triggers:
                raise _refusal(f"no trigger begins the tag {begin[:80]!r}")
            trigger = min(triggers, key=len)  # the first that the text contains
            after.setdefault(trigger, []).append(f"{self._text(begin[len(trigger) :])} {inner}")
        first, end = _any_of(tags), self._any_text(ends)
        call, others = self._write_tags(after), self._write_others(content)
        if start != "TEXT":
            if others or content.get("at_least_one"):
                raise _refusal("not_first with texts, or with at_least_one, is not supported")
            rest = end if content.get("stop_after_first") else f"{call}* {finish}"
            return f"({self._write_tags(after, start)} {rest} | {starts})"
        if content.get("stop_after_first"):
            if content.get("at_least_one"):
                return f"{first} {end}"
            return (
                f"{others}* ({call} {end} | {finish})" if others else f"({call} {end} | {finish})"
            )
        repeated = _any_of(filter(None, [call, others]))
        return f"{first if content.get('at_least_one') else ''} {repeated}* {finish}"

    def _write_tags(self, after: Mapping[str, list[str]], start: str = "TEXT") -> str:
        """Return text up to a trigger, and what follows it.

        Args:
            after: what may follow each trigger.
            start: terminal of the text.
        """
        calls = [
            f"{self._write_text_before(text, start)} {_any_of(found)}"
            for text, found in after.items()
        ]
        return self._add("r", ": ", _any_of(calls))

    def _write_start(self, content: Any) -> str:
        """Return the terminal of free text.

        The field `not_first`, which is Octavo's, has a regular expression: the text does not begin
        with a match.
        """
        pattern = content.get("not_first")
        if pattern is None:
            return "TEXT"
        found = to_rust(whole(parse(pattern), pattern))
        return self._add("T", ": ", f"TEXT & ~/(?:{found})(.|\\n)*/")

    def _write_others(self, content: Any) -> str:
        """Return text up to one of the format's other special tokens; "" without such tokens.

        The field `texts`, which is Octavo's, has the texts with special tokens that may occur
        outside of tags.
        """
        found = list[str]()
        for text in content.get("texts", ()):
            before, *rest = self._split(text)
            if rest:
                found.append(f"TEXT {self._text(text[len(before) :])}")
        return self._add("r", ": ", _any_of(found)) if found else ""

    def _write_content(self, tag: Any) -> str:
        """Return the content and the end of a tag."""
        return self.write(tag["content"], _ends(tag))

    def _write_text_before(self, end: str, start: str = "TEXT") -> str:
        """Return the shortest text of the terminal `start` and `end` after it."""
        if not end:
            raise _refusal("a trigger must not be empty")
        if not self._has_token(end):
            return self._add("r", "[lazy]: ", f"{start} {_literal(end)}")
        # No text contains a special token, so it ends the text by itself.
        before = self._split(end)[0]
        start = self._add("T", ": ", f"{start} {_literal(before)}") if before else start
        return self._add("r", ": ", f"{start} {self._text(end[len(before) :])}")

    def _split(self, text: str) -> list[str]:
        """Return the pieces of a text: each second one is the text of a special token."""
        _literal(text)  # rejects what is no text
        return [text] if self._special is None else self._special.split(text)

    def _has_token(self, text: str) -> bool:
        return len(self._split(text)) > 1

    def _text(self, text: str) -> str:
        """Return a text, with its special tokens, as a part of a rule."""
        parts = [
            f"<[{self._special_tokens[piece]}]>" if i % 2 else _literal(piece)
            for i, piece in enumerate(self._split(text))
            if piece
        ]
        return " ".join(parts) or _literal("")

    def _any_text(self, texts: Ends) -> str:
        return _any_of(map(self._text, texts or ()))

    def _add(self, prefix: str, separator: str, right: str) -> str:
        """Add a rule and return its name."""
        name = f"{prefix}_{len(self.rules)}"
        self.rules.append(f"{name}{separator}{right}")
        return name


def _list(content: Any, field: str) -> list[Any]:
    """Return a field that is a list with at least one value."""
    found = content[field]
    if not isinstance(found, list) or not found:
        raise _refusal(f"{field} of a structural tag must be a list that is not empty")
    return found


def _ends(tag: Any) -> list[str]:
    return _list(tag, "end") if isinstance(tag["end"], list) else [tag["end"]]


def _any_of(expressions: Iterable[str]) -> str:
    found = list(expressions)
    return f"({' | '.join(found)})" if found else ""


def _quantifier(content: Any) -> str:
    if content["type"] != "repeat":
        return _QUANTIFIERS[content["type"]]
    return f"{{{int(content['min'])},{'' if content['max'] == -1 else int(content['max'])}}}"


def _literal(text: str) -> str:
    if not isinstance(text, str):
        raise _refusal(f"{json.dumps(text)[:80]} is not a text; tokens are not supported")
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _refusal(message: str) -> GrammarError:
    return GrammarError(f"llguidance: {message}")
