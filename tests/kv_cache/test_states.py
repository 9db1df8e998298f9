"""Slots of recurrent states, with a worker that checks each state it reads."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kv_cache.states import Snapshot, StateManager
from tests.fakes import MESSAGE_ENDS, STATE, FakeEngine, expected_output, pages
from tests.params import core_params

END = MESSAGE_ENDS[0]


def make_engine(**options):
    options = {"caches": (*pages(None), STATE), "num_blocks": 400, "num_states": 30} | options
    return FakeEngine(max_model_len=4096, max_num_batched_tokens=512, **options)


def text(count, start=0):
    """Tokens without the end of a message."""
    return [20 + (start + i * i) % 30 for i in range(count)]


def snapshots(engine):
    """Number of tokens of each snapshot."""
    return sorted(s.num_tokens for s in engine.scheduler.kv_cache_manager.states.known.values())


def hit(engine, name, prompt, **options):
    """Run a request; return the number of its cached tokens."""
    request = engine.add(name, prompt, **options)
    engine.run()
    params = core_params(max_tokens=options.get("max_tokens", 8))
    assert engine.tokens(name) == expected_output(params, prompt, 4096)
    return request.num_cached_tokens


class TestHits:
    def test_the_same_prompt(self):
        engine, prompt = make_engine(), text(100)
        assert hit(engine, "a", prompt) == 0
        assert hit(engine, "b", prompt) == 96

    def test_the_last_token_is_never_in_a_state(self):
        engine, prompt = make_engine(), text(96)
        hit(engine, "a", prompt)
        assert hit(engine, "b", prompt) == 88

    def test_the_second_request_with_a_system_prompt(self):
        engine, system = make_engine(), [*text(600), END]
        hit(engine, "a", [*system, *text(300, 7)])
        assert hit(engine, "b", [*system, *text(300, 11)]) == 600

    def test_the_third_request_after_prompts_parted(self):
        """The second one finds known blocks without a state, and leaves a snapshot there."""
        engine, shared = make_engine(), text(333)
        hit(engine, "a", [*shared, *text(30, 7)])
        assert hit(engine, "b", [*shared, *text(30, 11)]) == 0
        assert hit(engine, "c", [*shared, *text(30, 13)]) == 328

    def test_the_next_turn(self):
        engine, prompt = make_engine(), [*text(300), END, *text(80, 1), END]
        hit(engine, "a", prompt, max_tokens=200)
        answer = engine.tokens("a")
        assert len(answer) > 100
        turn = [*prompt, *answer, END, *text(40, 2)]
        known = (len(prompt) + len(answer) - 1) // 64 * 64
        assert hit(engine, "b", turn) == known

    def test_a_next_turn_without_the_last_thoughts(self):
        engine, prompt = make_engine(), [*text(300), END, *text(80, 1), END, *text(5)]
        hit(engine, "a", prompt, max_tokens=100)
        assert hit(engine, "b", [*prompt[:-2], *text(60, 9)]) == 376  # 382 tokens of messages

    def test_a_long_prompt_that_differs_late(self):
        engine, prompt = make_engine(num_blocks=600), text(4000)
        hit(engine, "a", prompt)
        assert hit(engine, "b", [*prompt[:3500], *text(100, 9)]) == (4000 - 1024) // 8 * 8
        assert snapshots(engine)[0] == 4000 - 2048

    def test_without_caching_there_are_none(self):
        engine = make_engine(caching=False)
        hit(engine, "a", text(100))
        assert hit(engine, "b", text(100)) == 0
        assert snapshots(engine) == []

    def test_models_without_attention(self):
        engine, system = make_engine(caches=(STATE,)), [*text(600), END]
        hit(engine, "a", [*system, *text(300, 7)])
        assert hit(engine, "b", [*system, *text(300, 11)]) == 600

    def test_prompts_without_attention_that_part(self):
        """The second one learns from hashes where they part."""
        engine, shared = make_engine(caches=(STATE,)), text(333)
        hit(engine, "a", [*shared, *text(30, 7)])
        assert hit(engine, "b", [*shared, *text(30, 11)]) == 0
        assert 328 in snapshots(engine)
        assert hit(engine, "c", [*shared, *text(30, 13)]) == 328

    @settings(max_examples=10, deadline=None)
    @given(data=st.data())
    def test_models_without_attention_find_what_hybrid_ones_do(self, data):
        engines = [
            make_engine(caches=caches, num_blocks=500, num_states=100)
            for caches in ((*pages(None), STATE), (STATE,))
        ]
        prompts = [text(9)]
        for i in range(8):
            before = data.draw(st.sampled_from(prompts))
            kept = data.draw(st.integers(0, len(before)))
            length = data.draw(st.integers(1, 60))
            prompts.append([*before[:kept], *text(length, 31 * i)])
            found = {hit(engine, f"r{i}", prompts[-1]) for engine in engines}
            assert len(found) == 1

    def test_the_last_blocks_are_forgotten_first(self, monkeypatch):
        monkeypatch.setattr("octavo.kv_cache.states._MOST_REMEMBERED", 30)
        engine, shared = make_engine(caches=(STATE,)), text(333)
        hit(engine, "a", [*shared, *text(30, 7)])
        hit(engine, "b", [*shared, *text(30, 11)])
        assert 240 in snapshots(engine)  # 30 blocks of 8 tokens

    def test_a_missing_state_is_told(self):
        """The blocks are known, and so is a model's without attention."""
        for caches in ((*pages(None), STATE), (STATE,)):
            engine, shared = make_engine(caches=caches), text(333)
            hit(engine, "a", [*shared, *text(30, 7)])
            hit(engine, "b", [*shared, *text(30, 11)])
            output = engine.outputs["b"][0]
            stored = 328 if len(caches) > 1 else 360
            assert (output.num_cached_tokens, output.num_stored_tokens) == (0, stored)

    def test_answers_to_one_prompt_wait_for_its_end(self):
        """The prompt is computed once, in three steps, except for its last tokens."""
        engine, prompt = make_engine(), text(1200)
        leader = engine.add("a", prompt)
        others = [engine.add(f"b{i}", prompt, leader=leader, seed=i) for i in range(3)]
        engine.run()
        assert [request.num_cached_tokens for request in others] == [1192] * 3

    def test_a_lost_block_makes_its_snapshot_useless(self):
        engine, prompt = make_engine(), text(100)
        hit(engine, "a", prompt)
        pool = engine.scheduler.kv_cache_manager.pool
        pool.uncache(next(b for b in pool.blocks if b.block_hash is not None))
        assert hit(engine, "b", prompt) == 0


