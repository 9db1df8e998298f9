"""Fields that the API does not have: rejected if other servers have them, otherwise reported."""

import json

import pytest

from octavo.compat import request_fields as known_fields
from octavo.server.body import MAX_UNKNOWN_FIELDS, Body, unknown_fields
from octavo.server.chat_messages import Message
from octavo.server.pooling_schema import (
    ClassifyBody,
    EmbeddingsBody,
    PooledBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from octavo.server.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.server import pooled
from tests.server.fake_engine import Call, FakeAsyncLLM, events, with_server

HEADER = "X-Octavo-Ignored-Fields"
USER = {"role": "user", "content": "hi"}
BODIES = {
    "/v1/completions": (CompletionBody, {"prompt": "hi", "max_tokens": 2}),
    "/v1/chat/completions": (ChatBody, {"messages": [USER], "max_tokens": 2}),
    "/tokenize": (TokenizeBody, {"prompt": "hi"}),
    "/detokenize": (DetokenizeBody, {"tokens": [5]}),
    "/v1/embeddings": (EmbeddingsBody, {"input": "hi"}),
    "/pooling": (PoolingBody, {"input": "hi"}),
    "/classify": (ClassifyBody, {"input": "hi"}),
    "/score": (ScoreBody, {"text_1": "hi", "text_2": "ho"}),
    "/rerank": (RerankBody, {"query": "hi", "documents": ["ho"]}),
}


def engine_of(model):
    """Return the maker of an engine that answers a kind of body."""
    poolers = [pooled.EMBED, pooled.CLASSES] if issubclass(model, PooledBody) else []
    return lambda: FakeAsyncLLM(poolers=poolers)


@pytest.mark.parametrize("path", BODIES)
def test_what_is_known_but_cannot_be_done_is_refused_and_what_asks_for_nothing_passes(path):
    model, good = BODIES[path]

    async def scenario(served):
        for name, harmless in model.unsupported.items():
            for value in harmless:
                response = await served.post(path, **good, **{name: value})
                assert response.status_code == 200, (name, value, response.text)
                assert HEADER not in response.headers
            asked = [["x"], {"type": "x"}, "x" * 3, 7]
            for value in [v for v in asked if v not in harmless]:
                response = await served.post(path, **good, **{name: value})
                assert response.status_code == 400, (name, value)
                error = response.json()["error"]
                assert (error["code"], error["param"]) == ("unsupported_parameter", name)
                assert error["message"].startswith(f"{name}=")
        for name in known_fields.NO_EFFECT:
            response = await served.post(path, **good, **{name: ["anything"]})
            assert response.status_code == 200
            assert HEADER not in response.headers

    with_server(scenario, engine_of(model))


@pytest.mark.parametrize("path", BODIES)
def test_no_table_names_a_field_that_there_is(path):
    model, _ = BODIES[path]
    for kind in (model, *model.inner.values()):
        assert not set(kind.model_fields) & (set(kind.unsupported) | known_fields.NO_EFFECT)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprob_token_ids": [[5]]},
        {"stream_interval": 5, "stream": True},
        {"guided_whitespace_pattern": " "},
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        {"structured_outputs": {"json": {}, "disable_fallback": True}},
        {"mirostat": 2},
        {"n_predict": 5},
        {"watermarking": True},
        {"stream": True, "stream_options": {"include_obfuscation": True}},
    ],
)
def test_named_in_the_issue_and_their_like(fields):
    async def scenario(served):
        for response in (await served.complete(**fields), await served.chat(**fields)):
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["code"] == "unsupported_parameter"
            assert list(fields)[-1] in error["param"]
        assert not served.engine.requests

    with_server(scenario)


def test_the_error_says_what_to_use_instead():
    async def scenario(served):
        error = (await served.complete(n_predict=5)).json()["error"]
        assert error["message"] == "n_predict=5 is not supported yet; use max_tokens."
        other = (await served.complete(messages=[])).json()["error"]
        assert other["message"].endswith("; use prompt, or POST /v1/chat/completions.")
        other = (await served.chat(prompt="hi")).json()["error"]
        assert other["message"].endswith("; use messages, or POST /v1/completions.")

    with_server(scenario)


UNKNOWN = [
    ({"mood": "good"}, "mood"),
    ({"mood": 1, "tempreature": 0}, "mood, tempreature"),
    ({"stream_options": {"a": 1}, "stream": True}, "stream_options.a"),
    ({"max_tokens": 1, "model": "fake"}, None),
    ({"a,b\r\nX-Evil: 1\u00e9 \u2028": 1}, "a?b??X-Evil:?1???"),
    ({"x" * 100_000: 1}, "x" * 48),
    ({"": 1}, ""),
]


