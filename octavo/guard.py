"""Guard of an answer: the end of its reasoning at a budget, and loops.

The state follows from the tokens of the answer alone. So the scheduler, which ends answers, and the
worker, which forces tokens, agree without messages, and an answer continues unchanged after a
preemption or on another engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.messages import GuardSpec, Repetition

MAX_PERIOD = 2048
"""Maximum number of tokens of a repeated text."""
MIN_REPEATS = 3
"""Number of times that a text occurs in a row, at least, in a loop."""
MIN_LOOP = 128
"""Minimum number of tokens of a loop, all repeats together."""

_PERIODS = np.arange(1, MAX_PERIOD + 1, dtype=np.int32)
# By period: number of tokens in a row that must equal the token one period earlier.
_NEEDED = np.maximum((MIN_REPEATS - 1) * _PERIODS, MIN_LOOP - _PERIODS)
# In an answer that continues after a preemption, loops are sought in this number of last tokens:
# those of the longest loop, and some that follow it while a forced token waits for the grammar.
_WINDOW = MIN_REPEATS * MAX_PERIOD + 64
_NO_TOKEN = -1


class Loops:
    """Finder of exact repetition at the end of a text. Time per token: O(`MAX_PERIOD`)."""

    def __init__(self) -> None:
        self._runs: NDArray[np.int32] = np.zeros(MAX_PERIOD, np.int32)
        """For each period, the number of last tokens that equal the token one period earlier."""
        self._recent: NDArray[np.int32] = np.full(2 * MAX_PERIOD, _NO_TOKEN, np.int32)
        """The last tokens from `_at` on, the newest one first."""
        self._at = MAX_PERIOD

    def append(self, token: int) -> int:
        """Add a token; return the shortest period of a loop that it completes, or 0."""
        if not self._at:
            self._recent[MAX_PERIOD:] = self._recent[:MAX_PERIOD]
            self._at = MAX_PERIOD
        self._runs += 1
        self._runs *= self._recent[self._at : self._at + MAX_PERIOD] == token
        self._at -= 1
        self._recent[self._at] = token
        found = self._runs >= _NEEDED
        at = int(found.argmax())
        return at + 1 if found[at] else 0


class _Marker:
    """Tokens to look for.

    Args:
        tokens: the tokens; none: they are never found.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tuple(tokens)
        self.num_read = 0
        """Number of the marker's first tokens that are the last tokens read."""

    def append(self, token: int) -> bool:
        """Read a token; return True if it completes the marker."""
        if not self.num_read and (not self.tokens or token != self.tokens[0]):
            return False
        read = (*self.tokens[: self.num_read], token)
        lengths = range(len(read), 0, -1)
        self.num_read = next((n for n in lengths if read[-n:] == self.tokens[:n]), 0)
        if self.num_read < len(self.tokens):
            return False
        self.num_read = 0
        return True


class Guard:
    """State of an answer's reasoning and loops; see the module's docstring.

    Args:
        spec: limits of the answer.
        token_ids: tokens of the answer so far.
    """

    def __init__(self, spec: GuardSpec, token_ids: Sequence[int] = ()) -> None:
        self._spec = spec
        self._begin, self._end = _Marker(spec.begin), _Marker(spec.end)
        self._thinks = spec.thinks
        self._num_thoughts = 0
        """Number of tokens of reasoning so far."""
        self._finds_loops = spec.repetition != "off"
        self._loops: Loops | None = None
        self._closes = False
        """True if a loop ends the reasoning."""
        self.must_stop = False
        """True if a loop ends the answer with the last token."""
        self.found: Repetition | None = None
        """The first loop."""
        first = len(token_ids) - _WINDOW
        for i, token in enumerate(token_ids):
            self._read(token, i >= first)

    @property
    def forced(self) -> int | None:
        """Token that must come next, to end the reasoning; None: any token may."""
        budget = self._spec.budget
        spent = budget is not None and self._num_thoughts >= budget
        if self._thinks and (spent or self._closes):
            return self._end.tokens[self._end.num_read]
        return None

    def append(self, token: int) -> None:
        """Add a token of the answer."""
        self._read(token, True)

    def _read(self, token: int, may_loop: bool) -> None:
        if self._thinks:
            self._num_thoughts += 1
        marker = self._end if self._thinks else self._begin
        if marker.append(token):
            self._thinks = not self._thinks
            self._closes, self._loops = False, None
        elif self._finds_loops and may_loop and not self._closes:
            self._find_loop(token)

    def _find_loop(self, token: int) -> None:
        if self._loops is None:
            self._loops = Loops()
        period = self._loops.append(token)
        if not period:
            return
        action = self._spec.repetition
        if action == "close_thinking" and not (self._thinks and self._end.tokens):
            action = "stop"
        self._closes = action == "close_thinking"
        self.must_stop = action == "stop"
        if self.found is None:
            self.found = Repetition(period, action)
        self._finds_loops = action != "report"  # one is enough
