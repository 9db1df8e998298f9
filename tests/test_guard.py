"""Guard of an answer, against plain definitions of a loop and of reasoning."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import guard
from octavo.guard import MAX_PERIOD, MIN_LOOP, MIN_REPEATS, Guard, Loops
from octavo.messages import GuardSpec

TOKENS = st.lists(st.integers(0, 5), max_size=60)


def shortest_period(tokens):
    """Return the shortest period with which the tokens end, often enough; 0: none."""
    for period in range(1, MAX_PERIOD + 1):
        size = max(MIN_REPEATS * period, MIN_LOOP)
        if size > len(tokens):
            if period > MIN_LOOP:
                return 0
            continue
        tail = tokens[-size:]
        if tail[period:] == tail[:-period]:
            return period
    return 0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=90), st.integers(1, 9))))
def test_loops_are_those_of_the_definition(parts):
    tokens = [token for part, count in parts for token in part * count][:900]
    loops = Loops()
    for i, token in enumerate(tokens):
        assert loops.append(token) == shortest_period(tokens[max(0, i - 899) : i + 1])


def test_the_longest_period():
    rng = random.Random(1)
    text = [rng.randrange(50) for _ in range(MAX_PERIOD)]
    loops = Loops()
    found = [loops.append(token) for token in [7, 8, 9, *text * 3]]
    assert found[:-1] == [0] * (len(found) - 1)
    assert found[-1] == MAX_PERIOD
    loops = Loops()
    longer = [*text, 3]
    assert not any(loops.append(token) for token in longer * 4)


def specs():
    return st.builds(
        GuardSpec,
        begin=st.sampled_from([(), (1,), (1, 2), (1, 2, 1)]),
        end=st.sampled_from([(3,), (3, 4), (3, 3, 4)]),
        thinks=st.booleans(),
        budget=st.none() | st.integers(0, 20),
        repetition=st.sampled_from(["off", "report", "stop", "close_thinking"]),
    )


def state(made):
    return made.forced, made.must_stop, made.found


@settings(max_examples=60, deadline=None)
@given(specs(), TOKENS, st.integers(1, 6), st.data())
def test_the_state_follows_from_the_tokens(spec, tokens, repeats, data):
    """A guard that starts in the middle is in the same state as one that saw each token."""
    tokens = tokens * repeats
    whole = Guard(spec)
    half = data.draw(st.integers(0, len(tokens)))
    for token in tokens[:half]:
        whole.append(token)
        if whole.must_stop:
            return
    resumed = Guard(spec, tokens[:half])
    assert state(resumed) == state(whole)
    for token in tokens[half:]:
        whole.append(token)
        resumed.append(token)
        assert state(resumed) == state(whole)
        if whole.must_stop:
            return


@settings(max_examples=60, deadline=None)
@given(specs().filter(lambda s: s.budget is not None and s.repetition == "off"), TOKENS)
def test_reasoning_never_exceeds_its_budget(spec, wishes):
    """The reasoning, all sections together, has at most its budget of tokens and its end marker."""
    made, answer = Guard(spec), []
    for token in wishes:
        answer.append(token if made.forced is None else made.forced)
        made.append(answer[-1])
    thinks, inside, at = spec.thinks, 0, 0
    sections = 1
    while at < len(answer):
        marker = spec.end if thinks else spec.begin
        if marker and tuple(answer[at : at + len(marker)]) == marker:
            inside += len(marker) * thinks
            sections += not thinks
            thinks, at = not thinks, at + len(marker)
        else:
            inside, at = inside + thinks, at + 1
    assert inside <= spec.budget + sections * len(spec.end)


def run(spec, tokens):
    made = Guard(spec)
    for i, token in enumerate(tokens):
        made.append(token)
        if made.must_stop or made.forced is not None:
            return i + 1, made
    return None, made


def test_actions():
    loop = [5, 6, 7, 8, 9] * 60
    where = MIN_LOOP
    count, made = run(GuardSpec(repetition="stop"), loop)
    assert (count, made.must_stop, made.forced) == (where, True, None)
    assert made.found == guard.Repetition(5, "stop")
    count, made = run(GuardSpec(repetition="report"), loop)
    assert (count, made.found) == (None, guard.Repetition(5, "report"))
    thinking = GuardSpec((1,), (3, 4), thinks=True, repetition="close_thinking")
    count, made = run(thinking, loop)
    assert (count, made.must_stop, made.forced) == (where, False, 3)
    assert made.found == guard.Repetition(5, "close_thinking")
    made.append(3)
    assert made.forced == 4
    made.append(4)
    assert made.forced is None
    # In the text it ends the answer, after as many tokens again.
    for token in loop[: where - 1]:
        made.append(token)
        assert not made.must_stop
    made.append(loop[where - 1])
    assert made.must_stop
    # Without markers there is no reasoning to close.
    assert run(GuardSpec(repetition="close_thinking"), loop)[1].must_stop
    assert run(GuardSpec((1,), (3,), repetition="off"), loop)[0] is None


@pytest.mark.parametrize("known", [1, 60, MIN_LOOP - 1])
def test_a_loop_across_a_resumption(known):
    loop = [5, 6, 7] * 60
    made = Guard(GuardSpec(repetition="stop"), loop[:known])
    for i, token in enumerate(loop[known:], known):
        made.append(token)
        assert made.must_stop is (i == MIN_LOOP - 1)
        if made.must_stop:
            break
    assert made.found == guard.Repetition(3, "stop")


def test_a_long_answer_resumes_fast(monkeypatch):
    """Only the last tokens are searched for loops."""
    appended = []
    monkeypatch.setattr(guard.Loops, "append", lambda loops, token: appended.append(token) or 0)
    Guard(GuardSpec(repetition="stop"), list(range(100_000)))
    assert len(appended) <= MIN_REPEATS * MAX_PERIOD + 64