@pytest.mark.parametrize(("fields", "shown"), UNKNOWN)
@pytest.mark.parametrize("stream", [False, True])
def test_what_nobody_knows_is_named_in_a_header(fields, shown, stream):
    async def scenario(served):
        body = {"prompt": "hi", "max_tokens": 2, "stream": stream, **fields}
        response = await served.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        assert response.headers.get(HEADER) == shown
        if body["stream"]:
            assert await events(response)

    with_server(scenario)


def test_unknown_fields_of_messages_are_named_once():
    parts = [{"type": "text", "text": "a", "size": 1}, {"type": "text", "text": "b", "size": 2}]
    messages = [{"role": "user", "content": "a", "mood": 1, "cache_control": {}}] * 3
    messages.append({"role": "user", "content": parts})
    body = {"messages": messages}
    expected = ["messages[].mood", "messages[].content[].size"]
    assert unknown_fields(ChatBody, body) == expected

    async def scenario(served):
        response = await served.chat(*messages)
        assert response.headers[HEADER] == ", ".join(expected)
        response = await served.post("/tokenize", **body)
        assert response.headers[HEADER] == ", ".join(expected)

    with_server(scenario)


def test_unknown_fields_of_a_response_format_are_named():
    schema = {"name": "x", "schema": {"mood": 1}, "mood": 1}
    body = {"response_format": {"type": "json_schema", "json_schema": schema, "tone": 1}}
    expected = ["response_format.json_schema.mood", "response_format.tone"]
    assert unknown_fields(ChatBody, body) == expected
    assert unknown_fields(ChatBody, {"structured_outputs": {"json": {"mood": 1}}}) == []


def test_known_fields_of_messages_are_refused():
    async def scenario(served):
        for name in Message.unsupported:
            response = await served.chat(USER, {"role": "assistant", "content": "a", name: "b"})
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["code"], error["param"]) == (
                "unsupported_parameter",
                f"messages[].{name}",
            )
        answer = (await served.chat(USER)).json()["choices"][0]["message"]
        extra = {"annotations": [], "tool_calls": [], "refusal": None, "reasoning": None}
        response = await served.chat(USER, answer | extra, USER)
        assert response.status_code == 200
        assert HEADER not in response.headers

    with_server(scenario)


def test_the_header_is_bounded():
    body = {"prompt": "hi", "max_tokens": 1, **{f"{i:x<99}": 1 for i in range(5000)}}

    async def scenario(served):
        response = await served.post("/v1/completions", **body)
        assert response.status_code == 200
        shown = response.headers[HEADER]
        assert shown.count(",") == MAX_UNKNOWN_FIELDS - 1
        assert len(shown) < 1100

    with_server(scenario)


def test_the_header_does_not_go_to_the_next_request():
    async def scenario(served):
        assert HEADER in (await served.complete(mood=1)).headers
        assert HEADER not in (await served.complete()).headers

    with_server(scenario)


@pytest.mark.parametrize("path", BODIES)
def test_strict_fields(path):
    model, good = BODIES[path]

    async def scenario(served):
        assert (await served.post(path, **good)).status_code == 200
        assert (await served.post(path, **good, metadata={})).status_code == 200
        count = len(served.engine.requests)
        response = await served.post(path, **good, mood=1, tempreature=0)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("unknown_parameter", "mood")
        assert "mood, tempreature" in error["message"]
        # The error of a known field is first.
        response = await served.post(path, **good, mood=1, model=5)
        assert response.json()["error"]["param"] == "model"
        assert len(served.engine.requests) == count

    with_server(scenario, engine_of(model), strict_fields=True)


def test_strict_fields_of_messages():
    async def scenario(served):
        response = await served.chat({**USER, "mood": 1})
        assert response.json()["error"]["param"] == "messages[].mood"

    with_server(scenario, strict_fields=True)


def test_an_image_is_unsupported_not_unknown():
    part = {"type": "image_url", "image_url": {"url": "x"}}

    async def scenario(served):
        response = await served.chat({"role": "user", "content": [part]})
        assert response.json()["error"]["code"] == "unsupported_parameter"

    with_server(scenario, strict_fields=True)


def test_looking_does_not_depend_on_the_form_of_what_is_wrong():
    for value in (None, 5, "x", [5], [None], [[{"a": 1}]], {"a": {"b": 1}}):
        body = {"messages": value, "stream_options": value}
        assert isinstance(unknown_fields(ChatBody, body), list)
    assert unknown_fields(Body, {}) == []


