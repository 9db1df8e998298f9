"""POST /v1/embeddings and /pooling, with a fake engine."""

import asyncio
import base64
import json
import re

import numpy as np
import pytest
from pydantic import TypeAdapter

from octavo.frontend.request_memory import RequestMemory
from octavo.models.blocks.pooler import SentencesSpec
from octavo.server import pooling, pooling_answers
from octavo.server.pooling_schema import MAX_TEXTS
from tests.server.fake_engine import TEMPLATE, Call
from tests.server.pooled import (
    CLASSES,
    EMBED,
    PLAIN,
    TOKENS,
    good,
    ids_of,
    refused,
    serve,
    vector,
)
from tests.server.test_batches import begin, line, until

URL = "/v1/embeddings"
ANSWER = TypeAdapter(pooling_answers.EmbeddingsAnswer)


PICTURE = {"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}}


async def embed(served, value, **fields):
    """Return the vectors of an answer, float32 [texts, n]."""
    answer = await good(served, URL, input=value, **fields)
    ANSWER.validate_python(answer)
    assert [row["index"] for row in answer["data"]] == list(range(len(answer["data"])))
    return np.array([row["embedding"] for row in answer["data"]], np.float32)


def until_true(condition):
    async def wait():
        while not condition():
            await asyncio.sleep(0.002)

    return asyncio.wait_for(wait(), 60)


def test_every_form_of_input():
    async def scenario(served):
        one, two = vector("one"), vector("two")
        for value, expected in [
            ("one", [one]),
            (["one", "two"], [one, two]),
            (ids_of("one"), [one]),
            ([ids_of("two"), ids_of("one")], [two, one]),
        ]:
            np.testing.assert_array_equal(await embed(served, value), expected)
        bare = await embed(served, "one", add_special_tokens=False)
        np.testing.assert_array_equal(bare, await embed(served, [*b"one"]))
        answer = await good(served, URL, input=["one", "two!"], model="fake", user="me")
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 4 + 5
        assert answer["id"].startswith("embd-")
        assert answer["model"] == "fake"

    serve(scenario)


def test_base64_is_the_same_numbers():
    async def scenario(served):
        texts = ["one", "two", "three"]
        answer = await good(served, URL, input=texts, encoding_format="base64")
        found = [np.frombuffer(base64.b64decode(r["embedding"]), "<f4") for r in answer["data"]]
        np.testing.assert_array_equal(found, await embed(served, texts))
        np.testing.assert_array_equal(found, await embed(served, texts, encoding_format="float"))

    serve(scenario)


def test_parameters_of_vectors():
    async def scenario(served):
        raw = vector("one", PLAIN)
        for name in ("normalize", "use_activation", "activation"):
            np.testing.assert_array_equal(await embed(served, "one", **{name: False}), [raw])
        short = raw[:2] / np.linalg.norm(raw[:2])
        np.testing.assert_allclose(await embed(served, "one", dimensions=2), [short], rtol=1e-6)
        for keep, side, text in [(3, None, "on"), (3, "left", "on"), (-1, None, "one")]:
            cut = await embed(served, "one", truncate_prompt_tokens=keep, truncation_side=side)
            expected = vector(text) if side is None else await embed(served, [256, *b"ne"])
            np.testing.assert_array_equal(cut.ravel(), np.ravel(expected))
        served.engine.spec.sentences = SentencesSpec((("query", "q: "),))
        named = await embed(served, "one", prompt_name="query")
        np.testing.assert_array_equal(named, [vector("q: one")])
        await embed(served, "x" * 9000, truncate_prompt_tokens=-1)
        assert len(served.engine.requests[-1].prompt_token_ids) == served.engine.max_model_len
        await embed(served, [5] * 9000, truncate_prompt_tokens=-1)
        assert len(served.engine.requests[-1].prompt_token_ids) == served.engine.max_model_len

    serve(scenario)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "input", "Give either input or messages"),
        ({"input": None}, "input", "Give either input or messages"),
        ({"input": []}, "input", "empty list"),
        ({"input": ""}, "input", "empty text"),
        ({"input": ["a", ""]}, "input", r"input\[1\] is an empty text"),
        ({"input": [[]]}, "input[0]", "not a list of token ids"),
        ({"input": [[1], []]}, "input[1]", "not a list of token ids"),
        ({"input": 5}, "input", "input=5"),
        ({"input": {"a": 1}}, "input", "not allowed"),
        ({"input": [1.5]}, "input", r"input\[0\]=1.5"),
        ({"input": [True]}, "input", "not a token id"),
        ({"input": ["a", [1]]}, "input", "differs in kind"),
        ({"input": [[1], [-1]]}, "input[1]", "not a token id"),
        ({"input": [[1], [999]]}, "input[1]", r"input\[1\] holds the token id 999"),
        ({"input": ["a"] * 5000}, "input", f"at most {MAX_TEXTS}"),
        ({"input": "x" * 9000}, "input", "maximum context length is 256"),
        ({"input": "a", "dimensions": 3}, "dimensions", "choose one of: 2"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "a", "dimensions": "many"}, "dimensions", "valid integer"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "a", "truncate_prompt_tokens": 900}, "truncate_prompt_tokens", "context"),
        ({"input": "a", "normalize": "yes"}, "normalize", "boolean"),
        ({"input": "a", "normalize": True, "use_activation": False}, "normalize", "contradicts"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "not supported"),
        ({"input": "a", "endianness": "big"}, "endianness", "not supported"),
        ({"input": "a", "messages": []}, "messages", "messages"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "messages", "no chat template"),
    ],
)
def test_what_is_wrong(body, param, said):
    async def scenario(served):
        error = await refused(served, URL, **body)
        assert error["param"] == param
        assert re.search(said, error["message"]), error
        assert served.engine.request_memory.used == 0

    serve(scenario)


