"""Time lines: they are partitions of the wall time, and their causes are true."""

import itertools
import math
import random

import msgspec
import pytest

from octavo.frontend.step_log import EngineDeath, LoggedStep
from octavo.frontend.time_line import BETWEEN, STEPS, Marks, Span, make_time_line, number_of
from octavo.observability.steps import (
    StepEvent,
    StepPart,
    StepPreemption,
    StepRecord,
    StepWait,
)

ME, OTHER = "chatcmpl-a-0-7#3", "chatcmpl-b-0-8#4"


def logged(*records, engine=0):
    """Return the log's entries of records."""
    return [LoggedStep(r.processed, engine, msgspec.msgpack.encode(r)) for r in records]


def step(number, begun, computed, parts=(), *, at=None, **facts):
    """Return a step that was scheduled at `at` within no time, and processed at its end."""
    at = begun if at is None else at
    return StepRecord(number, at, at, begun, computed, computed, list(parts), **facts)


def mine(tokens=1, known=None, prompt=0, name=ME):
    """Return a part of the explained request."""
    return StepPart(name, tokens, 0, known, prompt)


THEIRS = StepPart(OTHER, 10)


def causes(spans):
    """Return (cause, begin, end) of spans."""
    return [(span.cause, span.begin, span.end) for span in spans]


def line(records, begin=0.0, end=100.0, **marks):
    """Return the spans of request 7, whose stages take no time."""
    marks = {"prompts": {7: []}, "done": end, "is_complete": True} | marks
    deaths = marks.pop("deaths", ())
    lost = marks.pop("lost", 0.0)
    records = logged(*records) if records and isinstance(records[0], StepRecord) else records
    return make_time_line(Marks(begin, end, **marks), records, deaths, lost).spans


@pytest.mark.parametrize(
    ("core_id", "number"),
    [
        ("chatcmpl-x-0-12#5", 12),
        ("3_chatcmpl-x-1-12#2.5", 12),
        ("4.1_cmpl-x-0-9#0", 9),
        ("x-1-5", None),
        ("chatcmpl--7#-8#-9-0-4#1", 4),
        ("a-0-²#1", None),
        ("", None),
    ],
)
def test_the_number_of_a_core_request_is_what_the_server_wrote(core_id, number):
    assert number_of(core_id) == number


def test_stages_before_the_engine_and_the_delivery_after_it():
    spans = line(
        [step(1, 10, 20, [mine(8, 0, 8)]), step(2, 20, 25, [mine()])],
        stages=[("receive", 1.0), ("parse", 2.0), ("render", 4.0)],
        prompts={7: [("tokenize", 6.0), ("to_engine", 6.5)]},
        blocked=[(1.0, 1.5), (40.0, 90.0)],
    )
    assert causes(spans) == [
        ("receive", 0, 1),
        ("parse", 1, 2),
        ("render", 2, 4),
        ("tokenize", 4, 6),
        ("to_engine", 6, 6.5),
        (BETWEEN, 6.5, 10),
        ("prefill", 10, 20),
        ("decode", 20, 25),
        ("deliver", 25, 40),
        ("client", 40, 90),
        ("deliver", 90, 100),
    ]


def test_a_front_end_that_marks_the_sending_late_hides_no_step():
    spans = line(
        [step(1, 2, 10, [mine(8, 0, 8)]), step(2, 10, 12, [mine()])],
        prompts={7: [("tokenize", 1.0), ("to_engine", 11.0)]},
        end=12.0,
    )
    assert causes(spans) == [
        ("tokenize", 0, 1),
        ("to_engine", 1, 2),
        ("prefill", 2, 10),
        ("decode", 10, 12),
    ]


def test_chunks_of_a_prompt_are_one_span_and_know_the_share_of_others():
    spans = line(
        [
            step(1, 0, 10, [mine(30, 0, 50), THEIRS]),
            step(2, 12, 22, [mine(20), THEIRS, StepPart("x-0-9#1", 10)]),
            step(3, 22, 30, [mine()]),
            step(4, 31, 40, [mine()]),
        ],
        end=40.0,
    )
    facts = {"others": 2, "theirs": 10 / 4 + 10 / 2, "between": 2}
    assert spans == [
        Span(0, 22, "prefill", steps=2, tokens=50, **facts, who={OTHER: 20, "x-0-9#1": 10}),
        Span(22, 40, "decode", steps=2, tokens=2, between=1),
    ]


