"""Texts of windows that follow one another, joined as their script is written.

The characters at both sides decide, not the name of the language: it may be unknown, and a text may
be in several languages.
"""

from __future__ import annotations

import re

# Marks that East Asian texts share with others.
_SHARED_MARKS = "\"'()“”‘’…—·"  # noqa: RUF001
# Marks that belong to the text before them; "..." and ".5" may begin one.
_CLOSING = re.compile(r"[,;:!?%)\]}]|\.(?![.\d])")
# Letters, marks and forms of Chinese and Japanese.
_EAST = re.compile(
    "[\u3000-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\ufe10-\ufe1f\ufe30-\ufe4f"
    "\uff00-\uff9f\uffe0-\uffe6\U00020000-\U0003ffff]"
)
# Letters of Thai, Lao, Burmese and Khmer, whose spaces divide phrases.
_SOUTH = re.compile(
    "[\u0e01-\u0e3a\u0e40-\u0e4e\u0e80-\u0ece\u0edc-\u0edf\u1000-\u103f\u1050-\u108f\u1780-\u17d3"
    "\ua9e0-\ua9ef\ua9fa-\ua9fe\uaa60-\uaa7f]"
)


def join(before: str, text: str) -> str:
    """Return what a text adds to the text before: itself, perhaps with a space before it.

    Chinese, Japanese, Thai, Lao, Burmese and Khmer have no spaces between words. A text that begins
    with a space keeps it, unless nothing is before it.

    Args:
        before: all text before; it ends without a space.
        text: the next text.
    """
    text = text.rstrip()
    if not before:
        return text.lstrip()
    if not text or text[0].isspace() or _CLOSING.match(text):
        return text
    left = before.rstrip(_SHARED_MARKS)[-1:] or before[-1]
    right = text.lstrip(_SHARED_MARKS)[:1] or text[0]
    return text if _are_joined(left, right) else f" {text}"


def _are_joined(left: str, right: str) -> bool:
    """Return True if no space is between two characters."""
    east = [_EAST.match(char) is not None for char in (left, right)]
    if any(east):
        # A mark of full width has its own space; a number belongs to the character beside it.
        others = [c for c, is_east in zip((left, right), east, strict=True) if not is_east]
        is_mark = any(e and not c.isalnum() for c, e in zip((left, right), east, strict=True))
        return is_mark or all(char.isdecimal() or char == "%" for char in others)
    return all(_SOUTH.match(char) for char in (left, right))
