"""Answers with many logprobs are written on a thread, a choice at a time: the same JSON."""

import asyncio
import json
import threading

import pytest

from octavo.server import body, generation
from octavo.server.schema import CompletionBody
from octavo.text.tokenizer import Tokenizer
from tests.server.fake_engine import Call, with_server

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


@pytest.mark.parametrize(("n", "max_tokens", "at_once"), [(20, 100, True), (23, 87, False)])
def test_how_many_logprobs_are_many(n, max_tokens, at_once):
    """More than 2000 candidates in all; here each token has one."""

    async def scenario(served):
        served.engine.answer = "x" * 200
        response = await served.complete(logprobs=0, n=n, max_tokens=max_tokens)
        assert ("content-length" in response.headers) == at_once
        tokens = [choice["logprobs"]["tokens"] for choice in response.json()["choices"]]
        assert [len(found) for found in tokens] == [max_tokens] * n

    with_server(scenario)


@pytest.mark.parametrize(
    ("fields", "candidates", "at_once"),
    [
        ({"logprobs": 2}, 2 * 2 * 4 * 3, 4 * 3),
        ({"logprobs": 0}, 2 * 2 * 4, 4),
        # All tokens of the prompts "ab" and "c" but the first, <s>.
        ({"prompt_logprobs": 1}, (2 + 1) * 2, 2 * 2),
        ({"logprobs": 2, "prompt_logprobs": 1}, 48 + 6, 12 + 4),
    ],
)
def test_an_answer_counts_until_it_has_been_sent(fields, candidates, at_once, monkeypatch):
    monkeypatch.setattr(generation, "_MANY_CANDIDATES", 0)
    data = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 4, **fields}

    async def scenario(served):
        call = Call(served, "/v1/completions", json.dumps(data).encode())
        held, goes_on, send = [], asyncio.Event(), call.send

        async def slow(message):
            held.append(served.engine.request_memory.used)
            await goes_on.wait()
            await send(message)

        call.send = slow
        while not held:
            await asyncio.sleep(0.001)
        # All of them as numbers, and as JSON those of the choice that is being written.
        assert held == [candidates * 8 + at_once * 512]
        goes_on.set()
        await call.task
        assert served.engine.request_memory.used == 0
        assert call.status == 200
        assert len(json.loads(call.body)["choices"]) == 4

    with_server(scenario)


def test_headers_of_a_stream_and_of_an_answer():
    async def scenario(served):
        for stream in (True, False):
            response = await served.complete(stream=stream, request_id="mine")
            found = dict(response.headers)
            expected = {"x-request-id": "mine"}
            if stream:
                expected["content-type"] = "text/event-stream; charset=utf-8"
                expected |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
            else:
                expected["content-type"] = "application/json"
                expected["content-length"] = str(len(response.content))
            assert found == expected

    with_server(scenario)


LONG_WORK = {
    "parsing": (
        body,
        "parse_json",
        "/v1/completions",
        lambda n: {"prompt": "a", "user": "x" * 8 * n},
    ),
    "tokenizing": (Tokenizer, "encode", "/tokenize", lambda n: {"prompt": "x" * n}),
    "detokenizing": (Tokenizer, "decode", "/detokenize", lambda n: {"tokens": [100] * n}),
    "checking ids": (
        CompletionBody,
        "sampling_params",
        "/v1/completions",
        lambda n: {"prompt": "a", "allowed_token_ids": [100] * n},
    ),
    "checking lists": (
        CompletionBody,
        "sampling_params",
        "/v1/completions",
        lambda n: {
            "prompt": "a",
            "allowed_token_ids": [100] * (n - n // 3),
            "stop_token_ids": [100] * (n // 3),
        },
    ),
}


@pytest.mark.parametrize("name", LONG_WORK)
def test_what_takes_milliseconds_is_done_on_a_thread(name, monkeypatch):
    owner, function, path, make = LONG_WORK[name]
    original, threads = getattr(owner, function), []

    def noted(*args, **kwargs):
        threads.append(threading.current_thread() is threading.main_thread())
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, function, noted)

    async def scenario(served):
        for n in (1000, 3000):
            assert (await served.post(path, **make(n))).status_code == 200
        assert threads == [True, False]

    with_server(scenario)
