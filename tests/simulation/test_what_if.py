"""Estimates of what other settings would have saved."""

import pytest

from octavo.config import EngineConfig
from octavo.frontend.past import Past
from octavo.observability.steps import StepEvent, StepPart, StepRecord
from octavo.simulation import what_if as module
from octavo.simulation.what_if import what_if
from tests.fakes import pages


class Spec:
    """Part of a model's spec."""

    caches = pages(None)


def past(num_requests=3, num_tokens=15, seats=1, **config):
    """Return the steps of requests that arrive together and run one after the other, 1 s each."""
    steps, at = [], 0.0
    events = [StepEvent(f"r{i}", 0.0, "ADDED") for i in range(num_requests)]
    for i in range(num_requests):
        for j in range(num_tokens):
            part = StepPart(f"r{i}", 1) if j else StepPart(f"r{i}", 20, 0, 0, 20)
            times = [at, at, at, at + 1, at + 1]
            steps.append(StepRecord(len(steps) + 1, *times, [part], events=events))
            at, events = at + 1, []
    config = EngineConfig.from_kwargs(max_num_seqs=seats, async_scheduling=False, **config)
    return Past(config, Spec, 200, 256, 64, steps, f"r{num_requests - 1}")


def test_more_seats_save_the_wait_for_others():
    saved = what_if(past(), ["max_num_seqs", "max_num_batched_tokens"])
    # With two seats, the first two run together; the last one starts after them.
    assert saved["max_num_seqs"] == pytest.approx(15, abs=1)
    assert saved["max_num_batched_tokens"] == pytest.approx(0, abs=0.5)


def test_a_request_with_a_seat_gains_nothing():
    first = past()
    saved = what_if(Past(**{**vars(first), "core_id": "r0"}), ["max_num_seqs"])
    assert saved["max_num_seqs"] == pytest.approx(0, abs=0.5)


def test_more_blocks_save_the_wait_for_blocks():
    few = past(seats=8)
    few = Past(**{**vars(few), "num_blocks": 4})  # two requests of 35 tokens do not fit
    saved = what_if(few, ["kv_cache_memory_bytes"])
    assert saved["kv_cache_memory_bytes"] > 10


@pytest.mark.parametrize(
    "changes",
    [
        {"core_id": "unknown"},
        {"steps": []},
        {"steps": past().steps[:10]},  # too few to know the time of a step
        {"num_blocks": 200, "steps": past(num_tokens=40, num_requests=1).steps},  # another request
    ],
)
def test_nothing_is_estimated_from_too_little(changes):
    assert what_if(Past(**{**vars(past()), **changes}), ["max_num_seqs"]) == {}


def test_a_past_that_the_simulation_cannot_repeat_says_nothing():
    few = past(seats=8)  # with these seats nothing explains the waits
    assert what_if(few, ["max_num_seqs"]) == {}


def test_a_long_simulation_is_stopped(monkeypatch):
    monkeypatch.setattr(module, "MOST_SECONDS", -1.0)
    assert what_if(past(), ["max_num_seqs"]) == {}
