"""Numbers of tokens of an answer, apart from the client: its HTTP library is slow to import."""

from __future__ import annotations

from typing import NamedTuple


class Usage(NamedTuple):
    """Numbers of tokens of an answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    """Number of prompt tokens from the prefix cache; None: not reported."""
