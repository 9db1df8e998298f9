"""Scheduler with a KV connector, step by step."""

import pytest

from octavo.errors import RequestError
from octavo.messages import FinishReason
from octavo.models.state_cache import StateCache
from octavo.request import RequestStatus
from octavo.scheduler.checks import check_transfer
from octavo.scheduler.costs import PrefillCosts
from tests.fakes import STATE, FakeEngine, expected_output, pages
from tests.params import core_params, set_options
from tests.transfers import FakeTransfers, make_connector

PROMPT = list(range(30))
TEXT = list(range(20, 50))
"""Prompt without the end of a message: it has one snapshot."""
PAGES = pages(None)


def make_engine(slots=50, file_slots=0, *, caches=PAGES, connector=None, **options):
    engine = FakeEngine(
        caches=caches,
        make_connector=lambda kv: make_connector(kv, slots, file_slots, **(connector or {})),
        **options,
    )
    transfers = FakeTransfers(engine.executor)
    engine.on_step = transfers.step
    return engine, transfers


def forget(engine):
    assert engine.scheduler.reset_prefix_cache()
    engine.executor.forget()


def run(engine, transfers, damaged=0):
    for _ in range(100):
        if not engine.scheduler.requests:
            break
        engine.step()
        for name in list(transfers.pending):
            engine.scheduler.update_connector_output(transfers.deliver(name, damaged))
    engine.run()


def alone(request):
    return expected_output(request.sampling_params, request.all_token_ids[:30], 128)


@pytest.mark.parametrize("file_slots", [0, 50])
@pytest.mark.parametrize("caches", [pages(None), pages(11), pages(None, 9)], ids=str)
def test_what_was_computed_is_loaded(caches, file_slots):
    engine, transfers = make_engine(6 if file_slots else 50, file_slots, caches=caches)
    engine.add("a", PROMPT)
    run(engine, transfers)
    forget(engine)
    again = engine.add("b", PROMPT)
    run(engine, transfers)
    assert engine.tokens("b") == alone(again)
    assert again.num_cached_tokens == 24
    stats = engine.scheduler.make_stats()
    assert stats.external_prefix_cache_queries == 60
    assert stats.external_prefix_cache_hits == 24
    assert stats.prefix_cache_hits == 0
    assert stats.num_failed_loads == 0
    assert transfers.num_loaded


def test_blocks_of_the_file_evict_no_others_of_the_load():
    engine, transfers = make_engine(slots=3, file_slots=4)
    request = engine.add("a", PROMPT)
    run(engine, transfers)
    forget(engine)
    connector, hashes = engine.scheduler._connector, request.block_hashes
    assert (0, hashes[0]) not in connector._memory
    assert next(iter(connector._memory)) == (0, hashes[1])  # evicted next
    connector._file.remove((0, hashes[1]))
    again = engine.add("b", PROMPT)
    run(engine, transfers)
    assert engine.tokens("b") == alone(again)
    assert again.num_cached_tokens == 24


def test_others_go_on_while_one_waits():
    engine, transfers = make_engine()
    engine.add("a", PROMPT)
    run(engine, transfers)
    forget(engine)
    waiting = engine.add("b", PROMPT)
    engine.add("c", [7] * 20)
    engine.step()
    assert waiting.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert [r.req_id for r in engine.steps[-1].scheduled_reqs] == ["c"]
    for _ in range(20):
        engine.step()
    assert engine.finish_reason("c") == FinishReason.LENGTH
    assert not engine.scheduler.has_requests()  # no work before the blocks are loaded
    engine.scheduler.update_connector_output(transfers.deliver("b"))
    engine.run()
    assert engine.tokens("b") == alone(waiting)


def test_the_same_blocks_are_loaded_once():
    engine, transfers = make_engine()
    engine.add("a", PROMPT)
    run(engine, transfers)
    forget(engine)
    requests = [engine.add(name, PROMPT) for name in "bcd"]
    engine.step()
    assert list(transfers.pending) == ["b"]
    assert all(r.status == RequestStatus.WAITING_FOR_REMOTE_KVS for r in requests)
    run(engine, transfers)
    assert [engine.tokens(name) for name in "bcd"] == [alone(r) for r in requests]
    assert transfers.num_loaded == 3


@pytest.mark.parametrize("damaged", [1, 2, 99])
def test_damaged_blocks_are_computed_and_forgotten(damaged):
    engine, transfers = make_engine()
    engine.add("a", PROMPT)
    run(engine, transfers)
    forget(engine)
    request = engine.add("b", PROMPT)
    run(engine, transfers, damaged)
    assert engine.tokens("b") == alone(request)
    assert request.num_cached_tokens == max(0, 24 - 8 * damaged)
    assert engine.scheduler.make_stats().num_failed_loads == 1
    forget(engine)
    third = engine.add("c", PROMPT)  # the recomputed blocks were saved again
    run(engine, transfers)
    assert third.num_cached_tokens == 24