def test_models_and_tasks_that_there_are_not():
    async def scenario(served):
        response = await served.post(URL, input="a", model="other")
        assert response.status_code == 404
        error = await refused(served, URL, input="a")
        assert (error["param"], error["code"]) == ("model", "unsupported_task")
        assert "It can: classify (POST /v1/classify)" in error["message"]
        for path, body in [
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/responses", {"input": "a"}),
        ]:
            for stream in (False, True):
                error = await refused(served, path, **body, stream=stream)
                assert "generates no text. It can: classify" in error["message"]

    serve(scenario, CLASSES)


def test_a_chat():
    async def scenario(served):
        chat = [{"role": "user", "content": "hi"}]
        await good(served, URL, messages=chat)
        ids = served.engine.requests[-1].prompt_token_ids
        assert ids == [256, *b"<user>hi", 257]
        await good(served, URL, messages=chat, add_generation_prompt=True)
        assert bytes(served.engine.requests[-1].prompt_token_ids[-11:]) == b"<assistant>"
        await good(served, URL, messages=chat, add_special_tokens=True)
        assert served.engine.requests[-1].prompt_token_ids == [256, *ids]

    serve(scenario, template=TEMPLATE)


@pytest.mark.parametrize(
    ("seats", "settings", "most"),
    [(2, {}, 4), (100, {"max_num_queued_reqs": 12}, 3), (2, {"max_num_queued_reqs": 0}, 4)],
)
def test_a_limited_number_of_texts_is_in_the_engine(seats, settings, most):
    async def scenario(served):
        texts = [f"text {i}" for i in range(50)]
        seen = 0
        process = served.engine._output.process_outputs

        def watch(*args):
            nonlocal seen
            seen = max(seen, served.engine.num_unfinished_requests)
            return process(*args)

        served.engine._output.process_outputs = watch
        np.testing.assert_array_equal(await embed(served, texts), [vector(t) for t in texts])
        assert seen == most
        turns = [request.options.turn for request in served.engine.requests]
        assert sorted(turns) == list(range(50))

    serve(scenario, engine={"max_num_seqs": seats}, **settings)


