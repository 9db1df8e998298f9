"""Step times: the parts of a batch, and the fit."""

import json

import numpy as np
import pytest

from octavo.errors import BenchError
from octavo.messages import NewRequestData, ScheduledRequest, SchedulerOutput
from octavo.simulation.step_times import (
    BatchReader,
    Spread,
    StepBatch,
    StepDraws,
    StepPredictor,
    StepTimes,
    fit,
    fit_line,
    make_spread,
)
from tests.params import core_params


def step(*scheduled, finished=()):
    return SchedulerOutput(list(scheduled), sum(s.num_tokens for s in scheduled), list(finished))


def begin(name, num_tokens, total, computed=0):
    data = NewRequestData([1] * total, total, core_params(), computed)
    return ScheduledRequest(name, num_tokens, [[]], new=data)


def test_a_reader_follows_requests_from_step_to_step():
    reader = BatchReader()
    batch, sampled = reader.read(step(begin("a", 4, 10), begin("b", 1, 1)))
    assert batch == StepBatch(5, 1, num_prompts=1, num_reads=1, num_pairs=1 + 2 + 3 + 4)
    assert sampled == [False, True]
    batch, sampled = reader.read(step(ScheduledRequest("a", 6), ScheduledRequest("b", 1)))
    assert batch == StepBatch(7, 2, num_prompts=1, num_reads=2, num_pairs=5 + 6 + 7 + 8 + 9 + 10)
    assert sampled == [True, True]
    # One that is cached up to its last token; the others have ended.
    batch, _ = reader.read(step(begin("c", 1, 9, computed=8), finished=["a", "b"]))
    assert batch == StepBatch(1, 1, num_reads=9)


def batches(count=400):
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        decodes, prompt = int(rng.integers(0, 30)), int(rng.choice([0, 0, 7, 60, 300]))
        if decodes + prompt:
            found.append(
                StepBatch(
                    decodes + prompt,
                    decodes + (prompt > 0),
                    int(prompt > 0),
                    decodes * int(rng.integers(1, 500)),
                    prompt * int(rng.integers(1, 300)),
                )
            )
    return found


def truth(batch):
    rows = max(8, batch.num_tokens)  # few rows cost no more than 8
    return 2e-3 + 1e-5 * rows + 3e-5 * batch.num_samples + 1e-7 * batch.num_reads


def predictor(seconds):
    made = StepTimes(model="m", cpu="c", num_blocks=9, max_model_len=64, seconds=seconds, error=0.0)
    return made.make_predictor()


def test_the_fit_finds_what_steps_take():
    seconds, error = fit(batches(), [truth(b) for b in batches()])
    assert error < 0.01
    assert min(seconds.values()) > 0
    predict = predictor(seconds)
    for batch in batches(50):
        assert predict(batch) == pytest.approx(truth(batch), rel=0.03)


def test_steps_that_were_held_up_do_not_count():
    rng = np.random.default_rng(1)
    noisy = [truth(b) * rng.uniform(0.9, 1.1) for b in batches()]
    noisy[::25] = [100 * t for t in noisy[::25]]
    predict = predictor(fit(batches(), noisy)[0])
    ratios = [predict(b) / truth(b) for b in batches()]
    assert float(np.mean(ratios)) == pytest.approx(1, abs=0.04)


def test_noise_on_both_sides_is_no_bias():
    """The sum of many steps is the duration of a load."""
    rng = np.random.default_rng(2)
    noisy = [truth(b) * rng.choice([0.6, 1.4]) for b in batches()]
    predict = predictor(fit(batches(), noisy)[0])
    assert sum(map(predict, batches())) == pytest.approx(sum(map(truth, batches())), rel=0.05)


def test_the_prediction_goes_on_behind_the_last_knot():
    predict = StepPredictor([1.0] + [0.0] * 14 + [0.5] + [0.0] * 4)
    assert predict(StepBatch(8192)) == pytest.approx(1.0)
    assert predict(StepBatch(8192 + 20_000)) == pytest.approx(1.0 + 0.5 * 20_000)


