"""Sample of the schedules that `python -m tests.simulate` runs by the million."""

import logging
from collections import Counter

import pytest

import tests.simulate.schedule as schedule_module
from octavo.frontend.output_processor import OutputProcessor
from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.manager import KVCacheManager
from octavo.kv_cache.states import StateManager
from octavo.scheduler.fairness import TenantCounters
from octavo.scheduler.queue import RequestQueue, TenantQueue, WaitingQueue
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step_builder import StepBuilder
from tests.fakes import FakeWorker
from tests.simulate.__main__ import fails, failures, main
from tests.simulate.schedule import (
    Abort,
    Arrival,
    Death,
    Schedule,
    Settings,
    StepFailure,
    make_schedule,
    shrink,
)
from tests.simulate.simulation import Simulation, run


@pytest.fixture(autouse=True, scope="module")
def silence():
    """Hide log lines: steps fail on purpose."""
    logger = logging.getLogger("octavo")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def test_no_schedule_breaks_an_invariant():
    assert failures(range(1500)) == []
    assert failures(range(300), states=True) == []


def test_a_seed_is_a_schedule_and_its_repr_makes_it_again():
    for seed in range(30):
        schedule = make_schedule(seed)
        assert schedule == make_schedule(seed)
        assert eval(repr(schedule), vars(schedule_module).copy()) == schedule


def test_the_schedules_have_everything_in_them():
    seen = Counter()
    for seed in range(600):
        simulation = Simulation(make_schedule(seed))
        simulation.run()
        stats = simulation._core.stats()
        worker = simulation._executor.worker
        seen["preemptions"] += stats.num_preemptions
        seen["hits"] += stats.prefix_cache_hits
        seen["copies"] += worker.num_copies
        seen["right drafts"] += worker.num_accepted
        seen["wrong drafts"] += stats.num_draft_tokens - worker.num_accepted
        seen["restarts"] += simulation._restarts
        seen["aborts"] += len(simulation._aborted)
        seen["sleeps"] += len(simulation._slept)
        for error in simulation._errors.values():
            seen[type(error).__name__] += 1
        for reason in simulation._ended.values():
            seen[reason] += 1
    expected = {"preemptions", "hits", "copies", "right drafts", "wrong drafts", "restarts"}
    expected |= {"aborts", "sleeps", "stop", "length", "abort"}
    expected |= {
        "DeadlineError",
        "FirstTokenError",
        "StepFailedError",
        "GrammarError",
        "RequestError",
    }
    assert {name for name in expected if seen[name] < 5} == set()


def no_copies(monkeypatch):
    take = KVCacheManager.take_blocks_to_copy
    monkeypatch.setattr(KVCacheManager, "take_blocks_to_copy", lambda self: take(self)[:0])


def no_reset(monkeypatch):
    monkeypatch.setattr(KVCacheManager, "reset_prefix_cache", lambda self: True)


def forgetful_records(monkeypatch):
    unfinished = OutputProcessor.unfinished

    def without_output(self):
        requests = unfinished(self)
        for request in requests:
            request.output_token_ids = []
        return requests

    monkeypatch.setattr(OutputProcessor, "unfinished", without_output)


def leaking_pool(monkeypatch):
    free = BlockPool.free_blocks
    monkeypatch.setattr(BlockPool, "free_blocks", lambda self, blocks: free(self, list(blocks)[1:]))


def last_come_first_served(monkeypatch):
    def peek(self):
        return self._requests[max(self._requests)]

    monkeypatch.setattr(RequestQueue, "peek", peek)


def tenants_in_order_of_arrival(monkeypatch):
    monkeypatch.setattr(WaitingQueue, "rank", lambda self, request: request.queue_key)


def deadlines_of_nobody(monkeypatch):
    monkeypatch.setattr(TenantQueue, "_queue_of", lambda self, request: self._others)


def deadlines_before_all(monkeypatch):
    def peek(self):
        waiting = [queue.peek() for queue in (self._timed, self._others) if queue]
        return min(waiting, key=lambda request: request.queue_key[0])

    monkeypatch.setattr(TenantQueue, "peek", peek)


def deadlines_that_pass(monkeypatch):
    monkeypatch.setattr(Scheduler, "_fail_expired", lambda self, now: None)


def tenants_that_pay_twice(monkeypatch):
    """Charge for tokens that are computed again after a preemption."""
    add = StepBuilder._add_to_step

    def add_to_step(self, step, request, *rest):
        request.num_charged = 0
        add(self, step, request, *rest)

    monkeypatch.setattr(StepBuilder, "_add_to_step", add_to_step)


