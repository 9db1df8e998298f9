"""Step times from a recording."""

import math

import msgspec
import pytest

from octavo.errors import BenchError, OctavoError
from octavo.messages import CoreSamplingParams, EngineCoreOutput
from octavo.observability.recording import (
    FORMAT,
    Arrival,
    Died,
    Head,
    Lost,
    Outputs,
    Recorder,
    Step,
    StepEnd,
    StepRequest,
    read_records,
)
from octavo.sampling_params import SamplingParams
from octavo.simulation import recorded_steps
from octavo.simulation.recorded_steps import read_step_times
from octavo.simulation.step_times import StepBatch
from tests.params import core_request

HEAD = Head(FORMAT, "id", 1.0, {"processor": "a fast one"}, {"model": {"model": "m"}}, "", "full")


def arrival(name, size, n=1):
    request = core_request(name, [1] * size, CoreSamplingParams(), n=n)
    return Arrival(request, SamplingParams(n=n))


def steps(first, last, seconds):
    """Return steps of two requests of one token each, with their times two steps later."""
    return [
        Step(
            number, float(number), [], [], [StepRequest(r, 1, 0, None) for r in "ab"], [], [],
            [StepEnd(number - 2, seconds(number - 2), 0.001)] if number > first + 1 else [],
        )
        for number in range(first, last)
    ]  # fmt: skip


def begin(**fields):
    """Return a step: both prompts at once, one of which was found in part."""
    requests = [StepRequest("a", 10, 0, 0), StepRequest("b", 4, 0, 16)]
    return Step(2, 2.0, ["a", "b"], [], requests, [], [], **fields)


def record(path, *records, head=HEAD, plan=(50, 256)):
    recorder = Recorder(path, head)
    if plan:
        recorder.put_plan(*plan)
    for one in records:
        recorder.put(one)
    recorder.close()
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.rec"


@pytest.mark.parametrize("prompts", ["full", "hash"])
def test_the_times_of_its_steps(path, prompts):
    head = msgspec.structs.replace(HEAD, prompts=prompts)
    arrivals = [arrival("a", 10), arrival("b", 20)]
    record(path, *arrivals, begin(), *steps(3, 60, lambda i: 0.01), head=head)
    times = read_step_times(path)
    assert (times.model, times.cpu) == ("m", "a fast one")
    assert (times.num_blocks, times.max_model_len) == (50, 256)
    assert times.make_predictor()(StepBatch(2, 2, 0, 60)) == pytest.approx(0.01, rel=1e-3)
    assert times.error < 1e-3
    assert times.host_seconds == pytest.approx(0.001)
    assert [ratio for part in times.spread for ratio in part.ratios] == pytest.approx(
        [1.0] * sum(len(part.ratios) for part in times.spread)
    )


def batches(path):
    """Return the batches of the found steps."""
    front = recorded_steps._FrontEnd(read_records(path))
    return [step.batch for step in recorded_steps._measured_steps([path], front)]


def end_of(*numbers):
    return [StepEnd(number, 0.01, None) for number in numbers]


def last(number, *numbers):
    return Step(number, float(number), [], [], [], [], [], end_of(*numbers))


def test_what_a_step_computed(path):
    record(path, arrival("a", 10), arrival("b", 20), begin(), *steps(3, 4, None), last(4, 2, 3))
    assert batches(path) == [
        StepBatch(14, 2, 2, 0, 55 + 4 * 16 + 10),
        StepBatch(2, 2, 0, 11 + 21),
    ]


def test_one_that_goes_on_after_a_preemption_or_on_another_engine(path):
    """It has the earlier tokens."""
    output = EngineCoreOutput("1_a", [5, 6, 7])
    again = Step(1, 9.0, ["1_a"], [], [StepRequest("1_a", 13, 0, 0)], [], [])
    freed = Step(2, 10.0, [], [], [StepRequest("1_a", 13, 0, 0)], ["1_a"], [], end_of(1))
    more = Step(3, 11.0, [], [], [StepRequest("1_a", 1, 0, None)], [], [], end_of(2))
    record(
        path,
        arrival("a", 10, n=2),
        Outputs(8.0, [output]),
        Died(8.5, "killed"),
        again,
        freed,
        more,
        last(4, 3),
    )
    # Without the first step of an engine, which is slower.
    assert batches(path) == [StepBatch(13, 1, 1, 0, 13 * 7), StepBatch(1, 1, 0, 14)]


@pytest.mark.parametrize(
    "between",
    [
        [],  # nothing is known of "b"
        [arrival("b", 20), Lost(3)],
    ],
)
def test_steps_of_which_something_is_missing_are_left_out(path, between):
    alone = Step(4, 4.0, [], [], [StepRequest("a", 1, 0, None)], ["b"], [])
    drafts = Step(5, 5.0, [], [], [StepRequest("a", 3, 2, None)], [], [], end_of(3, 4))
    records = [arrival("a", 10), begin(), *between, *steps(3, 4, None), alone, drafts, last(6, 5)]
    record(path, *records)
    known = [] if between else [StepBatch(1, 1, 0, 12)]
    assert batches(path) == known


@pytest.mark.parametrize("end", [(-1.0, None), (1e300, None), (math.nan, 0.1), (0.1, math.inf)])
def test_times_that_cannot_be(path, end):
    damaged = Step(4, 4.0, [], [], [], [], [], [StepEnd(2, 0.01, 0.001), StepEnd(3, *end)])
    record(path, arrival("a", 10), arrival("b", 20), begin(), *steps(3, 4, None), damaged)
    assert len(batches(path)) == 1


def test_what_has_no_times(path):
    with pytest.raises(BenchError, match="before the model was loaded"):
        read_step_times(record(path, arrival("a", 10), plan=None))
    with pytest.raises(BenchError, match="0 steps were measured, and 20 are needed"):
        read_step_times(record(path, arrival("a", 10)))
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(OctavoError, match="does not begin as a recording"):
        read_step_times(path)