def test_a_load_that_fails_may_fail_its_request():
    engine, transfers = make_engine(connector={"kv_load_failure_policy": "fail"})
    engine.add("a", PROMPT)
    run(engine, transfers)
    forget(engine)
    engine.add("b", PROMPT)
    follower = engine.add("c", PROMPT)
    engine.step()
    engine.scheduler.update_connector_output(transfers.deliver("b", 1))
    run(engine, transfers)
    assert engine.outputs["b"][-1].error_kind == "KVLoadError"
    assert engine.tokens("c") == alone(follower)


def test_blocks_of_an_aborted_request_come_back_when_nothing_writes_to_them_any_more():
    engine, transfers = make_engine()
    engine.add("a", PROMPT)
    run(engine, transfers)
    forget(engine)
    engine.add("b", PROMPT)
    engine.step()
    engine.scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    assert engine.scheduler.kv_cache_manager.num_used_blocks == 3
    engine.scheduler.check_integrity()
    # Another request with its id does not wait for these blocks; it computes.
    again = engine.add("b", PROMPT)
    engine.step()
    assert again.status == RequestStatus.WAITING_FOR_REMOTE_KVS  # for the blocks of the first
    engine.scheduler.update_connector_output(transfers.deliver("b"))
    engine.run()
    assert engine.tokens("b") == alone(again)
    assert engine.scheduler.kv_cache_manager.num_used_blocks == 0


def test_a_step_that_fails_saves_nothing():
    engine, transfers = make_engine(depth=2)
    engine.add("a", PROMPT)
    engine.schedule()
    engine.schedule()
    work, _ = engine.in_flight.popleft()
    engine.scheduler.fail_step(work, "the step failed")
    engine.executor.memory.clear()
    while engine.in_flight:
        engine.update()
    request = engine.add("b", PROMPT)
    run(engine, transfers)
    assert request.num_cached_tokens == 0
    assert engine.tokens("b") == alone(request)


def test_roles():
    engine, transfers = make_engine(connector={"kv_role": "kv_producer"})
    engine.add("a", PROMPT)
    run(engine, transfers)
    assert transfers.slots
    forget(engine)
    assert not engine.add("b", PROMPT).num_cached_tokens
    run(engine, transfers)
    assert not transfers.num_loaded
    engine, transfers = make_engine(connector={"kv_role": "kv_consumer"})
    engine.add("a", PROMPT)
    run(engine, transfers)
    assert not transfers.slots


def test_private_prompts_stay_private():
    engine, transfers = make_engine()
    engine.add("a", PROMPT, salt="mine")
    run(engine, transfers)
    forget(engine)
    other, mine = engine.add("b", PROMPT, salt="yours"), engine.add("c", PROMPT, salt="mine")
    run(engine, transfers)
    assert (other.num_cached_tokens, mine.num_cached_tokens) == (0, 24)


@pytest.mark.parametrize(("mode", "loaded"), [("swap", True), ("recompute", False)])
def test_preempted_requests_are_loaded_or_computed(mode, loaded):
    engine, transfers = make_engine(num_blocks=12, preemption_mode=mode, max_model_len=80)
    requests = [engine.add(name, [*PROMPT[:20], i], max_tokens=40) for i, name in enumerate("ab")]
    run(engine, transfers)
    assert engine.scheduler.make_stats().num_preemptions
    assert bool(transfers.num_loaded) == loaded
    for name, request in zip("ab", requests, strict=True):
        prompt = request.all_token_ids[:21]
        assert engine.tokens(name) == expected_output(request.sampling_params, prompt, 80)


