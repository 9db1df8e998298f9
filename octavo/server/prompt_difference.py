"""Place where a prompt differs from an earlier one: its texts, and what often changes there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from octavo.server import explain_answers

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

_BEFORE, _AFTER = 24, 40
"""Tokens before and after the first one that differs, which are decoded."""
_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_HEADER = re.compile(r"x-anthropic-billing-header", re.IGNORECASE)
_VOLATILE = (
    (
        "a date or time",
        re.compile(
            r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?:[T ]?\d{1,2}(?::\d{2}){0,2})?"
            r"|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}"
            r"|\d{1,2}:\d{2}(?::\d{2})?(?:\.\d+)?"
            rf"|(?:{_MONTHS})[a-z]*\.? \d{{1,2}}(?:,? \d{{4}})?"
            rf"|\d{{1,2}}\.? (?:{_MONTHS})[a-z]*\.?(?: \d{{4}})?"
            r"|\b1\d{9}(?:\d{3})?\b",
            re.IGNORECASE,
        ),
    ),
    (
        "an id",
        re.compile(
            r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b"
            r"|\b(?=[0-9a-z_-]*\d)(?=[0-9a-z_-]*[a-z])[0-9a-z]+(?:[_-][0-9a-z]+)*(?<=[0-9a-z_-]{12})\b",
            re.IGNORECASE,
        ),
    ),
)


def find_difference(
    tokenizer: Tokenizer, prompt: bytes, earlier: bytes, token: int, *, with_texts: bool
) -> explain_answers.PromptDifference:
    """Describe the place where a prompt differs from an earlier one of the same key.

    Args:
        tokenizer: decodes the tokens.
        prompt: token ids as int32.
        earlier: those of the earlier prompt with its answer.
        token: index of the first token that differs.
        with_texts: True to include the texts around it.
    """
    ids, others = (np.frombuffer(data, np.int32)[: token + _AFTER] for data in (prompt, earlier))
    begin = max(0, token - _BEFORE)
    before, after, there = (
        tokenizer.decode(part.tolist(), skip_special_tokens=False)
        for part in (ids[begin:token], ids[begin:], others[begin:])
    )
    found: explain_answers.PromptDifference = {"volatile": volatile_at(after, len(before))}
    if with_texts:
        found |= {"text": after, "earlier_text": there}
    return found


def volatile_at(text: str, position: int) -> str | None:
    """Return what changes from prompt to prompt at a character of a text: a date, an id ..."""
    begin = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    line, place = text[begin : end if end >= 0 else None], position - begin
    if _HEADER.search(line):
        return "an agent's billing header"
    for name, pattern in _VOLATILE:
        if any(match.start() <= place <= match.end() for match in pattern.finditer(line)):
            return name
    return None