class TestSlots:
    def test_an_answer_has_one_snapshot(self):
        engine = make_engine()
        hit(engine, "a", text(10), max_tokens=400)
        assert len([n for n in snapshots(engine) if n > 10]) == 1

    def test_live_states_limit_the_requests(self):
        engine = make_engine(num_states=3)
        for i in range(6):
            engine.add(f"r{i}", text(50, i))
        engine.step()
        engine.step()  # the snapshots of the first step make room
        assert len(engine.scheduler.running) == 3
        engine.run()

    def test_drafts_need_slots(self):
        engine = make_engine(num_states=9, num_drafts=3)
        for i in range(6):
            engine.add(f"r{i}", text(50, i), max_tokens=60)
        engine.step()
        assert len(engine.scheduler.running) == 2
        engine.run()

    def test_the_least_valuable_snapshot_is_given_up(self):
        """One of a long prompt outlives those of many short ones."""
        engine = make_engine(num_states=8)
        hit(engine, "long", text(500))
        for i in range(20):
            hit(engine, f"short{i}", text(9, i + 100))
        assert max(snapshots(engine)) == 496
        assert hit(engine, "again", text(500)) == 496

    def test_a_value_fades(self):
        engine = make_engine(num_states=6)
        hit(engine, "long", text(100))
        for i in range(60):
            hit(engine, f"short{i}", text(30, i + 100))
        assert max(snapshots(engine)) == 24
        stats = engine.scheduler.make_stats()
        assert stats.num_snapshots == len(snapshots(engine))
        assert stats.num_snapshot_evictions > 50

    def test_a_failed_request_leaves_none(self):
        """Its state may contain NaN."""
        engine = make_engine(fail=("a",))
        engine.add("a", text(100))
        engine.run()
        assert snapshots(engine) == []

    def test_a_preempted_request_that_fails_leaves_none(self):
        """Those from before the preemption may contain NaN, too."""
        engine = make_engine(fail=("a",))
        request = engine.add("a", [*text(600), END, *text(600)])
        engine.step()
        engine.step()
        engine.scheduler.pause("keep")
        assert 600 in snapshots(engine)
        assert not request.num_output_tokens
        engine.scheduler.resume()
        engine.run()
        assert request.num_preemptions == 1
        assert engine.outputs["a"][-1].error
        assert snapshots(engine) == []

    def test_an_answer_has_one_snapshot_after_a_preemption(self):
        engine = make_engine()
        request = engine.add("a", text(10), max_tokens=400)
        while request.num_output_tokens < 200:
            engine.step()
        engine.scheduler.pause("keep")
        engine.scheduler.resume()
        engine.run()
        assert request.num_preemptions == 1
        assert len([n for n in snapshots(engine) if n > 10]) == 1

    def test_hits_take_no_memory(self):
        engine, prompt = make_engine(), text(100)
        states = engine.scheduler.kv_cache_manager.states
        for i in range(100):
            assert hit(engine, f"a{i}", prompt) == (96 if i else 0)
        assert len(states._heap) <= 2 * states.num_slots

    def test_of_two_of_the_same_value_the_used_one_stays(self):
        engine = make_engine(num_states=3)
        for name in ("a", "b", "a", "c", "a"):
            found = hit(engine, f"{name}{len(engine.outputs)}", text(20, ord(name)), max_tokens=1)
        assert found == 16

    def test_a_failed_request_leaves_those_of_others(self):
        engine, system = make_engine(fail=("b",)), [*text(600), END]
        hit(engine, "a", [*system, *text(300, 7)])
        before = snapshots(engine)
        engine.add("b", [*system, *text(90, 11)])
        engine.run()
        assert snapshots(engine) == before

    def test_a_reset_forgets_all(self):
        engine = make_engine()
        hit(engine, "a", text(100))
        assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
        assert snapshots(engine) == []
        assert hit(engine, "b", text(100)) == 0

    def test_a_reset_forgets_those_that_are_not_yet_known(self):
        """A request that ends leaves a snapshot to the next step."""
        engine = make_engine()
        engine.add("a", text(10), max_tokens=119)
        while engine.scheduler.requests:
            engine.step()
        manager = engine.scheduler.kv_cache_manager
        assert manager.states._becoming
        assert manager.reset_prefix_cache()
        engine.schedule()
        assert snapshots(engine) == []