def test_a_content_type_is_asked_for():
    body = json.dumps({"prompt": "hi"}).encode()

    async def scenario(served):
        for path in BODIES:
            response = await served.http.post(path, content=body)
            assert response.status_code == 415
            assert "missing" in response.json()["error"]["message"]
        call = Call(served, "/v1/completions", body, {"content-type": "application/json; x=y"})
        await call.task
        assert call.status == 200

    with_server(scenario)


# Fields that clients of other servers send with every request: the servers' defaults. They have no
# effect; the second value has one.
DEFAULTS = {
    "response_format": ({"type": "text"}, {"type": "grammar"}),
    "service_tier": ("auto", "flex"),
    "length_penalty": (1, 2),
    "thinking_token_budget": (-1, 0),
    "stream_interval": (1, 2),
    "routed_experts_prompt_start": (0, 1),
    "detokenize": (True, False),
    "skip_reading_prefix_cache": (False, True),
    "min_new_tokens": (0, 1),
    "top_logprobs_num": (0, 1),
    "beam_width": (1, 2),
    "mirostat": (0, 1),
    "dynatemp_range": (0, 1),
    "dry_multiplier": (0.0, 0.5),
    "xtc_probability": (0.0, 0.5),
    "n_keep": (0, 1),
    "repeat_penalty": (1.0, 1.1),
    "typical_p": (1.0, 0.9),
    "tfs_z": (1.0, 0.9),
    "n_cmpl": (1, 2),
    "repeat_last_n": (64, 63),
    "top_n_sigma": (-1, 1),
    "min_keep": (1, 2),
    "cache_prompt": (True, False),
    "watermark": (False, True),
    "top_a": (0, 1),
    "no_repeat_ngram_size": (0, 2),
    "num_beams": (1, 4),
    "num_return_sequences": (1, 2),
    "tools": ([], [{}]),
    "tool_choice": ("none", "always"),
    "grammar": ("", {"type": "json"}),
}
MORE = {
    ("repeat_last_n", -1): 200,
    ("repeat_last_n", 0): 400,
    ("repeat_last_n", 65): 400,
    ("top_n_sigma", 0): 200,
    ("min_keep", 0): 200,
    ("mirostat", 2): 400,
    ("thinking_token_budget", -2): 400,
    ("n_cmpl", 0): 400,
    ("num_beams", 0): 400,
    ("length_penalty", 0): 400,
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_defaults_of_other_servers_pass(path):
    _, good = BODIES[path]
    cases = {(name, i): v for name, pair in DEFAULTS.items() for i, v in enumerate(pair)}

    async def scenario(served):
        for (name, i), value in cases.items():
            response = await served.post(path, **good, **{name: value})
            assert response.status_code == (400 if i else 200), (name, value)
        for (name, value), status in MORE.items():
            response = await served.post(path, **good, **{name: value})
            assert response.status_code == status, (name, value)

    with_server(scenario)


@pytest.mark.parametrize(
    ("path", "passes", "refused"),
    [
        ("/v1/completions", {"suffix": ""}, {"suffix": "x"}),
        ("/v1/completions", {"messages": None}, {"messages": []}),
        ("/v1/chat/completions", {"modalities": ["text"]}, {"modalities": ["audio"]}),
        ("/v1/chat/completions", {"stream_reasoning": True}, {"stream_reasoning": False}),
        ("/v1/chat/completions", {"best_of": 1}, {"best_of": 2}),
        ("/tokenize", {"parse_special": True}, {"parse_special": False}),
        ("/tokenize", {"with_pieces": False}, {"with_pieces": True}),
        ("/detokenize", {"skip_special_tokens": False}, {"skip_special_tokens": True}),
    ],
)
def test_what_asks_for_nothing_on_one_route(path, passes, refused):
    _, good = BODIES[path]

    async def scenario(served):
        assert (await served.post(path, **good, **passes)).status_code == 200
        response = await served.post(path, **good, **refused)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "unsupported_parameter"

    with_server(scenario)


def test_numbers_that_are_equal_are_the_same_default():
    async def scenario(served):
        for fields in ({"length_penalty": 1.0}, {"top_a": 0.0}, {"beam_width": 1}):
            assert (await served.complete(**fields)).status_code == 200

    with_server(scenario)


def test_the_whole_header_and_no_more_of_it():
    names = [f"x{i:02}" for i in range(25)]

    async def scenario(served):
        response = await served.complete(**dict.fromkeys(names, 1))
        assert response.headers[HEADER] == ", ".join(names[:20])
        response = await served.complete(**{"y" * 49: 1, "z" * 48: 1, "~!-a": 1})
        assert response.headers[HEADER] == f"{'y' * 48}, {'z' * 48}, ~!-a"

    with_server(scenario)
