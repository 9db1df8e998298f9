"""Time of a step as a function of its batch, fitted to measured steps."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.bench import results
from octavo.errors import BenchError
from octavo.messages import SchedulerOutput

# A matrix product's time is not linear in its rows: with few rows it is that of reading the
# weights, and kernels process several rows at a time.
_KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_NAMES = ("step", *(f"tokens_from_{k}" for k in _KNOTS), "samples", "prompts", "reads", "pairs")
_UNITS = np.asarray([1.0] * (len(_KNOTS) + 3) + [1e-3, 1e-6])
# A measured step with an error above this multiple of the usual one was delayed by something else.
_OUTLIER = 8.0
_ROUNDS = 4
_LEAST_STEPS = 20
# Limits of a spread: parts, steps in each part at least, and stored ratios of a part.
_MOST_PARTS, _LEAST_IN_PART, _MOST_RATIOS = 8, 50, 100


@dataclass(slots=True)
class StepBatch:
    """Inputs of a step's time."""

    num_tokens: int = 0
    num_samples: int = 0
    """Number of requests that receive a token."""
    num_prompts: int = 0
    """Number of requests with more than one computed token."""
    num_reads: int = 0
    """Number of tokens in the KV cache that requests with one token read."""
    num_pairs: int = 0
    """Sum over the tokens of prompts of the number of tokens that each attends to."""


@dataclass(slots=True)
class MeasuredStep:
    """Step of a real engine.

    Attributes:
        batch: the computed batch.
        num_requests: number of its requests.
        seconds: its duration, from the time at which it could begin.
        host_seconds: time between the previous result and waiting for its own; None: the engine was
            idle.
    """

    batch: StepBatch
    num_requests: int
    seconds: float
    host_seconds: float | None


class BatchReader:
    """Tracker of requests that determines the batch of each step. Without speculation."""

    def __init__(self) -> None:
        self._rows: dict[str, list[int]] = {}
        """Numbers of computed and known tokens of each request."""

    def __contains__(self, req_id: str) -> bool:
        """Return True if a request has a row."""
        return req_id in self._rows

    def read(self, work: SchedulerOutput) -> tuple[StepBatch, list[bool]]:
        """Return a step's batch, and which of its requests receive a token."""
        batch = StepBatch()
        self.forget(work.finished_req_ids)
        for scheduled in work.scheduled_reqs:
            if (new := scheduled.new) is not None:
                self.start(scheduled.req_id, new.num_computed_tokens, len(new.token_ids))
        sampled = [self.add(batch, s.req_id, s.num_tokens) for s in work.scheduled_reqs]
        return batch, sampled

    def forget(self, req_ids: Iterable[str]) -> None:
        """Remove requests that finished or were preempted."""
        for req_id in req_ids:
            self._rows.pop(req_id, None)

    def start(self, req_id: str, num_computed: int, num_known: int) -> None:
        """Add a request with its numbers of computed and known tokens."""
        self._rows[req_id] = [num_computed, num_known]

    def add(self, batch: StepBatch, req_id: str, count: int) -> bool:
        """Add a request's next tokens to a batch; return True if it then receives a token."""
        row = self._rows[req_id]
        batch.num_tokens += count
        if count == 1:
            batch.num_reads += row[0] + 1
        else:
            batch.num_prompts += 1
            batch.num_pairs += count * row[0] + count * (count + 1) // 2
        row[0] += count
        gets_token = row[0] == row[1]
        row[1] += gets_token
        batch.num_samples += gets_token
        return gets_token


