"""Pace of the work for items beside texts."""

import pytest

from octavo.messages import ScheduledRequest, SchedulerOutput
from octavo.scheduler import pace as pace_module
from octavo.scheduler.pace import ItemPace, ItemWork

ONE = SchedulerOutput([ScheduledRequest("text", 1)], 1)


@pytest.fixture(autouse=True)
def share(monkeypatch):
    """Give items a fifth of the time."""
    monkeypatch.setattr(pace_module, "_SHARE", 0.2)


def begin_step(pace):
    """Begin a step; return the number of pieces of 10 tokens that it has time for."""
    pace.begin_step(has_texts=True)
    return pace.num_pieces("image", 10)


def make_pace():
    """Return a pace that knows a step of 5 s, and a second for a piece of 10 tokens."""
    pace = ItemPace()
    assert begin_step(pace) == 1  # nothing is known yet
    pace.step_ended(ONE, ItemWork(), 5.0)
    pace.step_ended(ONE, ItemWork({"image": 20}, seconds=2.0), 7.0)
    return pace


def test_items_take_a_share_of_the_steps():
    pace = make_pace()
    assert begin_step(pace) == 1
    pace.spend("image", 10)
    assert begin_step(pace) == 1
    pace.spend("image", 30)
    assert [begin_step(pace) for _ in range(3)] == [0, 1, 1]
    assert pace.num_pieces("image", 2) == 5
    pace.spend("image", 90)
    assert not pace.may_begin
    pace.begin_step(has_texts=False)
    assert pace.num_pieces("image", 10) == 1


def test_prompts_and_runs_share_the_time():
    pace = make_pace()
    begin_step(pace)
    assert pace.num_tokens() == 32  # the smallest piece
    pace.spend("prompt", 32)
    work = pace.end_step()
    assert (work.tokens, work.num_prompt_tokens) == ({"prompt": 32}, 32)
    pace.step_ended(SchedulerOutput([ScheduledRequest("p", 32)], 32), work, 8.2)
    assert [begin_step(pace) for _ in range(3)] == [0, 0, 1]
    assert pace.num_tokens() == 32
    pace.spend("prompt", 10)
    assert pace.end_step().seconds == pytest.approx(1.0)


def test_the_times_of_other_steps_teach_nothing():
    pace = make_pace()
    long = SchedulerOutput([ScheduledRequest("text", 90)], 90)
    pace.step_ended(long, ItemWork(), 90.0)
    pace.step_ended(long, ItemWork({"image": 10}), 90.0)
    encodes = SchedulerOutput(ONE.scheduled_reqs, 1, scheduled_encoder_inputs={"p": [0]})
    pace.step_ended(encodes, ItemWork(), 90.0)
    # Two kinds of work are paid for, but it is not known which of them took how long.
    pace.step_ended(ONE, ItemWork({"image": 10, "prompt": 5}, 5, seconds=1.0), 8.0)
    assert pace._costs == {"image": 0.1}
    assert [begin_step(pace) for _ in range(3)] == [0, 1, 1]


@pytest.mark.parametrize("fate", ["ends", "fails"])
def test_pieces_of_unknown_time_are_paid_for_once_it_is_known(fate):
    pace = ItemPace()
    pace.step_ended(ONE, ItemWork(), 5.0)
    works = []
    for _ in range(2):  # both steps are in flight
        assert begin_step(pace) == 1
        pace.spend("image", 10)
        works.append(pace.end_step())
    for work in works:
        pace.step_ended(ONE, work, 7.5)
    if fate == "fails":
        pace.forget_debts()
    # A step gives a second, and the two pieces have taken 2.5 seconds each.
    found = [begin_step(pace) for _ in range(6)]
    assert found == ([0, 0, 0, 1, 1, 1] if fate == "ends" else [1] * 6)


def test_a_step_that_took_long_stops_items_for_a_bounded_time():
    pace = make_pace()
    begin_step(pace)
    pace.spend("image", 10)
    pace.step_ended(ONE, pace.end_step(), 10_000.0)
    assert [begin_step(pace) for _ in range(5)] == [0, 0, 0, 0, 1]
