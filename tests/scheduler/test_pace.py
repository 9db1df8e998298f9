"""Pace of the work for items beside texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.messages import ScheduledRequest, SchedulerOutput
from octavo.scheduler.pace import ItemPace, ItemWork

ONE = SchedulerOutput([ScheduledRequest("text", 1)], 1)


def begin_step(pace):
    """Begin a step; return the number of pieces of 10 tokens that it has time for."""
    pace.begin_step(has_texts=True)
    return pace.num_pieces("image", 10)


def make_pace():
    """Return a pace that knows a step of 5 s, and a second for a piece of 10 tokens."""
    pace = ItemPace(0.2)
    assert begin_step(pace) == 1  # nothing is known yet
    pace.step_ended(ONE, ItemWork(), 5.0)
    pace.step_ended(ONE, ItemWork(), 900.0)
    pace.step_ended(ONE, ItemWork({"image": 20}, seconds=2.0), 7.0)
    assert pace._costs == {}
    pace.step_ended(ONE, ItemWork({"image": 20}, seconds=2.0), 7.0)
    pace._begun.add("prompt")
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
    pace.spend("prompt", 32, in_step=True)
    work = pace.end_step()
    assert (work.tokens, work.num_step_tokens) == ({"prompt": 32}, 32)
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
    assert pace._costs == {"image": 0.1}


def test_works_of_several_kinds_take_the_expected_parts_of_the_time():
    pace = make_pace()
    # What is left of 3 seconds is the time of the new kind.
    pace.step_ended(ONE, ItemWork({"image": 10, "prompt": 5}, 5, seconds=1.0), 8.0)
    assert pace._costs == pytest.approx({"image": 0.1, "prompt": 0.4})
    assert [begin_step(pace) for _ in range(3)] == [0, 1, 1]
    pace.step_ended(ONE, ItemWork({"image": 10, "prompt": 5}, 5, seconds=3.0), 5.0 + 6.0)
    assert pace._costs == pytest.approx({"image": 0.12, "prompt": 0.48})


def test_a_step_without_time_teaches_nothing():
    pace = ItemPace(0.2)
    pace.step_ended(ONE, ItemWork(), 0.0)
    pace.step_ended(ONE, ItemWork({"image": 10}), 5.0)
    for _ in range(2):
        pace.step_ended(ONE, ItemWork(), 5.0)
    assert (pace._step, pace._costs) == (pytest.approx(1.0), {})


@pytest.mark.parametrize("fate", ["ends", "fails"])
def test_pieces_of_unknown_time_are_paid_for_once_it_is_known(fate):
    pace = ItemPace(0.2)
    pace._begun.add("image")
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


def test_a_piece_that_took_long_stops_items_for_a_bounded_time():
    pace = ItemPace(0.2)
    pace._begun.add("image")
    pace.step_ended(ONE, ItemWork(), 5.0)
    begin_step(pace)
    pace.spend("image", 10)
    pace.step_ended(ONE, pace.end_step(), 10_000.0)
    assert [begin_step(pace) for _ in range(6)] == [0, 0, 0, 0, 1, 1]


class Machine:
    """Steps beside a text, of which each has as many pieces of 10 tokens as it may.

    Args:
        piece: seconds of a piece.
    """

    def __init__(self, piece):
        self.pace, self.piece = ItemPace(0.2), piece
        self.pace.step_ended(ONE, ItemWork(), 1.0)

    def run(self, count, step=1.0, extra=0.0):
        """Run steps of `step` seconds without their pieces; return the numbers of pieces.

        The first step with pieces takes `extra` seconds more.
        """
        found = []
        for _ in range(count):
            found.append(begin_step(self.pace))
            seconds = step + found[-1] * self.piece
            if found[-1]:
                self.pace.spend("image", found[-1] * 10)
                seconds, extra = seconds + extra, 0.0
            self.pace.step_ended(ONE, self.pace.end_step(), seconds)
        return found


def test_an_outlier_changes_little():
    machine = Machine(piece=2.0)
    assert sum(machine.run(100)) == 10
    machine.pace.step_ended(ONE, ItemWork(), 1000.0)
    assert 9 <= sum(machine.run(100)) <= 15
    machine = Machine(piece=2.0)
    machine.run(100)
    assert 6 <= sum(machine.run(100, extra=1000.0)) <= 10


@pytest.mark.parametrize("piece", [0.05, 0.01])
def test_steps_that_become_shorter_are_measured_beside_small_pieces(piece):
    """Otherwise the pieces of a step take what the step no longer does."""
    machine = Machine(piece)
    machine.run(100)
    machine.run(400, step=0.1)
    assert sum(machine.run(100, step=0.1)) * piece < 0.25 * 100 * 0.1


def test_a_first_time_that_was_too_long_is_corrected():
    machine = Machine(piece=0.5)
    machine.pace._step = 100.0
    machine.run(40)
    assert 30 <= sum(machine.run(100)) <= 50


@given(
    piece=st.floats(0.01, 2.0),
    factor=st.floats(0.2, 1000.0),
    step_factor=st.floats(1.0, 1000.0),
)
def test_the_first_times_change_little(piece, factor, step_factor):
    """The clock is simulated: a step has a second, and the first times may be other ones."""

    def spent(first_step, first_piece):
        machine = Machine(piece)
        pace = machine.pace = ItemPace(0.2)
        pace.step_ended(ONE, ItemWork(), first_step)
        pace.step_ended(ONE, ItemWork(), 1.0)
        assert begin_step(pace) == 1
        pace.spend("image", 10)
        pace.step_ended(ONE, pace.end_step(), 1.0 + first_piece)
        return sum(machine.run(100)) * piece

    # Items owe the time of three steps at most, the shares of 15 steps.
    usual = spent(1.0, piece)
    assert usual <= 0.2 * 102 + piece
    assert abs(spent(step_factor, factor * piece) - usual) <= 3.0 + 2 * piece
