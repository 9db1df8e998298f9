import pytest

from octavo.kv_connector.tracking import BlockTracker, longest_match
from octavo.messages import SchedulerOutput
from tests.fakes import STATE, FakeEngine, pages
from tests.transfers import make_layout

PROMPT = list(range(30))


class Follower:
    """Tracker of the requests of an engine, by the outputs of its steps."""

    def __init__(self, **options):
        self.engine = FakeEngine(**options)
        manager = self.engine.scheduler.kv_cache_manager
        self.layout = make_layout(self.engine.scheduler.kv_cache_config)
        self.manager = manager


@pytest.fixture
def follower():
    return Follower(caches=pages(None))


def known(request, *missing):
    return [{h for i, h in enumerate(request.block_hashes) if i not in missing}]


def test_matches_end_before_the_first_missing_block(follower):
    request, layout = follower.engine.add("a", PROMPT), follower.layout
    assert len(request.block_hashes) == 3
    assert longest_match(layout, request, 0, known(request)) == 3
    assert longest_match(layout, request, 0, known(request, 2)) == 2
    assert longest_match(layout, request, 0, known(request, 0)) == 0
    assert longest_match(layout, request, 0, [set()]) == 0


def test_what_the_prefix_cache_has_need_not_be_known(follower):
    request, layout = follower.engine.add("a", PROMPT), follower.layout
    assert longest_match(layout, request, 8, known(request, 0)) == 3
    assert longest_match(layout, request, 24, [set()]) == 3


def test_of_a_window_only_what_is_seen_is_needed():
    follower = Follower(caches=pages(9))
    request = follower.engine.add("a", PROMPT)
    assert longest_match(follower.layout, request, 0, known(request, 0)) == 3
    assert longest_match(follower.layout, request, 0, known(request, 2)) == 2


def test_groups_must_agree():
    follower = Follower(caches=pages(None, 9))
    request, layout = follower.engine.add("a", PROMPT), follower.layout
    everything = known(request)[0]
    assert longest_match(layout, request, 0, [everything, everything]) == 3
    ends = {
        longest_match(layout, request, 0, [known(request, i)[0], everything]) for i in range(3)
    } | {longest_match(layout, request, 0, [everything, known(request, 2)[0]])}
    assert ends <= {0, 1, 2}


def test_a_match_ends_with_a_state():
    follower = Follower(caches=(*pages(None), STATE), num_states=4)
    request, layout = follower.engine.add("a", PROMPT), follower.layout
    whole = known(request)
    for states, length in [((0, 1, 2), 3), ((0, 1), 2), ((), 0)]:
        ends = {request.block_hashes[i] for i in states}
        assert longest_match(layout, request, 0, whole, ends) == length
    assert longest_match(layout, request, 0, known(request, 1), ends | {*whole[0]}) == 1
    short = follower.engine.add("b", PROMPT[:24])  # a state cannot go back by a token
    assert longest_match(layout, short, 0, known(short), known(short)[0]) == 2


def test_a_request_that_ends_is_forgotten(follower):
    tracker = BlockTracker(follower.layout)
    request = follower.engine.add("a", PROMPT)
    tracker.start(request, [[1, 2, 3]])
    assert not list(tracker.full_blocks(SchedulerOutput(finished_req_ids=["a", "unknown"])))
    assert not tracker._live