class TestAttacks:
    @pytest.mark.parametrize("caches", [(*pages(None), STATE), (STATE,)], ids=len)
    def test_other_salts_find_nothing(self, caches):
        """Neither a snapshot, nor the place where prompts part."""
        engine, shared = make_engine(caches=caches), text(333)
        hit(engine, "a", [*shared, *text(30, 7)], salt="a")
        before = snapshots(engine)
        for salt in ("b", None):
            prompt = [*shared, *text(30, 7)]
            assert hit(engine, f"r{salt}", prompt, salt=salt) == 0
            stored = engine.outputs[f"r{salt}"][0].num_stored_tokens
            assert stored == (360 if len(caches) == 1 else 0)  # those of its own prompt
        assert snapshots(engine) == sorted(before * 3)
        assert hit(engine, "own", [*shared, *text(30, 7)], salt="a") == 360

    def test_thousands_of_branches_do_not_displace_what_is_used(self):
        engine, system = make_engine(num_states=8), [*text(600), END]
        hit(engine, "first", system + text(20, 5))
        for i in range(1000):
            hit(engine, f"r{i}", text(9 + i % 40, i), max_tokens=1)
            if i % 50 == 0:
                assert hit(engine, f"used{i}", system + text(20, i)) == 600
        assert engine.scheduler.make_stats().num_snapshot_evictions > 900

    @pytest.mark.parametrize("num_states", [1, 2, 30])
    def test_a_prompt_of_ends_of_messages_has_few_snapshots(self, num_states):
        engine = make_engine(num_states=num_states, num_blocks=600)
        hit(engine, "a", [END] * 4000)
        assert len(snapshots(engine)) <= min(7, num_states)

    @pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 4095])
    @pytest.mark.parametrize("caches", [(*pages(None), STATE), (STATE,)], ids=len)
    def test_lengths(self, length, caches):
        engine, prompt = make_engine(caches=caches, num_blocks=600, num_states=3), text(length)
        assert hit(engine, "a", prompt, max_tokens=1) == 0
        assert hit(engine, "b", prompt, max_tokens=1) == (length - 1) // 8 * 8


def test_loads_leave_slots_for_a_request():
    """A loaded state must not take the last slots: no request could start from it."""
    assert StateManager(4, 4, 8, enable_caching=True).reserve() is None
    states = StateManager(5, 4, 8, enable_caching=True)
    slot = states.reserve()
    assert slot is not None
    states.check_integrity([])
    states.finish_load(slot, Snapshot(slot, b"h", 8, 8))
    assert states.has_room(states.known[b"h"])
    states.check_integrity([])


def test_the_check_finds_a_lost_slot():
    states = make_engine().scheduler.kv_cache_manager.states
    states.check_integrity([])
    states._free.pop()
    with pytest.raises(AssertionError, match="lost or used twice"):
        states.check_integrity([])
    with pytest.raises(AssertionError, match="held wrongly"):
        states.check_integrity(["a"])
