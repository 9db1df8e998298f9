"""Render routes: prompts as the engine would receive them, and their answers by token ids."""

import pytest

from tests.server.fake_engine import BOS, FakeAsyncLLM, with_server

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
PARAMS = {
    "max_tokens": 5,
    "temperature": 1.0,
    "logit_bias": {"65": 3},
    "stop": ["zz"],
    "seed": 7,
    "n": 2,
    "structured_outputs": {"regex": "[a-z]+"},
    "vllm_xargs": {"a": 1},
    "cache_salt": "salt",
    "priority": 3,
}


def test_a_rendered_chat_is_the_request_that_would_run():
    async def scenario(served):
        found = await served.chat(*MESSAGES, **PARAMS)
        rendered = await served.post(f"{CHAT}/render", messages=MESSAGES, **PARAMS)
        assert rendered.status_code == 200
        assert len(served.engine.requests) == 1
        prompt = rendered.json()
        assert prompt["prompt_text"] == "<s><user>hi</s><assistant>"
        assert (prompt["model"], prompt["stream"]) == ("fake", False)
        assert prompt["request_id"].startswith("chatcmpl-")
        again = await served.post("/inference/v1/generate", **prompt)
        assert again.status_code == 200, again.text
        first, second = served.engine.requests
        assert first.prompt_token_ids == second.prompt_token_ids == prompt["token_ids"]
        assert first.sampling_params == second.sampling_params
        assert first.options.cache_salt == second.options.cache_salt
        assert first.n == second.n == 2
        assert found.json()["usage"]["prompt_tokens"] == len(prompt["token_ids"])

    with_server(
        scenario,
        lambda: FakeAsyncLLM(generation_config={"temperature": 0.6, "top_k": 20}),
        strict_fields=True,
    )


@pytest.mark.parametrize("stated", [{}, {"max_tokens": 3}])
def test_defaults_of_the_routes_are_stated(stated):
    async def scenario(served):
        (one,) = (await served.post("/v1/completions/render", prompt="a", **stated)).json()
        assert one["sampling_params"]["max_tokens"] == stated.get("max_tokens", 16)
        chat = (await served.post(f"{CHAT}/render", messages=MESSAGES, **stated)).json()
        assert chat["sampling_params"].get("max_tokens") == stated.get("max_tokens")
        assert chat["sampling_params"]["temperature"] == 0.6

    with_server(scenario, lambda: FakeAsyncLLM(generation_config={"temperature": 0.6}))


def test_each_prompt_of_a_completion():
    async def scenario(served):
        path = "/v1/completions/render"
        found = (await served.post(path, prompt=["a", "bc"])).json()
        assert [x["token_ids"] for x in found] == [[BOS, 97], [BOS, 98, 99]]
        assert [x["prompt_text"] for x in found] == ["a", "bc"]
        found = (await served.post(path, prompt="abc", truncate_prompt_tokens=2)).json()
        assert found[0]["token_ids"] == [98, 99]
        assert "truncate_prompt_tokens" not in found[0]["sampling_params"]
        (ids,) = (await served.post(path, prompt=[1, 2])).json()
        assert (ids["prompt_text"], ids["token_ids"]) == (None, [1, 2])

    with_server(scenario)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a" * 500}, "prompt"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "model": "x"}, "model"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "a", "stream_options": {}}, "stream_options"),
    ],
)
def test_wrong_requests(body, param):
    async def scenario(served):
        found = await served.post("/v1/completions/render", **body)
        assert found.status_code in (400, 404)
        assert found.json()["error"]["param"] == param

    with_server(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_prompts_and_answers(stream):
    """Chats have the prompt's ids once, completions in each choice, as with vLLM."""

    async def scenario(served):
        import json

        from tests.server.fake_engine import events

        async def all_of(response):
            if not stream:
                return [response.json()]
            return [json.loads(event) for event in await events(response)]

        asked = {"return_token_ids": True, "stream": stream, "max_tokens": 3}
        chat = await all_of(await served.chat(**asked))
        prompts = [x["prompt_token_ids"] for x in chat if x.get("prompt_token_ids")]
        assert len(prompts) == 1
        ids = [t for x in chat for c in x["choices"] for t in c.get("token_ids") or ()]
        assert ids == [*b"Hel"]
        done = await all_of(await served.complete(prompt=[7, 8], **asked))
        choices = [c for x in done for c in x["choices"]]
        assert [c["prompt_token_ids"] for c in choices if c.get("prompt_token_ids")] == [[7, 8]]
        assert [t for c in choices for t in c["token_ids"]] == [*b"Hel"]

    with_server(scenario)
