"""What it takes to have a token's keys and values: to load them, or to compute them."""

from __future__ import annotations

_WEIGHT = 0.2
"""Of what was measured last; the rest is that of all before."""
_MANY = 16
"""Tokens for each request of a step from which on it tells of computing prompts."""


class PrefillCosts:
    """Learns from loads and steps how long each takes for a token."""

    def __init__(self) -> None:
        self._loads: dict[str, tuple[int, float]] = {}
        self._load: float | None = None
        self._compute: float | None = None

    @property
    def computing_is_cheaper(self) -> bool:
        """Whether it is known to be; loading is tried as long as nobody knows."""
        if self._load is None or self._compute is None:
            return False
        return self._compute < self._load

    def load_began(self, request_id: str, num_tokens: int, now: float) -> None:
        """Blocks of so many tokens are being loaded."""
        self._loads[request_id] = num_tokens, now

    def load_ended(self, request_id: str, now: float) -> None:
        """They have been, or not."""
        num_tokens, since = self._loads.pop(request_id)
        self._load = _learn(self._load, (now - since) / num_tokens)

    def step_ended(self, num_tokens: int, num_requests: int, since: float, now: float) -> None:
        """A step has been computed."""
        if num_tokens >= _MANY * num_requests:
            self._compute = _learn(self._compute, (now - since) / num_tokens)


def _learn(known: float | None, new: float) -> float:
    return new if known is None else known + _WEIGHT * (new - known)
