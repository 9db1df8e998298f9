"""Log of the blocks that the prefix cache has given up."""

from octavo.kv_cache import given_up
from octavo.kv_cache.given_up import GivenUp, GivenUpLog
from tests.engine.test_core import make_core, request
from tests.engine.test_step_reporter import make_reporting_core, run


def test_the_latest_time_counts():
    times = iter([1.0, 2.0, 3.0])
    log = GivenUpLog(lambda: next(times))
    log.note(b"a", "x")
    log.note(b"b", None)
    log.note(b"a", "y")
    assert log.find(b"a") == GivenUp(3.0, "y")
    assert log.find(b"b") == GivenUp(2.0, None)
    assert log.find(b"c") is None


def test_the_oldest_entries_are_dropped(monkeypatch):
    monkeypatch.setattr(given_up, "MAX_ENTRIES", 3)
    log = GivenUpLog(lambda: 0.0)
    for name in (b"a", b"b", b"c", b"a", b"d"):
        log.note(name, None)
    assert [log.find(name) is None for name in (b"a", b"b", b"c", b"d")] == [
        *(False, True, False, False)
    ]


def test_a_request_learns_which_block_it_misses_and_for_whom():
    core = make_reporting_core(blocks=5)
    core.scheduler.kv_cache_manager.log_given_up(lambda: 42.0)
    prompt = list(range(1, 41))
    core.add_request(request("1", prompt, max_tokens=1))
    run(core)
    core.add_request(request("2", list(range(100, 150)), max_tokens=1))  # it needs all blocks
    assert not [e for r in run(core) for e in r.events if e.kind == "GIVEN_UP"]
    core.add_request(request("3", prompt, max_tokens=1))
    (event,) = [e for r in run(core) for e in r.events if e.kind == "GIVEN_UP"]
    assert (event.request_id, event.time, event.by) == ("3", 42.0, "2")
    core.shutdown()


def test_without_a_log_nothing_is_told():
    core = make_core(1, blocks=5)
    for name, first in (("1", 1), ("2", 100), ("3", 1)):
        core.add_request(request(name, list(range(first, first + 40)), max_tokens=1))
        while core.has_work():
            core.step()
    assert core.scheduler.kv_cache_manager.pool.num_evictions > 0
    core.shutdown()