class Spread(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Distribution of the deviations of steps with similar expected times."""

    least: float
    """Minimum expected seconds of the steps to which it applies."""
    ratios: list[float]
    """Ratios of actual to expected time, in ascending order and with equal weights."""

    def __post_init__(self) -> None:
        if not self.ratios or not all(0 <= ratio < math.inf for ratio in self.ratios):
            raise ValueError("ratios must be finite numbers, 0 or above, one at least")


class StepTimes(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fitted model of step times, with the properties of its engine.

    The time is a sum of shares that are each at least 0: of the step itself, of its tokens
    (piecewise linear), of requests that sample, of prompts, and of attention.
    """

    model: str
    cpu: str
    num_blocks: int
    """Number of blocks of the KV cache."""
    max_model_len: int
    seconds: dict[str, float]
    """Seconds for one unit of each share, by name."""
    spread: list[Spread] = []
    """Deviations of steps, those of short steps first; empty: none."""
    host_seconds: float = 0.0
    """Time of the engine's thread for a step besides waiting for it; most of it overlaps with
    another step."""
    host_request_seconds: float = 0.0
    """Additional time for each request in the step."""
    arrival_seconds: float = 0.0
    """Time of the engine's thread for an arriving request."""
    arrival_token_seconds: float = 0.0
    """Additional time for each token of its prompt."""
    error: float
    """Median relative error of a measured step."""

    def __post_init__(self) -> None:
        if self.seconds.keys() - set(_NAMES):
            raise ValueError(f"seconds may have {', '.join(_NAMES)} only")
        costs = [*self.seconds.values(), self.host_seconds, self.host_request_seconds]
        costs += [self.arrival_seconds, self.arrival_token_seconds]
        if not all(0 <= cost < math.inf for cost in costs):
            raise ValueError("all seconds must be finite numbers, 0 or above")

    @staticmethod
    def of_steps(
        steps: Sequence[MeasuredStep], *, model: str, cpu: str, num_blocks: int, max_model_len: int
    ) -> StepTimes:
        """Fit the times of steps.

        Args:
            steps: measured steps.
            model: the model's name.
            cpu: the processor's name.
            num_blocks: number of blocks of the KV cache.
            max_model_len: maximum tokens of a request.

        Raises:
            BenchError: there are too few steps.
        """
        batches, times = [s.batch for s in steps], [s.seconds for s in steps]
        seconds, error = fit(batches, times)
        found = StepTimes(
            model=model,
            cpu=cpu,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            seconds=seconds,
            error=error,
        )
        predict = found.make_predictor()
        found.spread = make_spread([predict(batch) for batch in batches], times)
        known = [(s.num_requests, s.host_seconds) for s in steps if s.host_seconds is not None]
        found.host_seconds, found.host_request_seconds = fit_line(known)
        return found

    def make_predictor(self) -> StepPredictor:
        """Return the model as a function."""
        return StepPredictor([self.seconds.get(name, 0.0) for name in _NAMES])

    @staticmethod
    def load(path: str) -> StepTimes:
        """Read a file of `save`.

        Raises:
            BenchError: the file cannot be read, or is something else.
        """
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=StepTimes)
        except OSError as error:
            raise BenchError(f"--step-times {path} cannot be read: {error.strerror}.") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BenchError(
                f"--step-times {path} is not what --save-step-times writes: {error}"
            ) from None

    def save(self, path: str) -> None:
        """Write the model as JSON.

        Raises:
            BenchError: the file cannot be written.
        """
        results.save_json(path, msgspec.to_builtins(self))


class StepPredictor:
    """Function from a batch to the seconds of its step.

    Args:
        seconds: seconds in the order of the shares.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        rates = np.asarray(seconds, np.float64)
        self._base = float(rates[0])
        slopes = rates[1 : len(_KNOTS) + 1]
        knots = np.asarray([*_KNOTS, 2 * _KNOTS[-1]])
        self._knots = knots
        self._at_knots = np.concatenate([[0.0], np.cumsum(slopes * np.diff(knots))])
        self._last = float(slopes[-1])
        self._of_tokens: dict[int, float] = {}
        self._samples, self._prompts, self._reads, self._pairs = map(float, rates[-4:])

    def __call__(self, batch: StepBatch) -> float:
        """Return the time of a step with a non-empty batch."""
        count = batch.num_tokens
        tokens = self._of_tokens.get(count)
        if tokens is None:
            tokens = float(np.interp(count, self._knots, self._at_knots))
            tokens += max(0, count - int(self._knots[-1])) * self._last
            self._of_tokens[count] = tokens
        return (
            self._base
            + tokens
            + self._samples * batch.num_samples
            + self._prompts * batch.num_prompts
            + self._reads * batch.num_reads
            + self._pairs * batch.num_pairs
        )


class StepDraws:
    """Random deviations of successive steps from their expected times.

    Each new object repeats the same draws.

    Args:
        spread: see `StepTimes`.
    """

    def __init__(self, spread: Sequence[Spread]) -> None:
        self._bounds = [part.least for part in spread[1:]]
        self._ratios = [part.ratios for part in spread]
        self._rng = random.Random(0)

    def __call__(self, seconds: float) -> float:
        """Return the time of a step with the given expected time."""
        if not self._ratios:
            return seconds
        return seconds * self._rng.choice(self._ratios[bisect.bisect(self._bounds, seconds)])


def make_spread(expected: Sequence[float], seconds: Sequence[float]) -> list[Spread]:
    """Determine the deviations of measured steps by their expected time.

    No step is omitted: occasional delays occur in every run, and the sum of all steps is the
    duration of a load.

    Args:
        expected: expected seconds of each step.
        seconds: measured seconds of each step.
    """
    wanted, taken = np.asarray(expected, np.float64), np.asarray(seconds, np.float64)
    count = max(1, min(_MOST_PARTS, len(wanted) // _LEAST_IN_PART))
    # Steps with the same expected time are in the same part, regardless of their number.
    bounds = np.unique(np.sort(wanted)[[len(wanted) * i // count for i in range(count)]])
    part_of = np.searchsorted(bounds, wanted, side="right") - 1
    spread = []
    for part, least in enumerate(bounds):
        inside = part_of == part
        ratios = np.sort(taken[inside] / np.maximum(wanted[inside], 1e-9))
        shares = np.array_split(ratios, min(_MOST_RATIOS, len(ratios)))  # each by its mean
        means = [float(share.mean()) for share in shares]
        # Shares differ in size by one at most; together they have the mean of all.
        scale = float(ratios.mean() / np.mean(means)) if np.mean(means) else 1.0
        spread.append(Spread(least=float(least), ratios=[mean * scale for mean in means]))
    return spread


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit a fixed cost and a cost per item; neither is below 0.

    Args:
        points: pairs of a number of items and their seconds. Without points both costs are 0.
    """
    if not points:
        return 0.0, 0.0
    counts, seconds = np.asarray(points, np.float64).T
    typical = max(float(np.median(seconds)), 1e-9)
    unit = max(1.0, float(counts.max()))
    kept = seconds <= _OUTLIER * typical
    matrix = np.stack([np.ones_like(counts), counts / unit], axis=1)
    base, each = _solve(matrix[kept], seconds[kept] / typical) * typical
    return float(base), float(each) / unit


