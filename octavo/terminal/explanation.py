"""Texts of `octavo explain`: the list of recent requests, and the time line of one."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.server.client import Explanation, RecentRequests

_LEAST_BAR = 8
_MOST_BAR = 60
_FULL = "█"
_PARTS = " ▏▎▍▌▋▊▉"
_INDENT = "   "


def listed(requests: RecentRequests) -> str:
    """Return the table of recent requests."""
    rows = [("ID", "ROUTE", "AT", "SECONDS", "TOKENS", "STATUS")]
    for request in requests.data:
        rows.append(
            (
                request.id,
                request.path,
                time.strftime("%H:%M:%S", time.localtime(request.created)),
                f"{request.seconds:.3f}",
                str(request.completion_tokens),
                "runs" if request.status is None else str(request.status),
            )
        )
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def described(found: Explanation, width: int | None = None) -> str:
    """Return the explanation of a request, with a bar for each part of its time line.

    Args:
        found: the explanation.
        width: columns of the terminal; None: as they are.
    """
    width = width or shutil.get_terminal_size().columns
    first = "" if found.first_token_ms is None else f", first token {found.first_token_ms:,.1f} ms"
    state = f"status {found.status}" if found.finished else "still running"
    head = (
        f"{found.id}: {found.wall_ms:,.1f} ms{first}, "
        f"{found.completion_tokens} tokens, {state}, {found.path}"
    )
    lines = [head, "", "time line"]
    room = max(_LEAST_BAR, min(_MOST_BAR, width - 26))
    longest = max((span.ms for span in found.timeline), default=0.0)
    for span in found.timeline:
        bar = _bar(span.ms / longest * room if longest else 0.0)
        lines.append(f"{span.begin_ms:>11,.1f} {span.ms:>10,.1f} ms {bar}")
        lines += _wrapped(span.text, width, " " * 26 if width >= 60 else _INDENT)
    lines += ["", "by cause"]
    for cause in found.causes:
        share = cause.ms / found.wall_ms * 100 if found.wall_ms else 0.0
        lines.append(f"{cause.ms:>22,.1f} ms {share:>5.1f} %  {cause.text}")
    lines += ["", *_cache(found.cache)]
    if found.advice:
        lines += ["", "what would have helped"]
    for advice in found.advice:
        lines += _wrapped(f"{advice.setting}: {advice.text}", width, _INDENT)
    return "\n".join(lines)


def _bar(length: float) -> str:
    """Return a bar of a number of columns, to an eighth; never empty."""
    eighths = max(1, round(length * 8))
    whole, rest = divmod(eighths, 8)
    return _FULL * whole + (_PARTS[rest] if rest else "")


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)


def _cache(cache: dict[str, Any]) -> list[str]:
    """Return the lines about the cache."""
    lines = ["cache", *(f"{_INDENT}{sentence}" for sentence in cache["text"])]
    for name, title in (("text", "this prompt"), ("earlier_text", "before")):
        text = (cache["difference"] or {}).get(name)
        if text is not None:
            lines.append(f"{_INDENT}{title}: {text!r}")
    return lines
