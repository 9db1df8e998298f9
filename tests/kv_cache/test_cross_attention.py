"""Blocks of cross attention: allocated once, shared by equal inputs, never overwritten in use."""

import random

import pytest

from octavo.config import SchedulerConfig
from octavo.errors import ContextLengthError, RequestError
from octavo.frontend.encoder_prompt import text_feature
from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups, max_blocks_per_request
from octavo.kv_cache.hashing import input_keys, make_block_hasher
from octavo.kv_cache.kinds.cross_attention import row_hashes
from octavo.kv_cache.manager import KVCacheManager
from octavo.messages import ModelRunnerOutput
from octavo.models.cache import AttentionCache, CrossCache
from octavo.request import Request
from octavo.scheduler.scheduler import Scheduler
from tests.params import core_params, core_request

BLOCK = 4
SELF, CROSS = AttentionCache(1, 8), CrossCache(1, 8)
HASHER = make_block_hasher(BLOCK, input_keys)


def make_config(num_blocks=20, layers=2):
    return KVCacheConfig(num_blocks, BLOCK, make_kv_cache_groups([SELF, CROSS] * layers))


def make_request(request_id, encoder, decoder=(0,), *, hashed=True, scope=None, **params):
    core = core_request(request_id, list(decoder), core_params(**{"max_tokens": 8} | params))
    core.mm_features = [text_feature(list(encoder), None)]
    return Request(core, HASHER if hashed else None, cache_scope=scope)


def admit(manager, request):
    hit, start = manager.get_computed_blocks(request)
    if manager.allocate_slots(request, request.num_tokens - start, hit) is None:
        return None
    request.num_computed_tokens = request.num_tokens
    manager.take_blocks_to_copy()
    return start


def test_groups_of_cross_attention_are_the_last():
    groups = make_kv_cache_groups([CROSS, SELF, CROSS, SELF, CROSS, SELF])
    assert [group.is_cross for group in groups] == [False, True]
    # 10 tokens of the decoder and 9 rows of the encoder.
    assert max_blocks_per_request(groups, BLOCK, 10, 64, 9) == 3 + 3


def test_requests_with_the_same_input_share_its_blocks():
    manager = KVCacheManager(make_config(), enable_caching=True)
    first, second = make_request("a", range(9)), make_request("b", range(9), (0, 1))
    other = make_request("c", range(1, 10))
    assert admit(manager, first) == 0
    assert [len(ids) for ids in manager.get_block_ids(first)] == [1, 3]
    assert manager.cross.is_new(first)
    assert manager.cross.num_encoder_tokens(second) == 0
    assert admit(manager, second) == 0
    assert not manager.cross.is_new(second)
    assert manager.get_block_ids(second)[1] == manager.get_block_ids(first)[1]
    assert admit(manager, other) == 0
    assert manager.cross.is_new(other)
    assert not set(manager.get_block_ids(other)[1]) & set(manager.get_block_ids(first)[1])
    manager.check_integrity([first, second, other])
    for request in (first, second, other):
        manager.free(request)
    manager.check_integrity([])
    assert manager.num_used_blocks == 0
    again = make_request("d", range(9))
    assert manager.cross.num_encoder_tokens(again) == 0  # the blocks are still known
    manager.forget_prefixes()
    assert manager.cross.num_encoder_tokens(again) == 9


def test_requests_of_other_scopes_share_no_blocks():
    manager = KVCacheManager(make_config(40), enable_caching=True)
    requests = [make_request(name, range(9), scope=name) for name in "ab"]
    requests.append(make_request("c", range(9)))
    for request in requests:
        admit(manager, request)
        assert manager.cross.is_new(request)
    manager.check_integrity(requests)


def test_prefixes_of_the_decoder_depend_on_the_encoder():
    same = [make_request(name, range(9), range(8)).block_hashes for name in "ab"]
    assert same[0] == same[1]
    assert make_request("c", range(10), range(8)).block_hashes[-1] != same[0][-1]


def test_without_caching_each_request_has_its_own():
    manager = KVCacheManager(make_config(), enable_caching=False)
    requests = [make_request(name, range(5), hashed=False) for name in "ab"]
    for request in requests:
        admit(manager, request)
        assert manager.cross.is_new(request)
    manager.check_integrity(requests)


def test_a_request_starts_only_if_all_rows_fit():
    manager = KVCacheManager(make_config(num_blocks=5), enable_caching=True)
    assert admit(manager, make_request("a", range(16))) is None  # 4 + 1 blocks, and 4 are free
    manager.check_integrity([])
    fits = make_request("b", range(12))
    assert admit(manager, fits) == 0
    manager.check_integrity([fits])