def test_the_envelope():
    async def scenario(served):
        response = await served.http.post(
            URL,
            json={"input": "a", "priority": -3, "cache_salt": "x", "request_id": "mine"},
            headers={"Authorization": "Bearer k1", "X-Deadline-Ms": "20000"},
        )
        assert response.status_code == 200
        assert response.headers["X-Request-Id"] == "mine"
        options = served.engine.requests[-1].options
        assert (options.priority, options.tenant is None) == (-3, False)
        assert options.deadline is not None
        assert options.cache_salt
        assert (await served.post(URL, input="a")).status_code == 401

    engine = {"scheduling_policy": "priority"}
    serve(scenario, engine=engine, api_key=["k1", "k2"])


def test_a_priority_without_effect_is_reported():
    async def scenario(served):
        response = await served.post(URL, input="a", priority=1, mood="good")
        assert response.headers["X-Octavo-Ignored-Fields"] == "mood, priority"

    serve(scenario)


def test_a_client_that_goes_away_ends_all_texts():
    async def scenario(served):
        served.engine.paused = True
        body = json.dumps({"input": [f"text {i}" for i in range(40)]}).encode()
        call = Call(served, URL, body)
        await until_true(lambda: served.engine.num_unfinished_requests == 8)
        call.disconnect()
        await asyncio.wait_for(call.task, 60)
        assert served.engine.num_unfinished_requests == 0
        assert len(served.engine.aborted) == 8
        assert len(served.engine.requests) == 8
        assert served.engine.request_memory.used == 0

    serve(scenario, engine={"max_num_seqs": 4})


def test_a_wrong_text_ends_its_siblings():
    async def scenario(served):
        served.engine.paused = True
        error = await refused(served, URL, input=[*([[5]] * 3), [300], *([[5]] * 9)])
        assert error["param"] == "input[3]"
        assert served.engine.num_unfinished_requests == 0

    serve(scenario)


def test_a_deadline():
    async def scenario(served):
        served.engine.paused = True
        response = await served.post(URL, input=["a", "b"], deadline_ms=30)
        assert response.status_code == 408
        assert served.engine.num_unfinished_requests == 0

    serve(scenario)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_results_that_are_no_numbers(value):
    async def scenario(served):
        for encoding in ("float", "base64"):
            served.engine.pool = lambda ids, pooler: np.full(4, value)
            response = await served.post(
                URL, input=["a"], encoding_format=encoding, normalize=False
            )
            assert response.status_code == 500
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "result_not_finite")
            assert "input[0]" in error["message"]

    serve(scenario)


def test_memory_of_results(monkeypatch):
    monkeypatch.setattr(pooling, "_RESULT", 2**18)

    async def scenario(served):
        served.engine.request_memory = RequestMemory(2**20)
        error = await refused(served, URL, input=["a"] * 9)
        assert error["code"] == "request_too_large"
        assert "--request-memory-bytes" in error["message"]
        assert served.engine.request_memory.used == 0
        await good(served, URL, input=["a"] * 3)
        with served.engine.request_memory.hold(2**19):
            response = await served.post(URL, input=["a"] * 3)
            assert response.status_code == 429
        assert served.engine.request_memory.used == 0

    serve(scenario)


def test_a_long_answer_is_sent_in_pieces(monkeypatch):
    monkeypatch.setattr(pooling, "_LARGE", 100)
    monkeypatch.setattr(pooling, "_PIECE", 150)

    async def scenario(served):
        texts = [f"text {i}" for i in range(20)]
        np.testing.assert_array_equal(await embed(served, texts), [vector(t) for t in texts])
        held = []
        call = Call(served, URL, json.dumps({"input": texts}).encode())
        send = call.send

        async def watch(message):
            held.append(served.engine.request_memory.used)
            await send(message)

        call.send = watch
        await call.task
        assert len(held) > 3
        assert min(held) > 1000
        assert served.engine.request_memory.used == 0

    serve(scenario)


