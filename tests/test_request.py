"""Request record of the core, and the fan-out of n > 1."""

import weakref

import msgspec

from octavo.kv_cache.hashing import make_block_hasher
from octavo.messages import CoreSamplingParams, EngineCoreRequest, GuardSpec, RequestOptions
from octavo.request import fan_out
from tests.params import core_params, core_request

PROMPT = list(range(20))
HASHER = make_block_hasher(8)
LONG = core_params(
    5000,
    seed=5,
    prompt_logprobs=2,
    stop_token_ids=[3, 9],
    allowed_token_ids=list(range(5000)),
    logit_bias=dict.fromkeys(range(500), 1.0),
    bad_words_token_ids=[[1, 2], [3]],
)


def make(n, request_id="r", params=LONG, caching=True, **fields):
    request = core_request(request_id, PROMPT, params, 1.5, n=n, **fields)
    return list(fan_out(request, HASHER, enable_prefix_caching=caching))


def test_one():
    [request] = make(1, cache_salt="k", deadline=9.0)
    assert request.request_id == "r"
    assert request.options == RequestOptions(1.5, deadline=9.0, cache_salt="k")
    assert request.sampling_params is LONG
    assert len(request.block_hashes) == 2
    [alone] = make(1, caching=False)
    assert alone.block_hashes == []


def test_a_request_has_no_dict_but_can_be_referred_to_weakly():
    # With this many attributes a dict makes every look-up slower; grammars keep weak references.
    [request] = make(1)
    assert not hasattr(request, "__dict__")
    assert weakref.ref(request)() is request


def test_several():
    children = make(3, cache_salt="k")
    assert [c.request_id for c in children] == ["0_r", "1_r", "2_r"]
    assert [c.sampling_params.seed for c in children] == [5, 6, 7]
    assert [c.options.turn for c in children] == [0, 1, 2]
    assert [c.options.turn for c in make(2, turn=8)] == [8, 9]
    assert [c.sampling_params.prompt_logprobs for c in children] == [2, None, None]
    assert {(c.options.cache_salt, c.cache_scope) for c in children} == {("k", None)}
    assert all(c.block_hashes == make(1, cache_salt="k")[0].block_hashes for c in children)
    # Tokens that one of them generates are not shared.
    children[0].append_output_token_ids([7] * 8)
    assert [len(c.block_hashes) for c in children] == [3, 2, 2]
    assert [c.num_tokens for c in children] == [28, 20, 20]


def test_siblings_share_what_is_long():
    packed = msgspec.msgpack.encode(core_request("r", PROMPT, LONG, n=64))
    assert len(packed) < 6000
    request = msgspec.msgpack.decode(packed, type=EngineCoreRequest)
    assert request.sampling_params == LONG
    children = list(fan_out(request, HASHER))
    for name in ("allowed_token_ids", "logit_bias", "bad_words", "all_stop_token_ids"):
        assert len({id(getattr(c.sampling_params, name)) for c in children}) == 1, name


def test_seeds_go_round():
    children = make(2, params=CoreSamplingParams(seed=2**64 - 1))
    assert [c.sampling_params.seed for c in children] == [2**64 - 1, 0]


def test_siblings_share_blocks_without_prefix_caching():
    hashes = [[c.block_hashes for c in make(2, i, caching=False)] for i in ("a", "b")]
    assert hashes[0][0] == hashes[0][1] != hashes[1][0]
    # No salt leads to the same hash, and the requests' salts still count.
    assert make(1, cache_salt="a")[0].block_hashes != hashes[0][0]
    salted = make(2, "a", caching=False, cache_salt="k")
    assert {(c.options.cache_salt, c.cache_scope) for c in salted} == {("k", "a")}
    assert salted[0].block_hashes == salted[1].block_hashes != hashes[0][0]


def test_one_that_has_output_already():
    params = core_params(max_tokens=9)
    request = make(1, params=params, output_token_ids=[7, 8, 9, 7], num_prompt_logprobs=5)[0]
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (24, 20, 4)
    assert request.all_token_ids[-4:] == [7, 8, 9, 7]
    assert len(request.block_hashes) == 3
    assert request.num_prompt_logprobs == 5


def test_answers_that_go_on_share_what_new_ones_do():
    params = core_params(max_tokens=50)
    tokens = {1: [7] * 9, 3: []}
    request = core_request("r", PROMPT, params, 1.5, n=4, answers=tokens, tenant="a")
    packed = msgspec.msgpack.encode(request)
    request = msgspec.msgpack.decode(packed, type=EngineCoreRequest)
    assert request.child_ids == ["1_r", "3_r"]
    for caching in (True, False):
        new = list(fan_out(core_request("r", PROMPT, params, 1.5, n=4), HASHER))
        scope = None if caching else "r"
        resumed, fresh = fan_out(request, HASHER, enable_prefix_caching=caching)
        assert [resumed.request_id, fresh.request_id] == request.child_ids
        assert [resumed.sampling_params.seed, fresh.sampling_params.seed] == [
            new[1].sampling_params.seed,
            new[3].sampling_params.seed,
        ]
        assert (resumed.num_output_tokens, fresh.num_output_tokens) == (9, 0)
        assert (resumed.num_charged, fresh.num_charged) == (20, 0)
        assert fresh.leader is resumed
        assert [len(r.block_hashes) for r in (resumed, fresh)] == [3, 2]
        assert resumed.block_hashes[:2] == fresh.block_hashes
        assert resumed.cache_scope == fresh.cache_scope == scope


def test_the_guard_of_an_answer_that_goes_on():
    """It knows the earlier tokens of each answer."""
    params = msgspec.structs.replace(LONG, guard=GuardSpec((1,), (2,), thinks=True, budget=3))
    assert [request.guard.forced for request in make(2, params=params)] == [None, None]
    [one] = make(1, params=params, output_token_ids=[5, 6, 7])
    assert one.guard.forced == 2
    answers = {0: [5, 6], 3: [5, 6, 7]}
    assert [r.guard.forced for r in make(4, params=params, answers=answers)] == [None, 2]
    assert make(1)[0].guard is None