@pytest.mark.parametrize("reason", ["SEAT", "BUDGET", "BLOCKS", "LEADER", "IN_FLIGHT"])
@pytest.mark.parametrize("first", [ME, OTHER])
def test_a_queued_request_has_the_reason_of_the_step_that_left_it_out(reason, first):
    added = StepEvent(ME, 5.0, "ADDED")
    spans = line(
        [
            step(1, 0, 10, [THEIRS], wait=StepWait(OTHER, "SEAT")),  # before the arrival
            step(2, 10, 20, [THEIRS], wait=StepWait(first, reason), events=[added]),
            step(3, 20, 30, [mine(4, 0, 4)]),
        ],
        end=30.0,
    )
    behind = {OTHER: 10} if first == OTHER else {}
    facts = {"reason": reason, "is_behind": bool(behind), "others": 1, "behind": behind}
    assert spans == [
        Span(0, 10, "step_of_others", who={OTHER: 10}),
        Span(10, 20, "queued", **facts, who={OTHER: 10} if reason in ("SEAT", "BUDGET") else {}),
        Span(20, 30, "prefill", steps=1, tokens=4),
    ]


def test_a_wait_names_what_the_others_had():
    """Seats are held for a time; of a budget and of blocks the most counts."""
    added, both = StepEvent(ME, 0.0, "ADDED"), [StepPart(OTHER, 4), StepPart("x-0-9#9", 7)]
    for reason in ("SEAT", "BUDGET", "BLOCKS"):
        holders = [(OTHER, 40), (ME, 3)], [("x-0-9#9", 12), (OTHER, 38)]
        if reason != "BLOCKS":
            holders = [], []
        spans = line(
            [
                step(1, 0, 10, [THEIRS], wait=StepWait(ME, reason, holders[0]), events=[added]),
                step(2, 10, 15, both, wait=StepWait(ME, reason, holders[1])),
                step(3, 15, 30, [mine(4, 0, 4)]),
            ],
            end=30.0,
        )
        assert [span.cause for span in spans] == ["queued", "prefill"]
        assert spans[0].others == 2
        assert (
            spans[0].who
            == {
                "SEAT": {OTHER: 15.0, "x-0-9#9": 5.0},
                "BUDGET": {OTHER: 10, "x-0-9#9": 7},
                "BLOCKS": {OTHER: 40, "x-0-9#9": 12},
            }[reason]
        )


def test_the_way_to_the_engine_ends_at_its_arrival():
    added = StepEvent(ME, 3.0, "ADDED")
    spans = line([step(1, 5, 9, [mine(4, 0, 4)], at=4, events=[added])], end=9.0)
    assert causes(spans) == [("to_engine", 0, 3), (BETWEEN, 3, 5), ("prefill", 5, 9)]


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        ("WAITING_FOR_FSM", "grammar"),
        ("WAITING_FOR_REMOTE_KVS", "kv_load"),
        ("WAITING_FOR_WAKE_UP", "asleep"),
        ("WAITING_FOR_ADAPTER", "adapter"),
        ("WAITING_FOR_ADAPTER_TURN", "adapter_turn"),
        ("WAITING_FOR_ENCODER", "encoder"),
    ],
)
def test_a_held_request_has_the_cause_of_its_status(status, cause):
    events = [
        StepEvent(ME, 1.0, "ADDED"),
        StepEvent(ME, 1.0, status),
        StepEvent(OTHER, 3.0, "READY"),
        StepEvent(ME, 8.0, "READY"),
    ]
    spans = line(
        [
            step(1, 2, 9, [THEIRS], wait=StepWait(OTHER, "SEAT")),
            step(2, 9, 12, [mine(4, 0, 4)], events=events),
        ],
        end=12.0,
        prompts={7: [("to_engine", 2.0)]},  # the mark is later than the engine's event
    )
    assert causes(spans) == [
        ("to_engine", 0, 2),
        (cause, 2, 8),
        ("step_of_others", 8, 9),
        ("prefill", 9, 12),
    ]


def test_a_preempted_request_waits_and_is_computed_again():
    spans = line(
        [
            step(1, 0, 10, [mine(8, 0, 8)]),
            # Scheduled while the step before is computed; that step still has its token.
            step(2, 10, 14, [mine()], at=1),
            step(3, 14, 20, [THEIRS], at=11, preemptions=[StepPreemption(ME, OTHER)]),
            step(4, 20, 26, [mine(10, 0, 10)]),
            step(5, 26, 30, [mine()]),
        ],
        end=30.0,
    )
    assert causes(spans) == [
        ("prefill", 0, 10),
        ("decode", 10, 14),
        ("preempted", 14, 20),
        ("recompute", 20, 26),
        ("decode", 26, 30),
    ]
    assert spans[2].who == {OTHER: 6}


def test_a_preemption_of_another_request_is_not_its_own():
    spans = line(
        [
            step(1, 0, 10, [mine(8, 0, 8)]),
            step(2, 10, 20, [THEIRS], preemptions=[StepPreemption("x-0-9#9", ME)]),
            step(3, 20, 30, [mine()]),
        ],
        end=30.0,
    )
    assert causes(spans)[1] == ("step_of_others", 10, 20)