class TestStates:
    """Recurrent states are loaded like blocks, together with them or alone."""

    def make(self, slots=50, file_slots=0, **options):
        options = {"caches": (*PAGES, STATE, STATE), "num_states": 8} | options
        engine, transfers = make_engine(slots, file_slots, **options)
        engine.add("a", TEXT)
        run(engine, transfers)
        return engine, transfers

    @pytest.mark.parametrize("file_slots", [0, 50])
    @pytest.mark.parametrize("layers", [(), (None,), (11,), (None, 9)], ids=str)
    def test_after_a_reset(self, layers, file_slots):
        caches = (*pages(*layers), STATE, STATE, StateCache(((33,), (2, 7))))
        engine, transfers = self.make(8 if file_slots else 50, file_slots, caches=caches)
        forget(engine)
        again = engine.add("b", TEXT)
        run(engine, transfers)
        assert engine.tokens("b") == alone(again)
        assert again.num_cached_tokens == 24
        stats = engine.scheduler.make_stats()
        assert (stats.external_prefix_cache_hits, stats.num_failed_loads) == (24, 0)

    def test_a_state_that_was_given_up(self):
        """The prefix cache still has the blocks; the connector has them no more."""
        engine, transfers = self.make()
        connector = engine.scheduler._connector
        for key in list(connector._memory):
            if key[0] == 0:
                connector._forget(key)
        engine.scheduler.kv_cache_manager.states.forget_all()
        again = engine.add("b", TEXT)
        run(engine, transfers)
        assert engine.tokens("b") == alone(again)
        assert again.num_cached_tokens == 24
        assert transfers.num_loaded == 2  # pieces of the state

    def test_blocks_that_were_given_up(self):
        """The prefix cache still has the state; the connector has it no more."""
        engine, transfers = self.make()
        connector = engine.scheduler._connector
        for key in list(connector._memory):
            if key[0] > 0:
                connector._forget(key)
        engine.scheduler.kv_cache_manager.pool.forget_all()
        again = engine.add("b", TEXT)
        run(engine, transfers)
        assert engine.tokens("b") == alone(again)
        assert again.num_cached_tokens == 24
        assert transfers.num_loaded == 3

    def test_the_last_token_is_computed(self):
        engine, transfers = self.make()
        engine.add("b", TEXT[:24])
        run(engine, transfers)
        forget(engine)
        again = engine.add("c", TEXT[:24])
        run(engine, transfers)
        assert again.num_cached_tokens == 16

    def test_a_prompt_that_parts_where_no_state_is(self):
        engine, transfers = self.make()
        forget(engine)
        other = engine.add("b", [*TEXT[:16], *range(20)])
        run(engine, transfers)
        assert other.num_cached_tokens == 0
        assert not transfers.num_loaded

    @pytest.mark.parametrize("damaged", [1, 2, -1, 99])
    def test_damaged_ones_are_computed_and_forgotten(self, damaged):
        engine, transfers = self.make()
        forget(engine)
        request = engine.add("b", TEXT)
        run(engine, transfers, damaged)
        assert engine.tokens("b") == alone(request)
        assert request.num_cached_tokens == 0
        assert engine.scheduler.make_stats().num_failed_loads == 1
        forget(engine)
        third = engine.add("c", TEXT)  # they were saved again
        run(engine, transfers)
        assert third.num_cached_tokens == 24

    def test_a_reset_during_a_load(self):
        engine, transfers = self.make()
        forget(engine)
        request = engine.add("b", TEXT)
        engine.step()
        forget(engine)
        engine.scheduler.update_connector_output(transfers.deliver("b"))
        assert not engine.scheduler.kv_cache_manager.states.known
        engine.run()
        assert engine.tokens("b") == alone(request)
        assert request.num_cached_tokens == 0

    def test_the_same_state_is_loaded_once(self):
        engine, transfers = self.make()
        engine.scheduler.kv_cache_manager.states.forget_all()
        requests = [engine.add(name, TEXT) for name in "bcd"]
        engine.step()
        assert list(transfers.pending) == ["b"]
        run(engine, transfers)
        assert [engine.tokens(name) for name in "bcd"] == [alone(r) for r in requests]
        assert transfers.num_loaded == 2

    def test_a_request_that_needs_all_slots_loads_nothing(self):
        engine, transfers = self.make()
        copies = transfers.slots
        engine, transfers = self.make(num_states=1)
        assert len(copies) == 6
        assert len(transfers.slots) == 4  # no snapshot, so only blocks
        forget(engine)
        again = engine.add("b", TEXT)
        run(engine, transfers)
        assert again.num_cached_tokens == 0

    def test_of_an_answer_only_the_last_one_stays(self):
        engine, transfers = self.make(slots=200)
        request = engine.add("b", [7] * 5, max_tokens=110)
        run(engine, transfers)
        connector, layout = engine.scheduler._connector, engine.scheduler._connector.layout
        assert request.num_tokens == 115
        engine.add("c", [9])  # its step saves what the end of "b" has left
        run(engine, transfers)
        has = [all(map(connector._has, layout.state_keys(h))) for h in request.block_hashes]
        assert [8 * (i + 1) for i, known in enumerate(has) if known] == [64]
        request = engine.add("d", [7] * 5, max_tokens=122, seed=1)
        run(engine, transfers)
        engine.add("e", [9])
        run(engine, transfers)
        has = [all(map(connector._has, layout.state_keys(h))) for h in request.block_hashes]
        assert [8 * (i + 1) for i, known in enumerate(has) if known] == [120 // 64 * 64]

    def test_a_slot_with_another_owner_is_not_saved(self):
        """The end of "a" leaves a state, and the step that would save it gives the slot to "b"."""
        engine, transfers = make_engine(200, caches=(*PAGES, STATE), num_states=2)
        request = engine.add("a", [7] * 10, max_tokens=55)
        while engine.scheduler.requests:
            engine.step()
        engine.schedule()
        engine.update()
        assert [s.num_tokens for s in engine.scheduler.kv_cache_manager.states.known.values()] == [
            64
        ]
        engine.add("b", TEXT)
        run(engine, transfers)
        forget(engine)
        turn = [*request.all_token_ids, 9, 9]
        again = engine.add("c", turn, max_tokens=4)
        run(engine, transfers)
        assert engine.tokens("c") == expected_output(core_params(max_tokens=4), turn, 128)
        assert again.num_cached_tokens < 64

    @pytest.mark.parametrize("depth", [1, 3])
    def test_a_failed_request_leaves_none(self, depth):
        """Its state may contain NaN."""
        engine, transfers = self.make(fail=("b",), depth=depth)
        prompt = TEXT[::-1]
        request = engine.add("b", prompt)
        run(engine, transfers)
        engine.add("c", [9] * 20)
        run(engine, transfers)
        connector = engine.scheduler._connector
        keys = [connector.layout.state_keys(h) for h in request.block_hashes]
        assert connector._has((0, request.block_hashes[2]))
        assert not any(connector._has(key) for of_block in keys for key in of_block)
        assert not connector._dropped

    def test_a_request_that_ends_while_its_state_is_saved(self):
        engine, transfers = make_engine(caches=(*PAGES, STATE), num_states=8, depth=2)
        request = engine.add("b", TEXT, deadline=1.0)
        engine.add("c", [9] * 20)
        engine.schedule()
        connector = engine.scheduler._connector
        (key,) = connector.layout.state_keys(request.block_hashes[2])
        assert key in connector._unsure
        engine.now = 2.0
        engine.schedule()
        assert request.error is not None
        run(engine, transfers)
        assert not connector._has(key)
        assert connector._has((0, request.block_hashes[2]))

    def test_a_step_that_fails_saves_none(self):
        engine, transfers = make_engine(caches=(*PAGES, STATE), num_states=8, depth=2)
        engine.add("a", TEXT)
        engine.schedule()
        engine.schedule()
        work, _ = engine.in_flight.popleft()
        engine.scheduler.fail_step(work, "the step failed")
        engine.executor.forget()
        while engine.in_flight:
            engine.update()
        request = engine.add("b", TEXT)
        run(engine, transfers)
        assert request.num_cached_tokens == 0
        assert engine.tokens("b") == alone(request)

    @pytest.mark.parametrize(("mode", "loaded"), [("swap", True), ("recompute", False)])
    def test_preempted_requests_begin_at_the_last_state(self, mode, loaded):
        engine, transfers = make_engine(
            caches=(*PAGES, STATE),
            num_states=4,
            num_blocks=12,
            preemption_mode=mode,
            max_model_len=80,
        )
        prompts = [[*TEXT[i:], i] for i in range(2)]
        for name, prompt in zip("ab", prompts, strict=True):
            engine.add(name, prompt, max_tokens=40)
        for _ in range(300):
            if not engine.scheduler.requests:
                break
            engine.step()
            # Others take the slots of snapshots.
            engine.scheduler.kv_cache_manager.states.forget_all()
            for name in list(transfers.pending):
                engine.scheduler.update_connector_output(transfers.deliver(name))
        engine.run()
        assert engine.scheduler.make_stats().num_preemptions
        assert bool(transfers.num_loaded) == loaded
        for name, prompt in zip("ab", prompts, strict=True):
            assert engine.tokens(name) == expected_output(core_params(max_tokens=40), prompt, 80)


def test_transfer_params_without_who_takes_them():
    with pytest.raises(RequestError, match="kv_transfer_params: this server has no KV connector"):
        check(FakeEngine())
    with pytest.raises(RequestError, match="OffloadingConnector does not accept them"):
        check(make_engine()[0])


def check(engine):
    request = engine.add("a", PROMPT)
    set_options(request, kv_transfer_params={"do_remote_decode": True})
    check_transfer(request, engine.scheduler._connector)


def test_costs():
    costs = PrefillCosts()
    assert not costs.computing_is_cheaper
    costs.load_began("a", 100, 1.0)
    costs.load_ended("a", 2.0)
    assert not costs.computing_is_cheaper
    costs.step_ended(8, 8, 0.0, 0.001)  # a decode step has no information
    assert not costs.computing_is_cheaper
    costs.step_ended(100, 1, 0.0, 0.5)
    assert costs.computing_is_cheaper
    for _ in range(10):
        costs.step_ended(100, 1, 0.0, 5.0)
    assert not costs.computing_is_cheaper