def fit(batches: Sequence[StepBatch], seconds: Sequence[float]) -> tuple[dict[str, float], float]:
    """Fit the shares to measured steps: least squares of relative errors, none below 0.

    Args:
        batches: batches of the steps.
        seconds: durations of the steps.

    Returns:
        `StepTimes.seconds` and `StepTimes.error`.

    Raises:
        BenchError: there are too few steps.
    """
    if len(batches) < _LEAST_STEPS:
        raise BenchError(
            f"{len(batches)} steps were measured, and {_LEAST_STEPS} are needed: record more "
            "requests, or raise max_model_len or max_num_seqs."
        )
    times = scale = np.asarray(seconds, np.float64)
    matrix = _features(batches)
    kept = np.ones(len(times), bool)
    # Relative to the expected time, not the measured one: otherwise delayed steps would count less.
    for _ in range(_ROUNDS):
        rates = _solve(matrix[kept] / scale[kept, None], times[kept] / scale[kept])
        scale = np.maximum(matrix @ rates, 1e-9)
        errors = np.abs(times / scale - 1)
        kept = errors <= _OUTLIER * max(float(np.median(errors)), 1e-3)
    found = {n: float(r * u) for n, r, u in zip(_NAMES, rates, _UNITS, strict=True) if r > 0}
    return found, float(np.median(errors))


def _features(batches: Sequence[StepBatch]) -> NDArray[np.float64]:
    """Return [steps, shares], in units of similar magnitude."""
    values = np.asarray([astuple(batch) for batch in batches], np.float64)
    tokens, rest = values[:, :1], values[:, 1:]
    low = np.asarray(_KNOTS, np.float64)
    width = np.append(np.diff(low), np.inf)
    shares = np.hstack([np.ones_like(tokens), np.clip(tokens - low, 0, width), rest])
    return np.asarray(shares * _UNITS, np.float64)


def _solve(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Find a non-negative x with matrix @ x close to `target` (Lawson and Hanson 1974)."""
    count = matrix.shape[1]
    x, used = np.zeros(count), np.zeros(count, bool)
    for _ in range(3 * count):
        gradient = matrix.T @ (target - matrix @ x)
        gradient[used] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= 1e-9 * len(matrix):
            break
        used[best] = True
        while True:
            trial = np.zeros(count)
            trial[used] = np.linalg.lstsq(matrix[:, used], target, rcond=None)[0]
            negative = used & (trial <= 0)
            if not negative.any():
                break
            ratios = x[negative] / np.maximum(x[negative] - trial[negative], 1e-300)
            x = x + float(ratios.min()) * (trial - x)
            used &= x > 1e-12
        x = trial
    return x
