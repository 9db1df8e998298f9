"""POST /inference/v1/generate."""

import json

import pytest
from pydantic import TypeAdapter

from octavo.config import EngineConfig
from octavo.server.generation_answers import TokensAnswer, TokensChunk
from tests.server.fake_engine import ANSWER, FakeAsyncLLM, events, with_server

PROMPT = [1, 5, 6]


async def generate(served, sampling_params=None, **body):
    fields = {"token_ids": PROMPT, "sampling_params": sampling_params or {}, **body}
    return await served.post("/inference/v1/generate", **fields)


def test_tokens_go_in_and_out():
    async def scenario(served):
        params = {"max_tokens": 20, "temperature": 0.2, "detokenize": False, "n": 2}
        response = await generate(served, params, request_id="abc")
        TypeAdapter(TokensAnswer).validate_json(response.text)
        answer = response.json()
        assert set(answer) == {
            "request_id",
            "model",
            "created",
            "output_mode",
            "choices",
            "usage",
            "prompt_logprobs",
            "prompt_token_ids",
        }
        assert answer["request_id"] == "abc"
        assert answer["output_mode"] == "tokens"
        assert answer["prompt_token_ids"] is None
        choices = answer["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        assert set(choices[0]) == {"index", "token_ids", "logprobs", "finish_reason", "stop_reason"}
        assert served.engine.tokenizer.decode(choices[0]["token_ids"]).startswith(ANSWER)
        (request,) = served.engine.requests
        assert list(request.prompt_token_ids) == PROMPT

    with_server(scenario)


def test_text_and_logprobs_where_they_are_asked_for():
    async def scenario(served):
        answer = (
            await generate(served, {"logprobs": 2}, output_mode="text", return_token_ids=True)
        ).json()
        TypeAdapter(TokensAnswer).validate_python(answer)
        (choice,) = answer["choices"]
        assert choice["text"] == ANSWER
        assert answer["prompt_token_ids"] == PROMPT
        content = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in content] == choice["token_ids"]
        assert set(content[0]["top_logprobs"][0]) == {"token_id", "logprob", "rank"}

    with_server(scenario)


def test_a_stream():
    async def scenario(served):
        whole = (await generate(served)).json()["choices"][0]["token_ids"]
        response = await generate(
            served, stream=True, stream_options={"include_usage": True}, return_token_ids=True
        )
        items = await events(response)
        for item in items:
            TypeAdapter(TokensChunk).validate_json(item)
        first, *rest, last = map(json.loads, items)
        assert first["prompt_token_ids"] == PROMPT
        assert set(rest[0]) == {"request_id", "output_mode", "choices", "usage"}
        assert [t for chunk in rest for t in chunk["choices"][0]["token_ids"]] == whole
        assert rest[-1]["choices"][0]["finish_reason"] == "stop"
        assert last["usage"]["completion_tokens"] == len(whole)

    with_server(scenario)


@pytest.mark.parametrize(
    ("sampling_params", "body", "said"),
    [
        ({"frobnicate": 1}, {}, "sampling_params has 'frobnicate'"),
        ({"stream": True}, {}, "belongs next to"),
        ({"temperature": -1}, {}, "temperature=-1"),
        ({"thinking_token_budget": 5}, {}, "thinking_token_budget=5 is not available"),
        ({}, {"token_ids": []}, "token_ids"),
        ({}, {"token_ids": [-1]}, "token_ids"),
        ({}, {"output_mode": "derender"}, "output_mode"),
        ({}, {"features": {"a": 1}}, "features"),
        ({}, {"model": "other"}, "other"),
    ],
)
def test_what_is_wrong_is_named(sampling_params, body, said):
    async def scenario(served):
        response = await generate(served, sampling_params, **body)
        assert response.status_code in (400, 404)
        assert said in response.json()["error"]["message"]

    with_server(scenario)


def test_a_server_without_a_tokenizer():
    def engine():
        return FakeAsyncLLM(EngineConfig.from_kwargs(skip_tokenizer_init=True))

    async def scenario(served):
        served.engine.tokenizer = None
        answer = (await generate(served)).json()
        assert answer["choices"][0]["token_ids"]
        response = await generate(served, output_mode="text")
        assert "output_mode" in response.json()["error"]["message"]

    with_server(scenario, engine)