@pytest.mark.parametrize("seed", range(8))
def test_any_life_of_requests(seed):
    """A request that does not compute its rows finds them in its blocks."""
    rng, manager = random.Random(seed), KVCacheManager(make_config(24), enable_caching=True)
    live, contents, loads = [], {}, {}
    for step in range(300):
        if rng.random() < 0.2:  # a connector loads what is missing, or a part of it
            request = make_request(f"l{step}", [item := rng.randrange(5)] * (4 * item + 3))
            hit, _ = manager.get_computed_blocks(request)
            missing = manager.missing_rows(request)
            if missing and not any(manager.is_loading(name, missing[:1]) for name in loads):
                ids = manager.start_load(request, hit, 0)
                if ids is not None:
                    assert [bool(i) for i in ids[1]] == [
                        block_hash in missing for block_hash in row_hashes(request, BLOCK)
                    ]
                    loads[request.request_id] = request, ids[1]
        elif loads and rng.random() < 0.3:
            request, ids = loads.pop(rng.choice(list(loads)))
            own = request.mm_features[0].identifier
            bad = {i for i in ids if rng.random() < 0.2}
            assert manager.finish_load(request.request_id, bad) == (not bad & {*ids} - {0})
            contents.update((block, (own, i)) for i, block in enumerate(ids) if block not in bad)
        elif rng.random() < 0.5:
            item, length = rng.randrange(5), rng.randrange(1, 6)
            request = make_request(f"r{step}", [item] * (4 * item + 3), range(length))
            if admit(manager, request) is not None:
                own, ids = request.mm_features[0].identifier, manager.get_block_ids(request)
                for block in ids[0]:
                    contents[block] = None
                expected = {block: (own, i) for i, block in enumerate(ids[1])}
                if manager.cross.is_new(request):
                    contents.update(expected)
                assert {block: contents[block] for block in ids[1]} == expected
                live.append(request)
        elif live:
            request = live[rng.randrange(len(live))]
            if rng.random() < 0.5:
                live.remove(request)
                manager.free(request)
            else:
                request.append_output_token_ids([1])
                new = manager.allocate_slots(request, 1)
                if new is None:
                    live.remove(request)
                    manager.free(request)
                else:
                    request.num_computed_tokens += 1
                    for block in new[0] if new else ():
                        contents[block] = None
                manager.take_blocks_to_copy()
        manager.check_integrity(live)
        for request in live:
            own = request.mm_features[0].identifier
            ids = manager.get_block_ids(request)[1]
            assert [contents[block] for block in ids] == [(own, i) for i in range(len(ids))]


def make_scheduler(budget=16, num_blocks=60, **config):
    settings = SchedulerConfig(max_num_seqs=8, **config)
    caches = make_config(num_blocks)
    return Scheduler(settings, caches, max_model_len=32, max_num_batched_tokens=budget)


def test_an_encoders_tokens_are_a_part_of_the_steps_budget():
    scheduler = make_scheduler()
    for i, count in enumerate((9, 4, 3)):
        scheduler.add_request(make_request(str(i), [i] * count))
    scheduler.add_request(make_request("equal", [0] * 9))
    step = scheduler.schedule()
    assert [r.req_id for r in step.scheduled_reqs] == ["0", "1"]  # 9 + 1 + 4 + 1
    assert step.scheduled_encoder_inputs == {"0": [0], "1": [0]}
    assert step.total_num_scheduled_tokens == 15
    step = scheduler.schedule()
    assert [r.req_id for r in step.scheduled_reqs] == ["0", "1", "2", "equal"]
    assert step.scheduled_encoder_inputs == {"2": [0]}
    (item,) = step.scheduled_reqs[3].new.mm_features
    assert item.data == {}  # nothing is computed, so nothing is sent
    assert item.num_rows == 9
    scheduler.check_integrity()


@pytest.mark.parametrize("seed", range(4))
def test_large_inputs_wait_for_no_request_to_end(seed):
    """Each request starts in the order of arrival, soon, while others generate."""
    rng, budget = random.Random(seed), 16
    scheduler = make_scheduler(budget, num_blocks=200)
    sizes = [rng.choice([1, 3, 14, 15]) for _ in range(7)]
    for i, size in enumerate(sizes):
        tokens = [1] * rng.choice([1, 1, 5])
        scheduler.add_request(make_request(str(i), [i] * size, tokens, max_tokens=20))
    started = []
    for _ in range(12):
        step = scheduler.schedule()
        new = [r.req_id for r in step.scheduled_reqs if r.new is not None]
        encoded = sum(sizes[int(name)] for name in new)
        tokens = sum(r.num_tokens for r in step.scheduled_reqs)
        assert encoded <= budget
        assert tokens <= budget
        # An input that exceeds the budget is alone, beside requests that generate.
        assert encoded + tokens <= budget or (len(new) == 1 and tokens < 8 + budget - encoded)
        started += new
        names = [r.req_id for r in step.scheduled_reqs]
        sampled = [[3] * (scheduler.requests[name].num_output_placeholders > 0) for name in names]
        scheduler.update_from_output(step, ModelRunnerOutput(names, sampled))
        scheduler.check_integrity()
    assert started == [str(i) for i in range(7)]
    assert len(scheduler.running) == 7


def test_inputs_that_never_fit_are_refused():
    scheduler = make_scheduler()
    with pytest.raises(ContextLengthError, match="max_num_batched_tokens to 17"):
        scheduler.add_request(make_request("a", range(16)))
    empty = make_request("b", range(3))
    empty.mm_features = []
    with pytest.raises(RequestError, match="encoder's prompt is empty"):
        scheduler.add_request(empty)
    few = Scheduler(SchedulerConfig(), make_config(4), max_model_len=32, max_num_batched_tokens=99)
    with pytest.raises(ContextLengthError, match="and 20 of the encoder"):
        few.add_request(make_request("c", range(20)))