def test_metrics_count_the_tokens():
    async def scenario(served):
        await embed(served, ["one", "three"])
        page = (await served.http.get("/metrics")).text
        assert 'prompt_tokens_total{engine="0",model_name="fake"} 10.0' in page
        done = 'request_success_total{engine="0",finished_reason="stop",model_name="fake"} 2.0'
        assert done in page

    serve(scenario)


def test_lines_of_a_batch(tmp_path):
    async def scenario(served):
        rows = [line("a", URL, input=["one", "two"]), line("b", URL, input=[])]
        batch = await begin(served, *rows, endpoint=URL)
        done = await until(served, batch, "completed")
        assert done["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        content = await served.http.get(f"/v1/files/{done['output_file_id']}/content")
        answer = json.loads(content.text)["response"]["body"]
        ANSWER.validate_python(answer)
        found = [row["embedding"] for row in answer["data"]]
        np.testing.assert_array_equal(np.float32(found), [vector("one"), vector("two")])
        assert all(request.options.background for request in served.engine.requests)
        content = await served.http.get(f"/v1/files/{done['error_file_id']}/content")
        assert "input is an empty list" in content.text

    serve(scenario, state_dir=str(tmp_path))


def test_pooling_of_any_task():
    async def scenario(served):
        kinds = TypeAdapter(pooling_answers.PoolingAnswer)
        for task, expected in [
            (None, "embed"),
            ("embed", "embed"),
            ("token_embed", "token_embed"),
            ("encode", "token_embed"),
            ("classify", "classify"),
            ("score", "classify"),
        ]:
            answer = await good(served, "/pooling", input=["one", "three"], task=task)
            kinds.validate_python(answer)
            shapes = [np.shape(row["data"]) for row in answer["data"]]
            sizes = {"embed": [(4,), (4,)], "token_embed": [(4, 4), (6, 4)]}
            assert shapes == sizes.get(expected, [(3,), (3,)])
        body = {"input": "one", "task": "token_embed"}
        (floats,) = (await good(served, "/pooling", **body))["data"]
        (packed,) = (await good(served, "/pooling", **body, encoding_format="base64"))["data"]
        numbers = np.frombuffer(base64.b64decode(packed["data"]), "<f4")
        np.testing.assert_array_equal(numbers.reshape(-1, 4), np.float32(floats["data"]))
        error = await refused(served, "/pooling", input="a", task="token_classify")
        assert "does not have the task token_classify" in error["message"]
        error = await refused(served, "/pooling", input="a", task="plugin")
        assert error["param"] == "task"

    serve(scenario, EMBED, TOKENS, CLASSES)


def test_a_model_without_vectors_and_scores():
    async def scenario(served):
        served.engine.spec.poolers = ()
        for path in (URL, "/pooling"):
            error = await refused(served, path, input="a")
            assert "It can: generate (POST /v1/completions)" in error["message"]

    serve(scenario)


def test_a_priority_beyond_32_bits():
    async def scenario(served):
        for path, body in [
            ("/v1/embeddings", {"input": "a"}),
            ("/v2/embed", {"texts": ["a"]}),
            ("/rerank", {"query": "a", "documents": ["b"]}),
        ]:
            for priority in (2**31, -(2**31) - 1, 10**30):
                error = await refused(served, path, priority=priority, **body)
                assert error["param"] == "priority"
                assert f"priority={priority}" in error["message"]

    serve(scenario)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (URL, {"messages": [{"role": "user", "content": [PICTURE]}]}),
        (URL, {"input": [{"content": [PICTURE]}]}),
        ("/v1/score", {"text_1": "a", "text_2": {"content": [PICTURE]}}),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"content": [PICTURE]}]}),
    ],
)
def test_pictures_are_refused(path, body):
    async def scenario(served):
        error = await refused(served, path, **body)
        assert error["param"] in body
        assert re.search("send text only|not a text; give|is not a string", error["message"])

    serve(scenario, EMBED, CLASSES, template=TEMPLATE)
