"""prompt_embeds of completions: accepted forms, the order of answers, rejected forms."""

import base64
import io
import json

import pytest
import torch

from octavo.config import EngineConfig
from octavo.server.schema import MAX_PROMPTS
from tests.server.fake_engine import ANSWER, MAX_MODEL_LEN, FakeAsyncLLM, events, with_server


def engine(**settings):
    settings = {"served_model_name": ["fake"], "enable_prompt_embeds": True} | settings
    return FakeAsyncLLM(EngineConfig.from_kwargs(**settings))


def encoded(tokens=3, size=4, value=0.5, dtype=torch.bfloat16):
    file = io.BytesIO()
    torch.save(torch.full((tokens, size), value, dtype=dtype), file)
    return base64.b64encode(file.getvalue()).decode()


def text_of(choices):
    return [choice["text"] for choice in sorted(choices, key=lambda c: c["index"])]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "lengths"),
    [
        ({"prompt_embeds": encoded()}, [3]),
        ({"prompt_embeds": encoded(), "prompt": None}, [3]),
        ({"prompt_embeds": encoded(), "prompt": ""}, [3]),  # OpenAI's client requires one
        ({"prompt_embeds": [encoded(1), encoded(2)]}, [1, 2]),
        ({"prompt_embeds": [encoded(7)], "prompt": ["ab", "c"]}, [7, 3, 2]),
        ({"prompt_embeds": [], "prompt": "ab"}, [3]),
        ({"prompt_embeds": encoded(), "n": 2, "logprobs": 1}, [3, 3]),
    ],
    ids=range(7),
)
def test_embeddings_are_answered_before_texts(body, lengths, stream):
    async def scenario(served):
        body["return_token_ids"] = True
        fields = {"prompt": None, "stream": stream, **body}
        if stream:
            fields["stream_options"] = {"include_usage": True}
        response = await served.complete(**fields)
        answers = [json.loads(e) for e in await events(response)] if stream else []
        found, texts = {}, {}
        for answer in answers or [response.json()]:
            usage = answer.get("usage")
            for choice in answer["choices"]:
                index = choice["index"]
                texts[index] = texts.get(index, "") + choice["text"]
                if choice["prompt_token_ids"] is not None:
                    found[index] = choice["prompt_token_ids"]
        assert [len(found[i]) for i in sorted(found)] == lengths
        assert texts == dict.fromkeys(range(len(lengths)), ANSWER)
        num_prompt = lengths[:1] if "n" in body else lengths
        assert usage["prompt_tokens"] == sum(num_prompt)

    with_server(scenario, engine)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "prompt", "required"),
        ({"prompt_embeds": []}, "prompt", "required"),
        ({"prompt_embeds": 5}, "prompt_embeds", "base64"),
        ({"prompt_embeds": [encoded(), None]}, "prompt_embeds", "base64"),
        ({"prompt_embeds": [""] * (MAX_PROMPTS + 1)}, "prompt_embeds", "at most 4096"),
        ({"prompt_embeds": ""}, "prompt_embeds", "zip archive"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds", "zip archive"),
        ({"prompt_embeds": "%%%%"}, "prompt_embeds", "base64"),
        ({"prompt_embeds": [encoded(), encoded(size=5)]}, "prompt_embeds", "of 5 numbers"),
        ({"prompt_embeds": encoded(value=float("nan"))}, "prompt_embeds", "not finite"),
        ({"prompt_embeds": encoded(value=float("-inf"))}, "prompt_embeds", "not finite"),
        ({"prompt_embeds": encoded(dtype=torch.int32)}, "prompt_embeds", "of type int32;"),
        ({"prompt_embeds": encoded(MAX_MODEL_LEN)}, "prompt_embeds", "no room"),
        ({"prompt_embeds": encoded(0)}, "prompt", "empty"),
        ({"prompt_embeds": encoded(), "echo": True}, "echo", "prompt_embeds"),
        ({"prompt_embeds": encoded(), "prompt_logprobs": 1}, "prompt_logprobs", "prompt_embeds"),
    ],
    ids=range(16),
)
def test_what_is_wrong_is_named(body, param, says):
    async def scenario(served):
        response = await served.post("/v1/completions", **body)
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["param"] == param
        assert says in error["message"]
        assert served.engine.request_memory.used == 0

    with_server(scenario, engine)


def test_without_the_flag_the_error_names_it():
    async def scenario(served):
        response = await served.post("/v1/completions", prompt_embeds=encoded())
        assert response.status_code == 400
        assert "--enable-prompt-embeds" in response.json()["error"]["message"]
        assert (
            await served.post("/v1/chat/completions", prompt_embeds=encoded())
        ).status_code == 400

    with_server(scenario, lambda: engine(enable_prompt_embeds=False))


def test_an_invocation_may_have_nothing_else():
    async def scenario(served):
        response = await served.post("/invocations", prompt_embeds=encoded(), max_tokens=64)
        assert text_of(response.json()["choices"]) == [ANSWER]

    with_server(scenario, engine)
