"""Pace of the work for items, such as pictures, beside texts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from octavo.messages import Modality, SchedulerOutput
from octavo.scheduler.costs import MANY, learn

_SHARE = 0.15
_MIN_TOKENS = 32
"""Tokens of a prompt with items that are computed at once at least."""
_MOST_OWED = 5.0
"""Seconds that items owe at most, so that a piece which took long does not stop them for long."""
_MOST_TIMES = 3.0
"""Most times of the expected time that is counted: a step may take long for another reason."""
_MOST_IN_ROW = 16
"""Most steps with items in a row: the time of a step without them must be known."""

WorkKind = Literal["prompt"] | Modality
"""Work for items: tokens of the prompts that hold them, or tokens of an encoder's runs."""


@dataclass(slots=True)
class ItemWork:
    """Work for items in a step beside texts."""

    tokens: dict[WorkKind, float] = field(default_factory=dict)
    """Work by its kind. A piece of a run is the run's tokens, divided by the number of pieces."""
    num_step_tokens: int = 0
    """Work that counts among the tokens of the step."""
    seconds: float = 0.0
    """Time that the step is expected to take for it, already paid."""


class ItemPace:
    """Chooser of the work for items in a step beside texts.

    Items take a share of a step's time: as much work as fits into it, or the smallest piece, and
    then none in the next steps until their shares have paid for it. Times are measured. Work is
    paid for when it is scheduled if the time of such work is known, and the difference from the
    measured time when its step ends. A measured time counts up to a multiple of the expected one,
    so that an outlier changes little. The first time of a kind of work may be an outlier, since
    the work uses some memory for the first time: it teaches nothing, and counts up to a multiple of
    a step's time. Of the first two times of a step without items the shorter one counts. After
    `_MOST_IN_ROW` steps with items there is one without them, so that the time of such a step is
    measured also if all work fits.

    Args:
        share: time of items beside texts, as a share of the time of the steps without them.
    """

    def __init__(self, share: float = _SHARE) -> None:
        self._share = share
        self._step: float | None = None
        """Seconds of a step without items."""
        self._costs: dict[WorkKind, float] = {}
        """Seconds of a token of each kind of work."""
        self._begun: set[WorkKind] = set()
        """Kinds of work that have had a first time."""
        self._has_checked_step = False
        """True if two steps without items were measured."""
        self._credit = 0.0
        """Seconds that items may still take; negative if they have taken more."""
        self._work = ItemWork()
        """Work of the step that is being scheduled."""
        self._num_in_row = 0
        """Number of the last steps in a row that have items."""
        self._is_measured = False
        """True if the step has no items, so that its time becomes known."""

    @property
    def may_begin(self) -> bool:
        """True if the step has time for another piece of work."""
        return self._credit >= 0 and not self._is_measured

    def begin_step(self, *, has_texts: bool) -> None:
        """Begin a step; without texts nothing is owed any more."""
        self._work = ItemWork()
        self._is_measured = has_texts and self._num_in_row == _MOST_IN_ROW
        if has_texts:
            self._credit = min(self._credit, 0.0) + self._share * (self._step or 0.0)
        else:
            self.forget_debts()

    def end_step(self) -> ItemWork:
        """Return the work of the step, for `step_ended`."""
        has_items = bool(self._work.tokens) and not self._is_measured
        self._num_in_row = self._num_in_row + 1 if has_items else 0
        return self._work

    def num_pieces(self, modality: Modality, piece: float) -> int:
        """Return the most pieces of a run, of `piece` tokens each, that the step has time for."""
        if not self.may_begin:
            return 0
        seconds = self._costs.get(modality, 0.0) * piece
        return max(1, int(self._credit / seconds)) if seconds else 1

    def num_tokens(self) -> int:
        """Return the most tokens of a prompt with items that fit into a step that has time."""
        seconds = self._costs.get("prompt", 0.0)
        return max(_MIN_TOKENS, int(self._credit / seconds)) if seconds else _MIN_TOKENS

    def spend(self, kind: WorkKind, tokens: float, *, in_step: bool = False) -> None:
        """Note that the step has work.

        Args:
            kind: its kind.
            tokens: its tokens.
            in_step: True if they count among the tokens of the step.
        """
        seconds = self._costs.get(kind, 0.0) * tokens
        self._credit -= seconds
        work = self._work
        work.seconds += seconds
        work.tokens[kind] = work.tokens.get(kind, 0.0) + tokens
        if in_step:
            work.num_step_tokens += int(tokens)

    def step_ended(self, output: SchedulerOutput, work: ItemWork, seconds: float) -> None:
        """Learn from the time of a step, if it has no other long chunks of prompts.

        Args:
            output: the step.
            work: its work for items.
            seconds: its time.
        """
        of_others = output.total_num_scheduled_tokens - work.num_step_tokens
        if of_others >= MANY * len(output.scheduled_reqs):
            return
        step = self._step
        if not work.tokens:
            if not output.scheduled_encoder_inputs:
                self._learn_step(seconds)
        elif step:
            if seconds < step:  # without items it takes even less
                self._step = learn(step, seconds)
            own = self._learn(work, max(seconds - step, 0.0), step)
            self._credit = max(self._credit + work.seconds - own, -_MOST_OWED)

    def _learn_step(self, seconds: float) -> None:
        """Learn from the time of a step without items."""
        step = self._step
        if step is None or self._has_checked_step:
            most = _MOST_TIMES * step if step else math.inf
            self._step = learn(step, min(seconds, most))
        else:
            self._step, self._has_checked_step = min(step, seconds), True

    def _learn(self, work: ItemWork, seconds: float, step: float) -> float:
        """Learn from the time of work; return the time that counts.

        The kinds of work have taken the parts of it that were expected, and new ones the rest.
        """
        costs, tokens = self._costs, work.tokens
        expected = {kind: costs[kind] * n for kind, n in tokens.items() if kind in costs}
        total, new = sum(expected.values()), tokens.keys() - expected.keys()
        if new and new <= self._begun:
            if seconds > total:
                for kind in new:
                    costs[kind] = (seconds - total) / len(new) / tokens[kind]
            return seconds
        seconds = min(seconds, _MOST_TIMES * max(total, step))
        if new:
            self._begun |= new
            return seconds
        for kind, of_kind in expected.items():
            part = of_kind / total if total else 1 / len(expected)
            costs[kind] = learn(costs[kind], part * seconds / tokens[kind])
        return seconds

    def forget_debts(self) -> None:
        """Forget what the work so far has taken."""
        self._credit = 0.0