def test_an_engine_that_died_is_named_for_a_running_request():
    spans = line(
        [
            step(1, 0, 10, [mine(8, 0, 8)]),
            step(2, 10, 14, [mine()]),
            # The next process: it counts from 1.
            step(1, 50, 60, [mine(10, 0, 10)], at=49, events=[StepEvent(ME, 47.0, "ADDED")]),
        ],
        end=60.0,
        deaths=[EngineDeath(46.0, 26.0, 0, "killed"), EngineDeath(45.0, 1.0, 1, "another")],
    )
    assert causes(spans) == [
        ("prefill", 0, 10),
        ("decode", 10, 14),
        ("engine_death", 14, 46),
        ("to_engine", 46, 47),
        (BETWEEN, 47, 50),
        ("recompute", 50, 60),
    ]


def test_an_engine_that_died_is_named_for_a_waiting_request():
    spans = line(
        [
            step(1, 0, 10, [THEIRS], wait=StepWait(ME, "SEAT")),
            step(2, 10, 14, [THEIRS], wait=StepWait(ME, "SEAT")),
            step(1, 50, 60, [mine(10, 0, 10)]),
        ],
        end=60.0,
        deaths=[EngineDeath(46.0, 26.0, 0, "killed")],
    )
    assert causes(spans) == [
        ("queued", 0, 14),
        ("engine_death", 14, 46),
        (BETWEEN, 46, 50),
        ("prefill", 50, 60),
    ]


def test_a_request_that_another_engine_took_over():
    records = logged(step(1, 0, 10, [mine(8, 0, 8)])) + logged(
        step(9, 5, 12, [THEIRS]),
        step(10, 12, 31, [THEIRS], wait=StepWait(ME, "SEAT"), events=[StepEvent(ME, 30, "ADDED")]),
        step(11, 40, 50, [mine(9, 0, 9)], at=31),
        engine=1,
    )
    assert causes(line(records, end=50.0)) == [
        ("prefill", 0, 10),
        ("engine_death", 10, 30),
        ("step_of_others", 30, 31),
        (BETWEEN, 31, 40),
        ("recompute", 40, 50),
    ]


def test_a_failed_step_is_no_progress():
    spans = line(
        [step(1, 0, 10, [mine(8, 0, 8)], failed=True), step(2, 10, 20, [mine(8, 0, 8)])], end=20.0
    )
    assert causes(spans) == [("failed_step", 0, 10), ("recompute", 10, 20)]


def test_the_model_was_still_loading():
    spans = line([step(1, 50, 60, [mine(8, 0, 8)])], end=60.0, ready=45.0)
    assert causes(spans)[0] == ("model_load", 0, 45)
    spans = line([], end=60.0, ready=math.inf, done=50.0, is_complete=False)
    assert causes(spans) == [("model_load", 0, 50), ("deliver", 50, 60)]


def test_steps_that_the_log_dropped_are_said_to_be_dropped():
    spans = line([step(5, 60, 70, [mine()])], end=70.0, lost=55.0)
    assert causes(spans) == [("not_recorded", 0, 55), (BETWEEN, 55, 60), ("decode", 60, 70)]


def test_a_request_that_never_started_waited_until_its_end():
    spans = line(
        [step(1, 0, 30, [THEIRS]), step(2, 30, 60, [THEIRS], wait=StepWait(ME, "BLOCKS"))],
        end=80.0,
        done=75.0,
        is_complete=False,
    )
    assert causes(spans) == [
        ("step_of_others", 0, 30),
        ("queued", 30, 75),
        ("deliver", 75, 80),
    ]


def test_the_line_follows_the_answer_that_ended_last():
    first, second = "0_" + ME, "1_" + ME
    result = make_time_line(
        Marks(0.0, 50.0, prompts={7: []}, done=50.0, is_complete=True),
        logged(
            step(1, 0, 10, [mine(8, 0, 8, first)], wait=StepWait(second, "LEADER")),
            step(2, 10, 20, [mine(name=first), mine(1, 7, 8, second)]),
            step(3, 20, 50, [mine(name=second)]),
        ),
    )
    assert result.followed == second
    assert causes(result.spans) == [
        ("queued", 0, 10),
        ("prefill", 10, 20),
        ("decode", 20, 50),
    ]
    assert result.spans[1].others == 0
    told = {a.core_id: (a.num_steps, a.num_chunks, a.num_cached) for a in result.answers.values()}
    assert told == {first: (2, 1, 0), second: (2, 1, 7)}


