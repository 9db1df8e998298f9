"""Routing of requests to engines, and its effect on hits and load, in simulation."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.datasets import BenchRequest
from octavo.config import EngineConfig
from octavo.fleet import routing
from octavo.fleet.routing import PrefixMap, Router, load_of, score
from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups
from octavo.messages import AdapterRef, CoreSamplingParams, PromptEmbeds
from octavo.models.cache import AttentionCache
from octavo.simulation.simulation import SimulatedEngine, simulate
from octavo.simulation.step_times import StepTimes
from tests.params import core_request

loads = st.integers(0, 1000)


def request(name, tokens=(), **fields):
    return core_request(name, list(tokens), CoreSamplingParams(), **fields)


def router(count=3, caching=True):
    return Router(4, count, enable_prefix_caching=caching)


def place(where, name, tokens=(), **fields):
    return where.place(request(name, tokens, **fields), range(3))


@given(loads, loads, st.integers(1, 500))
def test_a_busier_engine_is_worth_its_prefix_only_up_to_a_bound(least, more, blocks):
    holder = score(least + more, least, blocks, blocks)
    assert (holder < score(least, least, 0, blocks)) == (more < max(16, least / 2))
    assert score(least + more, least, 0, blocks) == score(least + more, least, 0, 0) == least + more


@given(loads, loads, st.integers(1, 100), st.data())
def test_more_cached_is_never_worse_and_more_load_never_better(least, more, blocks, data):
    few = data.draw(st.integers(0, blocks))
    many = data.draw(st.integers(few, blocks))
    assert score(least + more, least, many, blocks) <= score(least + more, least, few, blocks)
    assert score(least, least, few, blocks) <= score(least + more, least, few, blocks)


def test_a_request_that_waits_is_worth_four_that_run():
    assert load_of(2, 3) == 11


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 6)), max_size=40))
def test_the_map_remembers_the_last_blocks_of_each_engine(adds):
    prefixes, last = PrefixMap(8), {}
    for engine, chain, length in adds:
        hashes = [bytes([chain, i]) for i in range(length)]
        prefixes.add(engine, hashes)
        last[engine] = hashes
        assert prefixes.num_cached(engine, hashes) == length
        assert prefixes.num_cached(3, hashes) == 0
        assert all(len(blocks) <= 8 for blocks in prefixes._blocks.values())
    for engine, hashes in last.items():
        assert prefixes.num_cached(engine, [*hashes, b"another"]) == len(hashes)
        prefixes.forget(engine)
        assert prefixes.num_cached(engine, hashes) == 0


def test_the_holder_of_a_prefix_that_was_too_busy_is_known():
    where = router()
    prompt = list(range(43))
    assert place(where, "a", prompt) == 0
    assert place(where, "b", prompt) == 0  # its prefix is there
    assert where.holder_of("a") is where.holder_of("b") is None
    for i in range(2):
        assert place(where, f"more {i}", prompt) == 0
    assert place(where, "c", prompt) == 1
    assert where.holder_of("c") == (0, 40)
    assert place(where, "other", [7] * 40) == 2
    assert where.holder_of("other") is None
    # Engine 1 has it now, too; a part is enough to be the holder.
    assert place(where, "d", prompt) == 1
    assert where.holder_of("d") is None
    where.remove(["c"])
    assert where.holder_of("c") is None


def test_the_end_of_a_prompt_is_forgotten_first():
    prefixes = PrefixMap(4)
    prefixes.add(0, [b"a", b"b", b"c"])
    prefixes.add(0, [b"x", b"y"])
    assert prefixes.num_cached(0, [b"a", b"b", b"c"]) == 2


def test_equal_engines_take_turns():
    where = router(caching=False)
    assert [place(where, str(i)) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_the_least_busy_engine_is_taken():
    where = router()
    assert [place(where, name) for name in "abc"] == [0, 1, 2]
    where.note_token("b")
    where.note_token("b")
    where.note_token("unknown")
    assert [where.load(engine) for engine in range(3)] == [4, 1, 4]
    assert [place(where, name) for name in "def"] == [1, 2, 0]
    where.remove(["c", "f", "b", "b", "unknown"])
    assert [where.load(engine) for engine in range(3)] == [4, 4, 4]
    assert where.engine_of("e") == 2
    assert where.engine_of("b") is None
    assert where.place(request("g"), {1}) == 1


def test_a_request_with_n_answers_counts_n_times_and_stays_together():
    where = router()
    assert place(where, "a", n=5) == 0
    assert where.load(0) == 20
    assert {where.engine_of(f"{i}_a") for i in range(5)} == {0}
    where.remove(["3_a"])
    assert where.load(0) == 16


def test_a_request_that_moves_leaves_its_old_place():
    where = router()
    place(where, "a")
    assert where.place(request("a"), {2}) == 2
    assert (where.engine_of("a"), where.load(0), where.load(2)) == (2, 0, 4)


def test_a_prefix_is_found_again():
    where = router()
    prompt = list(range(40))
    assert place(where, "a", prompt) == 0
    assert place(where, "b", [*prompt, 7, 7, 7, 7]) == 0
    assert place(where, "c", [1, *prompt]) == 1
    assert place(where, "d", prompt, cache_salt="s") == 2
    for name in "abcd":
        where.note_token(name)
    embeds = PromptEmbeds(b"", "float32", 1)
    assert place(where, "e", prompt, prompt_embeds=embeds) != 0  # the least busy engine
    where.remove("e")
    assert place(where, "f", prompt) == 0
    where.forget_prefixes(0)
    assert place(where, "g", prompt) != 0


def test_an_adapter_that_begins_late_finds_the_prefix_of_the_model():
    where, prompt = router(), list(range(40))
    adapter = AdapterRef("name", "/x", "content")
    assert place(where, "a", prompt) == 0
    assert place(where, "b", prompt, adapter=adapter) == 1
    assert place(where, "c", prompt, adapter=adapter, adapter_begin=36) == 0
    assert where.holder_of("c") is None


def test_an_engine_that_has_the_adapter_gets_its_requests_up_to_a_bound():
    where = Router(4, 3, enable_prefix_caching=False, num_adapters=2)
    one, two, three = (AdapterRef(name, "/x", name) for name in "abc")
    assert place(where, "0", adapter=one) == 0
    where.note_token("0")
    assert place(where, "1") == 1
    assert [place(where, f"a{i}", adapter=one) for i in range(3)] == [0, 0, 2]
    where.remove(["0", "1", "a0", "a1", "a2"])
    assert [place(where, name, adapter=it) for name, it in (("b", two), ("c", three))] == [0, 1]
    where.remove(["b", "c"])
    assert place(where, "d", adapter=two) == 0
    where.forget_prefixes(0)
    where.remove(["d"])
    assert place(where, "e", adapter=two) == 1


def test_without_prefix_caching_the_load_alone_decides():
    where = router(caching=False)
    assert [place(where, str(i), range(40)) for i in range(3)] == [0, 1, 2]


def test_of_a_very_long_prompt_the_beginning_is_looked_at(monkeypatch):
    monkeypatch.setattr(routing, "_MOST_HASHED", 3)
    hashed = []
    monkeypatch.setattr(routing, "hash_block", lambda _, tokens, keys: hashed.append(tokens) or b"")
    place(router(), "a", range(100))
    assert hashed == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def step_times(**seconds):
    return StepTimes(
        model="m", cpu="c", num_blocks=400, max_model_len=4096, seconds=seconds, error=0.0
    )


class RoundRobin(Router):
    """Router that prefix routing is compared with."""

    def place(self, request, engines):
        return super().place(request, [(self._last + 1) % len(engines)])


@pytest.fixture(scope="module")
def conversations():
    """Return the turns of many conversations, mixed: each begins with the earlier turns."""
    rng = random.Random(0)
    requests, arrivals = [], []
    for talk in range(60):
        at, said = rng.uniform(0, 60), []
        for _ in range(rng.randint(1, 8)):
            said = said + [talk * 100 + rng.randrange(100) for _ in range(rng.randint(64, 256))]
            requests.append(BenchRequest(said, None, rng.randint(10, 40)))
            arrivals.append(at)
            at += rng.uniform(2, 6)
    return requests, arrivals


def test_conversations_go_where_they_were(conversations):
    """Four simulated engines: 1.5 times the hits of round robin, and as even a load."""
    config = EngineConfig.from_kwargs(data_parallel_size=4, max_num_seqs=16)
    kv_cache = KVCacheConfig(400, 16, make_kv_cache_groups([AttentionCache(1, 8)]))
    engine = SimulatedEngine(
        config,
        kv_cache,
        4096,
        512,
        step_times(
            step=0.01, **{f"tokens_from_{k}": 1 / 4000 for k in [0, *(2**n for n in range(14))]}
        ),
    )

    def measure(kind):
        seen, where = [], kind(16, 4, enable_prefix_caching=True)
        plain = where.place

        def place(request, engines):
            seen.append([where.load(engine) for engine in engines])
            return plain(request, engines)

        where.place = place
        run = simulate(engine, *conversations, router=where)
        assert all(len(r.token_times) == r.num_output_tokens > 0 for r in run.records)
        assert [where.load(i) for i in range(4)] == [0] * 4
        ordered = sorted(load for loads in seen for load in loads)
        return run.stats.prefix_cache_hits, ordered[len(ordered) * 99 // 100]

    (hits, load), (hits_before, load_before) = measure(Router), measure(RoundRobin)
    assert hits >= 1.5 * hits_before > 0
    assert load <= 1.2 * load_before


def test_the_time_of_one_engine_is_what_it_was(conversations):
    """A simulation with one engine does not depend on the router."""
    requests, arrivals = conversations
    config = msgspec.structs.replace(EngineConfig())
    kv_cache = KVCacheConfig(400, 16, make_kv_cache_groups([AttentionCache(1, 8)]))
    engine = SimulatedEngine(config, kv_cache, 4096, 512, step_times(step=0.01))
    runs = [
        simulate(engine, requests[:40], arrivals[:40], router=kind(16, 1, enable_prefix_caching=on))
        for kind, on in ((Router, True), (RoundRobin, False))
    ]
    assert runs[0].records == runs[1].records
