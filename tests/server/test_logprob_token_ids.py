"""logprob_token_ids in both kinds of answers: the token itself, then the ids in order."""

import json

import pytest

from tests.server.fake_engine import events, with_server

ASKED = [97, 5, 98]


@pytest.mark.parametrize("stream", [False, True])
def test_completions_give_the_logprobs_of_these_tokens(stream):
    async def scenario(served):
        served.engine.answer = "ab"
        body = {"logprobs": 1, "logprob_token_ids": ASKED, "return_tokens_as_token_ids": True}
        response = await served.complete(stream=stream, **body)
        answers = [json.loads(e) for e in await events(response)] if stream else [response.json()]
        found = [a["choices"][0]["logprobs"] for a in answers]
        tops = [top for logprobs in found for top in logprobs["top_logprobs"]]
        tokens = [token for logprobs in found for token in logprobs["tokens"]]
        assert tokens == ["token_id:97", "token_id:98", "token_id:257"]
        for token, top in zip(tokens, tops, strict=True):
            ids = dict.fromkeys([token, *(f"token_id:{i}" for i in ASKED)])
            assert list(top) == list(ids)
            assert top == {name: -0.25 * int(name[9:]) for name in ids}

    with_server(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_chats_do_too(stream):
    async def scenario(served):
        served.engine.answer = "ab"
        response = await served.chat(stream=stream, logprobs=True, logprob_token_ids=ASKED)
        answers = [json.loads(e) for e in await events(response)] if stream else [response.json()]
        found = [a["choices"][0]["logprobs"] for a in answers if a["choices"][0]["logprobs"]]
        content = [token for logprobs in found for token in logprobs["content"]]
        assert [c["token"] for c in content] == ["a", "b", "</s>"]
        for token in content:
            own = token["bytes"][0] if len(token["bytes"]) == 1 else 257
            ids = list(dict.fromkeys([own, *ASKED]))
            assert [top["logprob"] for top in token["top_logprobs"]] == [-0.25 * i for i in ids]

    with_server(scenario)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"logprob_token_ids": [5]}, "needs logprobs"),
        ({"logprob_token_ids": [258]}, "out of vocabulary: this model has 258 tokens"),
        ({"logprob_token_ids": list(range(129))}, "at most 128"),
        ({"logprob_token_ids": [5], "use_beam_search": True, "n": 2}, "use_beam_search"),
    ],
    ids=range(4),
)
def test_what_is_refused(body, says):
    async def scenario(served):
        logprobs = {} if says == "needs logprobs" else {"logprobs": 1}
        chat = {} if says == "needs logprobs" else {"logprobs": True}
        beams = {"logprobs": None} if "use_beam_search" in body else {}
        for answer in (
            await served.complete(**logprobs | body | beams),
            await served.chat(**chat | body | beams),
        ):
            error = answer.json()["error"]
            assert answer.status_code == 400
            assert error["param"] == "logprob_token_ids"
            assert says in error["message"]

    with_server(scenario)


def test_an_empty_list_asks_for_nothing():
    async def scenario(served):
        answer = (await served.complete(logprobs=2, logprob_token_ids=[])).json()
        assert len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) == 2
        assert (await served.chat(logprob_token_ids=[])).status_code == 200

    with_server(scenario)
