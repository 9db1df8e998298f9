"""Answers with many logprobs are written on a thread, a choice at a time: the same JSON."""

import json

import pytest

from octavo.server import generation
from tests.server.fake_engine import with_server

BODIES = {
    "completion": ("/v1/completions", {"prompt": ["ab", "c"], "n": 2, "logprobs": 3}),
    "echo": ("/v1/completions", {"prompt": "abc", "echo": True, "logprobs": 2, "n": 2}),
    "prompt": ("/v1/completions", {"prompt": "abc", "prompt_logprobs": 2, "n": 3}),
    "chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "logprobs": True,
            "top_logprobs": 3,
            "prompt_logprobs": 1,
            "n": 2,
        },
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_the_answer_is_the_same(name, monkeypatch):
    path, body = BODIES[name]
    answers = []

    async def scenario(served):
        response = await served.post(path, **body, request_id="mine", max_tokens=4)
        assert response.status_code == 200
        answers.append((response.headers.get("content-length"), response.json()))
        assert served.engine.request_memory.used == 0

    with_server(scenario)
    monkeypatch.setattr(generation, "_MANY_CANDIDATES", 0)
    with_server(scenario)
    for _, answer in answers:
        del answer["created"]
    assert answers[0][1] == answers[1][1]
    assert answers[0][0] is not None
    assert answers[1][0] is None  # it was written while it was sent


def test_streams_are_the_same(monkeypatch):
    answers = []

    async def scenario(served):
        response = await served.post(
            "/v1/completions", prompt="a", logprobs=3, n=2, stream=True, max_tokens=5
        )
        found = {0: [], 1: []}
        for line in response.text.split("\n"):
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    found[choice["index"]] += choice["logprobs"]["top_logprobs"]
        answers.append(found)

    with_server(scenario)
    monkeypatch.setattr(generation, "_MANY_CANDIDATES", 0)
    with_server(scenario)
    assert answers[0] == answers[1]
    assert [len(rows) for rows in answers[0].values()] == [5, 5]
