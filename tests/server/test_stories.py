"""Records of requests: their limits, who may see them, and their marks."""

import math
from types import SimpleNamespace

import pytest

from octavo.server import stories
from octavo.server.stories import BYTES_OF_ONE, MAX_BLOCKED, Stories, Story
from octavo.system import clock


def story(name="a", owner=None, times=(10.0, 11.0, 12.0), num_prompts=1, is_line=False):
    usage = SimpleNamespace(prompt_tokens=3, completion_tokens=4, cached_tokens=0)
    return Story(
        name, f"cmpl-{name}", owner, "/v1/x", "m", usage, times, num_prompts, is_line=is_line
    )


@pytest.fixture
def now(monkeypatch):
    """Return a function that sets the time."""
    at = [0.0]
    monkeypatch.setattr(clock, "now", lambda: at[0])
    monkeypatch.setattr(clock, "from_monotonic", lambda seconds: seconds)
    return lambda seconds: at.__setitem__(0, seconds)


@pytest.mark.parametrize("name", ["a-b", "cmpl-a-b", "cmpl-a-b-0-17"])
def test_a_request_is_found_by_each_of_its_ids(name):
    found = story("a-b")
    found.begin_prompt(17)
    kept = Stories(10)
    kept.add(story("b"))
    kept.add(found)
    assert kept.find(name, None, is_admin=False) is found
    for other in ("b-a", "cmpl-a-b-0-18", "cmpl-a-b-17", "cmpl-a-b-0-", "cmpl-b-0-17"):
        assert kept.find(other, None, is_admin=False) is None


def test_the_newest_of_equal_ids_is_found():
    kept, new = Stories(10), story()
    kept.add(story())
    kept.add(new)
    assert kept.find("a", None, is_admin=False) is new


def test_each_owner_sees_its_own_and_the_operator_all():
    kept = Stories(10)
    for owner in ("x", "y", "x", None):
        kept.add(story(owner=owner))
    counts = {who: len(list(kept.visible(who, is_admin=False))) for who in ("x", "y", "z", None)}
    assert counts == {"x": 2, "y": 1, "z": 0, None: 1}
    assert len(list(kept.visible("z", is_admin=True))) == 4
    assert kept.find("a", "z", is_admin=False) is None


def test_the_oldest_are_dropped():
    kept = Stories(3)
    for name in "abcd":
        kept.add(story(name))
    assert [s.request_id for s in kept.visible(None, is_admin=False)] == ["d", "c", "b"]


def test_lines_of_batches_push_out_no_requests():
    kept = Stories(3)
    kept.add(story("a", times=(10.0, 11.0, 12.0)))
    for i in range(9):
        kept.add(story(f"l{i}", times=(9.0 + i, 11.0, 12.0), is_line=True))
    kept.add(story("b", times=(16.5, 17.0, 17.0)))
    visible = [s.request_id for s in kept.visible(None, is_admin=False)]
    assert visible == ["l8", "b", "l7", "l6", "a"]
    line = kept.find("l8", None, is_admin=False)
    kept.remove(line)
    kept.remove(line)  # it may have been dropped
    assert kept.find("l8", None, is_admin=False) is None
    assert kept.nbytes == 4 * line.nbytes


def test_requests_with_many_prompts_are_dropped_by_their_memory():
    kept = Stories(3)
    for name in "abc":
        kept.add(story(name, num_prompts=60))
    assert kept.nbytes <= 3 * BYTES_OF_ONE
    assert [s.request_id for s in kept.visible(None, is_admin=False)] == ["c"]
    kept.add(story("d", num_prompts=10_000))
    assert (kept.nbytes, list(kept.visible(None, is_admin=False))) == (0, [])


def test_a_request_in_a_stage_is_there_until_now(now):
    kept = story()
    now(13.0)
    marks = kept.marks(ready=5.0)
    assert (marks.begin, marks.end, marks.done) == (10.0, 13.0, None)
    assert marks.stages == [("receive", 11.0), ("parse", 12.0), ("start", 13.0)]


def test_marks_of_a_whole_life(now):
    kept = story()
    with kept.at_work():
        for at in (13.0, 14.0):
            now(at)
            kept.mark()
        now(15.0)
        kept.begin_prompt(7).end("tokenize")
        kept.begin_prompt(8)
        kept.note_sending(15.5, 16.0)
        now(17.0)
    assert kept.end is None
    kept.end_http(200, 18.0)
    now(99.0)
    marks = kept.marks(ready=None)
    assert (marks.end, marks.done, marks.is_complete) == (18.0, 17.0, True)
    assert marks.stages[2:] == [("start", 13.0), ("render", 14.0)]
    assert marks.prompts == {7: [("tokenize", 15.0)], 8: [("tokenize", 17.0)]}
    assert marks.blocked == [(15.5, 16.0)]
    assert marks.ready == math.inf


def test_work_in_the_background_ends_the_request(now):
    kept = story()
    with kept.at_work():
        now(20.0)
        kept.end_http(200, 20.0)
        assert kept.end is None
        now(30.0)
    assert kept.end == 30.0


def test_a_failure_is_not_complete(now):
    kept = story()
    with pytest.raises(ValueError, match="bad"), kept.at_work():
        raise ValueError("bad")
    assert (kept.done, kept.is_complete) == (0.0, False)


def test_the_times_of_a_slow_client_are_bounded(now):
    kept = story()
    for i in range(3 * MAX_BLOCKED):
        kept.note_sending(i, i + 0.5)
    assert len(kept.marks(None).blocked) == MAX_BLOCKED
    assert kept.blocked.itemsize * len(kept.blocked) < stories._ENTRY // 2
