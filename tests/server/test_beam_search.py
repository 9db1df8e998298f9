"""Beam search over HTTP."""

import asyncio
import json

import pytest

from tests.server.fake_engine import EOS, Call, FakeAsyncLLM, with_server


def test_completions():
    async def scenario(served):
        served.engine.num_cached_tokens = 2
        response = await served.complete(
            prompt="hi",
            use_beam_search=True,
            n=3,
            max_tokens=4,
            length_penalty=2.0,
            early_stopping="never",
            return_token_ids=True,
        )
        assert response.status_code == 200, response.text
        answer = response.json()
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
        assert [c["text"] for c in answer["choices"]] == ["HHHH", "HHHI", "HHIH"]
        assert {c["finish_reason"] for c in answer["choices"]} == {"length"}
        assert answer["choices"][1]["token_ids"] == [72, 72, 72, 73]
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["usage"]["completion_tokens"] == 12
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        (params,) = served.engine.beam_params
        assert (params.beam_width, params.max_tokens, params.ignore_eos) == (3, 4, False)
        assert (params.length_penalty, params.early_stopping) == (2.0, "never")
        # A beam for the first token, three for each of the others; all have candidates.
        requests = served.engine.requests
        assert len(requests) == 1 + 3 * 3
        assert {r.sampling_params.logprobs for r in requests} == {4}
        assert not served.engine.live

    with_server(scenario)


def test_chat():
    async def scenario(served):
        response = await served.chat(use_beam_search=True, n=2, max_tokens=3, temperature=0)
        answer = response.json()
        texts = [c["message"]["content"] for c in answer["choices"]]
        assert texts == ["HHH", "HHI"]
        assert {c["logprobs"] for c in answer["choices"]} == {None}
        assert answer["usage"]["completion_tokens"] == 6

    with_server(scenario)


def test_the_end_of_sequence():
    async def scenario(served):
        served.engine.answer = ""  # the most probable token is end-of-sequence
        answer = (await served.complete(use_beam_search=True, n=1, return_token_ids=True)).json()
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        assert choice["token_ids"] == [EOS]

    with_server(scenario)


def test_several_prompts_and_an_echo():
    async def scenario(served):
        answer = await served.complete(
            prompt=["a", "b"], use_beam_search=True, n=2, max_tokens=2, echo=True
        )
        found = [(c["index"], c["text"]) for c in answer.json()["choices"]]
        assert found == [(0, "aHH"), (1, "aHI"), (2, "bHH"), (3, "bHI")]
        calls = {r.options.turn for r in served.engine.requests}
        assert calls == {0, 1, 2, 3}  # the beams of one call take turns with other calls

    with_server(scenario)


def test_the_models_own_sampling_does_not_matter():
    async def scenario(served):
        assert (await served.complete(use_beam_search=True, n=2, max_tokens=2)).status_code == 200
        params = served.engine.requests[-1].sampling_params
        assert (params.temperature, params.top_p, params.repetition_penalty) == (0.0, 1.0, 1.0)

    defaults = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.2}
    with_server(scenario, engine=lambda: FakeAsyncLLM(generation_config=defaults))


CONTRADICTIONS = [
    {"temperature": 0.7},
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1},
    {"seed": 1},
    {"presence_penalty": 1.0},
    {"frequency_penalty": 1.0},
    {"repetition_penalty": 1.1},
    {"logit_bias": {"5": 1.0}},
    {"stop": "x"},
    {"stop_token_ids": [5]},
    {"bad_words": ["x"]},
    {"allowed_token_ids": [5]},
    {"min_tokens": 1},
    {"prompt_logprobs": 0},
    {"skip_special_tokens": False},
    {"truncate_prompt_tokens": 5},
    {"priority": 1},
    {"vllm_xargs": {"x": 1}},
    {"stream": True},
    {"n": 0},
    {"n": 65},
    {"n": 1000},
    {"length_penalty": 100.0},
]


@pytest.mark.parametrize("fields", CONTRADICTIONS, ids=lambda fields: json.dumps(fields))
def test_what_it_cannot_do_is_refused(fields):
    async def scenario(served):
        bodies = [served.complete, served.chat]
        for post in bodies:
            response = await post(use_beam_search=True, **fields)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == next(iter(fields))
        assert not served.engine.requests

    with_server(scenario)


def test_logprobs_are_refused():
    async def scenario(served):
        for response in (
            await served.complete(use_beam_search=True, logprobs=0),
            await served.chat(use_beam_search=True, logprobs=True),
        ):
            assert response.json()["error"]["param"] == "logprobs"
        response = await served.complete(use_beam_search=True, n=2, best_of=3)
        assert response.json()["error"]["param"] == "best_of"

    with_server(scenario)


def test_its_settings_need_it():
    async def scenario(served):
        for fields in ({"length_penalty": 2.0}, {"early_stopping": False}):
            response = await served.complete(**fields)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == next(iter(fields))

    with_server(scenario)


NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop": [],
    "logit_bias": {},
    "stream": False,
    "seed": None,
    "priority": 0,
    "skip_special_tokens": True,
}


def test_what_asks_for_nothing_passes():
    async def scenario(served):
        assert (await served.complete(use_beam_search=True, **NEUTRAL)).status_code == 200
        response = await served.chat(use_beam_search=True, logprobs=False, **NEUTRAL)
        assert response.status_code == 200
        response = await served.complete(use_beam_search=False, temperature=0.5, seed=1)
        assert response.status_code == 200

    with_server(scenario)


def test_a_client_that_goes_away_ends_its_beams():
    async def scenario(served):
        served.engine.step_time = 0.02  # time to examine the live requests
        body = {"prompt": "hi", "use_beam_search": True, "n": 4, "max_tokens": 8}
        call = Call(served, "/v1/completions", json.dumps(body).encode())
        while len(served.engine.live) < 4:
            await asyncio.sleep(0.001)
        served.engine.paused = True
        call.disconnect()
        await call.task
        assert not served.engine.live
        assert len(served.engine.aborted) >= 1

    with_server(scenario)


def test_too_many_beams_for_the_queue_are_refused():
    async def scenario(served):
        error = (await served.complete(use_beam_search=True, n=5)).json()["error"]
        assert error["param"] == "n"

    with_server(scenario, max_num_queued_reqs=4)
