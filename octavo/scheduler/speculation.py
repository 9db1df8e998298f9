"""Number of drafts of each step, and counters of drafts.

A rejected draft costs a row of the step and the time to draft it. That cost depends on the machine,
the model, the number of requests in the step and their text. So the running engine measures the
time of steps and the acceptance rate of the draft at each place. It uses the number of drafts with
the most expected tokens per second, or no drafts if they do not pay. Answers do not depend on it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from octavo.messages import ModelRunnerOutput
from octavo.scheduler.step import ScheduledStep
from octavo.structured_output.base import MAX_FORCED

logger = logging.getLogger(__name__)

# Seconds between log lines about drafting.
_LOG_INTERVAL = 60.0
# Weight of the newest step's time, and of each draft, in the running means.
_WEIGHT = 1 / 16
# Assumed acceptance rate of a draft after an accepted one, before any measurement.
_FIRST_GUESS = 0.7
# Least ratio of the expected speeds with and without drafts for drafting: the means are not exact.
_GAIN = 1.05
# Steps between two choices of the best number, and steps of a probe of another number.
_STEPS_BETWEEN = 16
_STEPS_OF_PROBE = 3
# Steps until the next probe: after a change, and the most. The pause doubles without a change.
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 512


class Drafting:
    """Places for drafts in the steps of a scheduler, and counters of drafts.

    Args:
        num_speculative_tokens: most drafts of a request in a step, not counting those of grammars.
        max_num_drafts: most drafts of all requests in a step.
    """

    def __init__(self, num_speculative_tokens: int, max_num_drafts: int) -> None:
        self.max_num_drafts = max_num_drafts
        self.lengths = DraftLengths(num_speculative_tokens)
        self.num_drafts = self.num_draft_tokens = 0
        self.num_accepted_tokens_per_pos = [0] * num_speculative_tokens
        self._logged_pause, self._next_log = False, -math.inf

    def choose(self, num_running: int, now: float) -> int:
        """Return the most drafts of a request in the next step.

        Log pauses and resumptions of drafting, but at most once a minute.
        """
        lengths = self.lengths
        if not lengths.most:
            return 0
        num_drafts = lengths.choose(num_running)
        if lengths.paused != self._logged_pause and now >= self._next_log:
            self._logged_pause, self._next_log = lengths.paused, now + _LOG_INTERVAL
            change = "paused: does not pay" if lengths.paused else "resumed: pays"
            logger.info("drafting %s at this load (%d running)", change, num_running)
        return num_drafts

    def forced_per_request(self, num_running: int) -> int:
        """Return the most drafts of a request's grammar in a step.

        They save steps, but with many requests they would make the steps longer. The result is 0
        if not all requests could have the most drafts of a grammar.
        """
        return MAX_FORCED if num_running * MAX_FORCED <= self.max_num_drafts else 0

    def learn(self, step: ScheduledStep, result: ModelRunnerOutput, seconds: float) -> None:
        """Measure the cost and gain of drafts in a step, if it has no other work."""
        if not self.lengths.most:
            return
        work = step.output.scheduled_reqs
        if not (result.errors or step.forced) and all(
            r.num_tokens == 1 + r.num_drafts for r in work
        ):
            self.lengths.record(
                seconds,
                [result.num_draft_tokens.get(req_id, 0) for req_id in result.req_ids],
                [max(0, len(tokens) - 1) for tokens in result.sampled_token_ids],
            )

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of a request in a step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        accepted = self.num_accepted_tokens_per_pos
        accepted += [0] * (num_accepted - len(accepted))
        for place in range(num_accepted):
            accepted[place] += 1


class DraftLengths:
    """Chooser of the number of drafts of a request in a step.

    Args:
        most: the largest number.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._accepted = [_FIRST_GUESS ** (i + 1) for i in range(most)]
        """Acceptance rate of the drafts at each place. (A draft after a wrong one is wrong.)"""
        self._loads: dict[int, _Load] = {}
        self.paused = False
        """True if drafts do not pay at the current load; only short probes use drafts."""

    def choose(self, num_reqs: int) -> int:
        """Return the most drafts of each request if `num_reqs` requests run."""
        load = self._load(num_reqs)
        load.steps_left -= 1
        if load.steps_left < 0:
            self._look(load)
        if num_reqs:
            self.paused = load.paused
        return load.current

    def record(self, seconds: float, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Record the measurements of a step that contains only decoding requests.

        Args:
            seconds: the duration of the step.
            drafted: each request's number of drafts; a method may find none.
            accepted: each request's number of accepted drafts.
        """
        for place in range(self.most):
            if count := sum(n > place for n in drafted):
                share = sum(n > place for n in accepted) / count
                weight = 1 - (1 - _WEIGHT) ** count
                self._accepted[place] += weight * (share - self._accepted[place])
            elif place and any(drafted):  # not measured: extrapolate from the earlier places
                earlier = self._accepted[place - 2] if place > 1 else 1.0
                self._accepted[place] = self._accepted[place - 1] ** 2 / max(earlier, 1e-9)
        num_drafts = round(sum(drafted) / len(drafted))
        self._load(len(drafted)).record(num_drafts, max(seconds, 1e-9))

    def _load(self, num_reqs: int) -> _Load:
        """Return the measurements of this load; loads within a power of two share them."""
        return self._loads.setdefault(num_reqs.bit_length(), _Load())

    def _look(self, load: _Load) -> None:
        """Choose the best number again, or sometimes probe a neighbouring number to measure it.

        A load starts without drafts, and the number rises while that is better: with many requests
        in a step, many drafts would make it several times longer.
        """
        most_tried = max(load.tried, default=-1)
        best = max(range(max(most_tried, 0) + 1), key=lambda k: self._promise(load, k))
        if best and self._promise(load, best) < _GAIN * self._promise(load, 0):
            best = 0
        climbs = best == most_tried and best < self.most
        load.until_probe -= 1
        if climbs or most_tried < 0:
            load.current = most_tried + 1 if most_tried < 2 else min(2 * most_tried, self.most)
        elif load.until_probe < 0:
            load.pause = min(load.pause * 2, _LONGEST_PAUSE) if best == load.best else _FIRST_PAUSE
            load.until_probe = load.pause // _STEPS_BETWEEN
            # Alternate between one more and one fewer: old measurements may be out of date.
            load.downwards = best > 0 and not (load.downwards and best < self.most)
            load.current = best - 1 if load.downwards else best + 1
        else:
            load.current = best
        load.best = best
        load.paused = best == 0 and most_tried > 0
        load.tried.add(load.current)
        load.steps_left = (_STEPS_BETWEEN if load.current == best else _STEPS_OF_PROBE) - 1

    def _promise(self, load: _Load, num_drafts: int) -> float:
        """Return the expected tokens per second of a request."""
        return (1 + sum(self._accepted[:num_drafts])) / load.estimate(num_drafts)


class _Load:
    """Measurements of the steps with a similar number of requests."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        """Seconds of a step, by the number of drafts of each request."""
        self.tried: set[int] = set()
        self._counts: dict[int, int] = {}
        self.current = self.best = 0
        self.steps_left = 0
        self.downwards = self.paused = False
        self.pause = _FIRST_PAUSE
        self.until_probe = _FIRST_PAUSE // _STEPS_BETWEEN

    def record(self, num_drafts: int, seconds: float) -> None:
        """Record a step's time: the least of the first few, later a running mean."""
        count = self._counts[num_drafts] = self._counts.get(num_drafts, 0) + 1
        mean = self.seconds.setdefault(num_drafts, seconds)
        if count <= _STEPS_OF_PROBE:  # the first step is slow: a draft model computes the prompts
            self.seconds[num_drafts] = min(seconds, mean)
        else:  # limit the weight of a delayed step to twice the mean
            self.seconds[num_drafts] += _WEIGHT * (min(seconds, 2 * mean) - mean)

    def estimate(self, num_drafts: int) -> float:
        """Return the seconds of a step: measured, interpolated, or those of the nearest number."""
        known = self.seconds
        if num_drafts in known:
            return known[num_drafts]
        below = max((k for k in known if k < num_drafts), default=None)
        above = min((k for k in known if k > num_drafts), default=None)
        if below is not None and above is not None:
            share = (num_drafts - below) / (above - below)
            return known[below] + share * (known[above] - known[below])
        if below is not None:
            return known[below]
        return known[above] if above is not None else 1.0