def test_all_steps_of_a_beam_search_are_followed():
    records = [
        step(1, 0, 10, [mine(8, 0, 8, f"0.0_{ME}")]),
        step(2, 12, 20, [mine(1, 8, 9, f"1.0_{ME}"), mine(1, 8, 9, f"1.1_{ME}")]),
    ]
    spans = line(records, end=20.0, is_one=True)
    assert causes(spans) == [("prefill", 0, 20)]
    assert (spans[0].between, spans[0].theirs) == (2, 0)


def test_each_step_of_a_beam_search_queues_again():
    records = [
        step(1, 0, 10, [mine(8, 0, 8, f"0.0_{ME}")]),
        step(
            2,
            *(12, 20, [THEIRS]),
            wait=StepWait(f"1.0_{ME}", "SEAT"),
            events=[StepEvent(f"1.0_{ME}", 11.0, "ADDED")],
        ),
        step(3, 20, 30, [mine(1, 8, 9, f"1.0_{ME}")]),
    ]
    assert causes(line(records, end=30.0, is_one=True)) == [
        ("prefill", 0, 10),
        ("to_engine", 10, 11),
        (BETWEEN, 11, 12),
        ("queued", 12, 20),
        ("prefill", 20, 30),
    ]


def test_seconds_by_cause_have_the_time_between_steps_apart():
    result = make_time_line(
        Marks(0.0, 30.0, prompts={7: []}, done=30.0, is_complete=True),
        logged(
            step(1, 0, 10, [mine(8, 0, 8)]), step(2, 10, 20, [mine()]), step(3, 25, 30, [mine()])
        ),
    )
    assert result.seconds() == {"prefill": 10.0, "decode": 15.0, BETWEEN: 5.0}


def random_log(rng):
    """Return random marks, steps and deaths, which need not fit together."""
    names = [ME, OTHER, f"0_{ME}", f"1_{ME}", "cmpl-c-0-9#5", "nonsense"]
    steps = []
    for engine in range(rng.choice([1, 1, 2])):
        at = rng.uniform(-5, 10)
        for number in range(rng.randrange(30)):
            times = [at := at + rng.choice([0, rng.random()]) for _ in range(5)]
            parts = [
                StepPart(
                    rng.choice(names),
                    rng.randint(1, 9),
                    0,
                    rng.choice([None, None, 0, 3]),
                    rng.randrange(20),
                )
                for _ in range(rng.randrange(4))
            ]
            wait = None
            if rng.random() < 0.5:
                wait = StepWait(rng.choice(names), rng.choice(["SEAT", "BLOCKS"]))
            lost = [StepPreemption(rng.choice(names), None)] if rng.random() < 0.2 else []
            kinds = ["ADDED", "READY", "WAITING_FOR_FSM", "WAITING_FOR_REMOTE_KVS"]
            events = [
                StepEvent(rng.choice(names), at - rng.random() * 3, rng.choice(kinds))
                for _ in range(rng.randrange(3))
            ]
            record = StepRecord(
                number, *times, parts, wait, lost, rng.random() < 0.1, events=events
            )
            steps += logged(record, engine=engine)
    begin = rng.uniform(0, 10)
    end = begin + rng.choice([0.0, rng.random() * 40])
    stages = [(c, begin + rng.uniform(-1, 5)) for c in ("receive", "parse")[: rng.randrange(3)]]
    marks = Marks(
        begin,
        end,
        stages,
        rng.choice([{}, {7: []}, {7: [("tokenize", begin + 1)], 9: []}]),
        rng.random() < 0.2,
        rng.choice([None, rng.uniform(begin, end)]),
        rng.random() < 0.5,
        sorted((t := rng.uniform(0, 50), t + rng.random()) for _ in range(rng.randrange(4))),
        rng.choice([None, rng.uniform(0, 20)]),
    )
    deaths = [
        EngineDeath(rng.uniform(0, 50), rng.random() * 5, rng.randrange(2), "")
        for _ in range(rng.randrange(3))
    ]
    return marks, steps, deaths, rng.choice([0.0, rng.uniform(0, 30)])


@pytest.mark.parametrize("seed", range(500))
def test_spans_are_a_partition_whatever_the_records_say(seed):
    marks, steps, deaths, lost = random_log(random.Random(seed))
    result = make_time_line(marks, steps, deaths, lost)
    if marks.begin == marks.end:
        assert result.spans == []
        return
    assert result.spans[0].begin == marks.begin
    assert result.spans[-1].end == marks.end
    for before, after in itertools.pairwise(result.spans):
        assert before.end == after.begin
    for span in result.spans:
        assert span.begin < span.end
        seconds = span.end - span.begin
        assert 0 <= span.between < seconds
        assert 0 <= span.theirs <= seconds
        assert (span.steps > 0) == (span.cause in STEPS)
    assert sum(result.seconds().values()) == pytest.approx(marks.end - marks.begin, abs=1e-9)
