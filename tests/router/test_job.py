"""Fields of a request that the router reads, and those that it adds."""

import json

import pytest

from octavo.errors import RequestError
from octavo.router.job import read_job, with_fields

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = "a" * 1000


def job(body, path=COMPLETIONS, api_key=None, headers=()):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_job("POST", path, "", list(headers), data, api_key)


def sent(made):
    return json.loads(made.body)


def test_a_seed_is_added_so_that_another_server_answers_alike():
    assert 0 <= sent(job({"prompt": "a"}))["seed"] < 2**48
    assert sent(job({"prompt": "a", "seed": 5}))["seed"] == 5
    assert "seed" in sent(job({"prompt": [1, 2]}))
    assert "seed" in sent(job({"prompt": ["a"], "prompt_embeds": []}))
    for several in (
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"prompt_embeds": ["a", "b"]},
        {"prompt_embeds": "a", "prompt": "b"},
    ):
        assert "seed" not in sent(job(several)), "answers would be tied together"


def test_a_beam_search_gets_no_seed():
    assert "seed" not in sent(job({"prompt": "a", "use_beam_search": True}))
    assert "seed" in sent(job({"prompt": "a", "use_beam_search": False}))


def test_all_else_stays_as_it_was_written():
    text = b' {"prompt":"\\u00e4", "temperature": 1.00000000000000000001,"x":1e400 } '
    assert with_fields(text, {"seed": 1}) == (
        b' {"prompt":"\\u00e4", "temperature": 1.00000000000000000001,"x":1e400,"seed":1}'
    )
    assert with_fields(b"{ }", {"seed": 1}) == b'{"seed":1}'
    assert with_fields(b'{"a":{}}', {"seed": 1}) == b'{"a":{},"seed":1}'
    assert with_fields(text, {}) == text


def test_many_texts_weigh_more():
    texts = {"input": [LONG] * 100}
    for path in ("/v1/embeddings", "/pooling", "/api/embed"):
        made = job(texts, path)
        assert (made.weight, made.generates) == (1 + len(made.body) // 8192, False)
        assert made.weight > 10
    assert job(texts, "/tokenize").weight == 1


def test_other_paths_and_methods_are_not_looked_at():
    made = job(b"no json", "/v1/embeddings")
    assert (made.body, made.generates, made.splits) == (b"no json", False, False)
    made = read_job("GET", COMPLETIONS, "a=1", [], b"", None)
    assert (made.path, made.generates) == (f"{COMPLETIONS}?a=1", False)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"a"', b"\xff"])
def test_a_body_that_is_no_object(body):
    with pytest.raises(RequestError):
        job(body)


def test_where_tokens_are_cached_is_not_the_clients_to_say():
    with pytest.raises(RequestError, match="kv_transfer_params") as error:
        job({"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}})
    assert error.value.param == "kv_transfer_params"
    assert job({"prompt": "a", "kv_transfer_params": None}).splits


def test_each_key_is_a_scope_of_cached_prefixes():
    salts = {
        sent(job({"prompt": LONG, "cache_salt": salt}, api_key=key)).get("cache_salt")
        for key in ("one", "two")
        for salt in (None, "s")
    }
    assert len(salts) == 4
    assert "one" not in str(salts)
    assert "cache_salt" not in sent(job({"prompt": LONG}))


def test_pieces_tell_how_far_prompts_agree():
    def common(a, b):
        pairs = zip(a.pieces, b.pieces, strict=False)
        return sum(x == y for x, y in pairs)

    base = job({"prompt": LONG})
    assert len(base.pieces) == 7
    assert common(base, job({"prompt": LONG[:500] + "b" * 500})) == 3
    assert common(base, job({"prompt": LONG, "model": "other"})) == 0
    assert common(base, job({"prompt": LONG}, api_key="k")) == 0
    assert common(base, job({"prompt": LONG}, headers=[("authorization", "Bearer x")])) == 0
    messages = [{"role": "user", "content": LONG}]
    answered = [*messages, {"role": "assistant", "content": LONG}]
    first, second = (job({"messages": m}, CHAT) for m in (messages, answered))
    assert common(first, second) == len(first.pieces)
    assert not job({"prompt": None}).pieces
    embeds = [job({"prompt_embeds": LONG, "prompt": ""}) for _ in range(2)]
    assert common(*embeds) == len(embeds[0].pieces) > 0


def test_long_prompts_weigh_more():
    assert [job({"prompt": "a" * n}).weight for n in (1, 10_000, 100_000)] == [1, 2, 13]


@pytest.mark.parametrize(
    "extra",
    [
        {"prompt": ["a", "b"]},
        {"echo": True},
        {"prompt_logprobs": 1},
        {"n": 2},
        {"use_beam_search": True},
    ],
)
def test_what_needs_the_whole_prompt_is_not_split(extra):
    assert not job({"prompt": "a"} | extra).splits


def test_a_prefill_server_is_asked_for_one_token():
    made = job(
        {
            "prompt": "a",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 9,
            "max_completion_tokens": 9,
            "min_tokens": 5,
            "n": 1,
        }
    )
    asked = json.loads(made.prefill_body())
    assert (asked["max_tokens"], asked["max_completion_tokens"]) == (1, 1)
    assert (asked["stream"], asked["stream_options"], asked["min_tokens"]) == (False, None, 0)
    assert (asked["n"], asked["seed"]) == (1, sent(made)["seed"])
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    decoding = json.loads(made.decode_body({"x": 1}))
    assert (decoding["kv_transfer_params"], decoding["n"], decoding["stream"]) == (
        {"x": 1},
        1,
        True,
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/responses", {"input": LONG}),
        ("/api/chat", {"messages": [{"role": "user", "content": LONG}]}),
        ("/api/generate", {"prompt": LONG}),
    ],
)
def test_answers_that_no_other_server_continues(path, body):
    """They have no seed, but a place by their prompt, and a scope of cached prefixes by key."""
    made = job(body, path)
    assert sent(made) == body
    assert not made.generates
    assert len(made.pieces) >= 7
    other = job(body, path, api_key="k")
    assert sent(other) == body | {"cache_salt": sent(other)["cache_salt"]}
    assert set(other.pieces).isdisjoint(made.pieces)
    assert set(job(body, path, headers=[("x-api-key", "k")]).pieces).isdisjoint(made.pieces)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"messages": []}),
        ("/v1/chat/completions/render", {"messages": []}),
        ("/v1/messages/count_tokens", {"messages": []}),
        ("/v1/responses/input_tokens", {"input": "a"}),
    ],
)
def test_prompts_that_are_not_answered(path, body):
    """They have a scope by key, since servers keep their media, but no place by their prompt."""
    assert sent(job(body, path)) == body
    made = job(body, path, api_key="k")
    assert sent(made) == body | {"cache_salt": sent(made)["cache_salt"]}
    assert (made.generates, made.pieces) == (False, [])


@pytest.mark.parametrize("store", [None, True, False])
def test_responses_that_are_stored(store):
    assert job({"input": "a", "store": store}, "/v1/responses").creates == (store is not False)
    assert not job({"input": "a"}, "/v1/responses/input_tokens").creates