def test_the_spread_has_the_mean_and_the_tail_of_what_was_measured():
    rng = np.random.default_rng(3)
    expected = np.concatenate([rng.uniform(1e-3, 2e-3, 1000), rng.uniform(0.1, 0.2, 1000)])
    seconds = expected * np.concatenate([rng.uniform(1.0, 3.0, 1000), rng.uniform(0.9, 1.1, 1000)])
    seconds[::50] *= 10  # delays of steps now and then
    spread = make_spread(expected.tolist(), seconds.tolist())
    assert len(spread) == 8
    assert [part.least for part in spread] == sorted(part.least for part in spread)
    draw = StepDraws(spread)
    drawn = np.array([draw(e) for e in np.repeat(expected, 5)])
    for begin in (0, 1000):  # short steps vary more
        real, ours = seconds[begin : begin + 1000], drawn[5 * begin : 5 * begin + 5000]
        assert ours.mean() == pytest.approx(real.mean(), rel=0.05)
        for share, error in ((50, 0.1), (90, 0.1), (99, 0.3)):
            expected_share = np.percentile(real, share)
            assert np.percentile(ours, share) == pytest.approx(expected_share, rel=error)


def test_a_few_steps_have_a_spread_of_their_own():
    (part,) = make_spread([1.0, 1.0, 1.0], [1.0, 3.0, 2.0])
    assert part.ratios == pytest.approx([1.0, 2.0, 3.0])
    assert StepDraws([])(0.5) == 0.5
    draw = StepDraws([part])
    assert {round(draw(0.01), 6) for _ in range(50)} == {0.01, 0.02, 0.03}


def test_steps_that_should_take_the_same_have_one_spread():
    """Steps of a single request are an example, in any number."""
    seconds = [1.0] * 250 + [3.0] * 250
    (part,) = make_spread([2.0] * 500, seconds)
    assert np.mean(part.ratios) == pytest.approx(1.0)
    parts = make_spread([2.0] * 500 + [5.0] * 100, seconds + [10.0] * 100)
    assert [part.least for part in parts] == [2.0, 5.0]
    assert [np.mean(part.ratios) for part in parts] == pytest.approx([1.0, 2.0])


def test_what_something_costs_at_least_and_for_each():
    points = [(count, 1e-3 + 1e-5 * count) for count in range(40)]
    points[::9] = [(count, 100 * seconds) for count, seconds in points[::9]]  # delayed
    assert fit_line(points) == pytest.approx((1e-3, 1e-5))
    base, each = fit_line([(3, 2.0)] * 5)  # the data cannot decide
    assert base + 3 * each == pytest.approx(2.0)
    assert fit_line([(count, 0.0) for count in range(9)]) == (0.0, 0.0)
    assert fit_line([(count, 5.0 - count) for count in range(5)])[1] == 0.0
    assert fit_line([]) == (0.0, 0.0)


def test_too_few_steps():
    with pytest.raises(BenchError, match="3 steps were measured"):
        fit(batches()[:3], [1.0] * 3)


def test_a_file_comes_back(tmp_path):
    path = str(tmp_path / "times.json")
    times = StepTimes(
        model="m",
        cpu="c",
        num_blocks=9,
        max_model_len=64,
        seconds={"step": 0.01},
        spread=[Spread(least=0.0, ratios=[0.5, 1.5])],
        error=0.1,
    )
    times.save(path)
    assert StepTimes.load(path) == times


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seconds": {"steps": 1.0}}, "seconds may have step, "),
        ({"num_blocks": "many"}, "num_blocks"),
        ({"extra": 1}, "extra"),
        ({"seconds": {"step": -1.0}}, "finite numbers, 0 or above"),
        ({"host_request_seconds": -1.0}, "finite numbers, 0 or above"),
        ({"spread": [{"least": 0.0, "ratios": []}]}, "one at least"),
        ({"spread": [{"least": 0.0, "ratios": [-2.0]}]}, "0 or above"),
    ],
)
def test_other_files_are_refused(tmp_path, change, said):
    path = tmp_path / "times.json"
    plain = {"model": "m", "cpu": "c", "num_blocks": 9, "max_model_len": 64}
    path.write_text(json.dumps(plain | {"seconds": {}, "error": 0.1} | change))
    with pytest.raises(BenchError, match=said):
        StepTimes.load(str(path))
    with pytest.raises(BenchError, match="cannot be read"):
        StepTimes.load(str(tmp_path / "nothing.json"))
