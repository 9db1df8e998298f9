"""Costs of a token's keys and values: the time to load them, and to compute them."""

from __future__ import annotations

_WEIGHT = 0.2
"""Weight of the newest measurement in the running mean."""
MANY = 16
"""Tokens per request from which on a step measures the computation of prompts."""


class PrefillCosts:
    """Measured times of a token in loads and in steps."""

    def __init__(self) -> None:
        self._loads: dict[str, tuple[int, float]] = {}
        self._load: float | None = None
        self._compute: float | None = None

    @property
    def computing_is_cheaper(self) -> bool:
        """True if computing is known to be cheaper. False before both costs are measured, so that
        the scheduler tries loading."""
        if self._load is None or self._compute is None:
            return False
        return self._compute < self._load

    def load_began(self, request_id: str, num_tokens: int, now: float) -> None:
        """Record the start of a load of `num_tokens` tokens."""
        self._loads[request_id] = num_tokens, now

    def load_ended(self, request_id: str, now: float) -> None:
        """Record the end of a load, successful or not."""
        num_tokens, since = self._loads.pop(request_id)
        self._load = learn(self._load, (now - since) / num_tokens)

    def step_ended(self, num_tokens: int, num_requests: int, since: float, now: float) -> None:
        """Record the computation of a step."""
        if num_tokens >= MANY * num_requests:
            self._compute = learn(self._compute, (now - since) / num_tokens)


def learn(known: float | None, new: float) -> float:
    """Return the running mean of measurements, with the newest one."""
    return new if known is None else known + _WEIGHT * (new - known)