def tenants_that_compete_for_ever(monkeypatch):
    monkeypatch.setattr(TenantCounters, "cease", lambda self, tenant: None)


def lost_requests(monkeypatch):
    monkeypatch.setattr(Scheduler, "set_ready", lambda self, request_id: None)


def wrong_draft(monkeypatch):
    """Keep a wrong draft."""
    truncate = FakeWorker._sample

    def sample(self, req_id, count, drafts, out):
        truncate(self, req_id, count, drafts, out)
        if drafts and out.sampled_token_ids[-1]:
            out.sampled_token_ids[-1] = (drafts + out.sampled_token_ids[-1][-1:])[: len(drafts) + 1]

    monkeypatch.setattr(FakeWorker, "_sample", sample)


def snapshots_without_a_state(monkeypatch):
    """Make snapshots of answers known before their last token is computed."""
    publish = StateManager._publish
    monkeypatch.setattr(
        StateManager,
        "_publish",
        lambda self, request, states, computed=0: publish(self, request, states, 10**9),
    )


def snapshots_of_a_wrong_place(monkeypatch):
    """Those of answers are one token too early."""
    advance = StateManager.advance

    def advance_earlier(self, request, end, num_slots):
        advance(self, request, end, num_slots)
        states, answer = self._requests[request.request_id], request.num_prompt_tokens
        states.scheduled = [(n - (n > answer), slot) for n, slot in states.scheduled]

    monkeypatch.setattr(StateManager, "advance", advance_earlier)


def slots_that_are_not_pinned(monkeypatch):
    monkeypatch.setattr(StateManager, "_release", lambda self, slot: self._free.append(slot))


@pytest.mark.parametrize(
    "plant", [snapshots_without_a_state, snapshots_of_a_wrong_place, slots_that_are_not_pinned]
)
def test_a_fault_of_states_is_found(plant, monkeypatch):
    plant(monkeypatch)
    assert any(fails(make_schedule(seed, states=True)) for seed in range(2000))


@pytest.mark.parametrize(
    "plant",
    [
        no_copies,
        no_reset,
        forgetful_records,
        leaking_pool,
        last_come_first_served,
        tenants_in_order_of_arrival,
        deadlines_of_nobody,
        deadlines_before_all,
        deadlines_that_pass,
        tenants_that_pay_twice,
        tenants_that_compete_for_ever,
        lost_requests,
        wrong_draft,
    ],
)
def test_a_fault_is_found(plant, monkeypatch):
    plant(monkeypatch)
    assert any(fails(make_schedule(seed)) for seed in range(500))


def test_what_is_found_is_made_small(monkeypatch, capsys):
    forgetful_records(monkeypatch)
    seed = next(seed for seed in range(500) if fails(make_schedule(seed)))
    small = shrink(make_schedule(seed), fails)
    assert {type(event) for event in small.events} == {Arrival, Death}
    assert len(small.events) == 2
    assert fails(small)
    assert main(["--replay", str(seed)]) == 1
    printed = capsys.readouterr().out
    assert f"seed {seed}" in printed
    assert "Death(at=" in printed


def test_the_command_counts_and_tells_seeds(monkeypatch, capsys):
    assert main(["--schedules", "20", "--seed", "7"]) == 0
    assert "20 schedules (seeds 7 to 26)" in capsys.readouterr().out
    assert main(["--replay", "7"]) == 0
    assert main(["--schedules", "20", "--states"]) == 0
    leaking_pool(monkeypatch)
    assert main(["--schedules", "3"]) == 1
    assert "seed 0: AssertionError" in capsys.readouterr().out


def test_a_second_failure_of_steps_in_flight():
    """The fake worker found it: it forgot the data computed between the two."""
    settings = Settings(max_model_len=48, block_size=4, depth=2, threshold=5)
    arrivals = (
        Arrival(at=0.0, name="r4", family=0, shared=20, own=5, max_tokens=3),
        Arrival(at=0.0, name="r5", family=1, shared=21, own=0, max_tokens=1),
    )
    run(Schedule(settings, (*arrivals, StepFailure(at=3.7), StepFailure(at=4.3))))


def test_an_abort_of_nobody_is_nothing():
    run(Schedule(Settings(max_model_len=24, block_size=4), (Abort(0.0, "r9"), Abort(3.0, "r9"))))
