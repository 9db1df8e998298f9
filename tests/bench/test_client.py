"""The streaming client against good, bad and silent servers."""

import asyncio
import socket

import pytest

from octavo.bench.client import Client, is_chat
from octavo.bench.datasets import BenchRequest
from octavo.errors import ConfigError
from tests.bench.fake_openai import (
    DONE,
    HEADERS,
    chunk,
    event,
    fake_server,
    fixed,
    good,
    plain,
    silent,
    token,
    usage,
)

REQUEST = BenchRequest([1, 2, 3], None, 4)


def send(script, request=REQUEST, **settings):
    with fake_server(script) as server:
        record = asyncio.run(Client(server.url, "fake", **settings).send(request))
    return record, server


def test_a_good_answer():
    record, server = send(good(), params={"temperature": 0.0, "ignore_eos": True}, keep_text=True)
    assert record.error is None
    assert (record.num_prompt_tokens, record.num_output_tokens) == (3, 4)
    assert record.num_cached_tokens == 1
    assert record.text == "t0 t1 t2 t3 "
    assert len(record.token_times) == 4
    assert sorted(record.token_times) == record.token_times
    assert record.start_time == 0 < record.ttft <= record.e2el
    assert server.bodies == [
        {
            "model": "fake",
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "ignore_eos": True,
            "prompt": [1, 2, 3],
        }
    ]


def test_texts_are_sent_as_texts_and_keys_as_bearer_tokens():
    _, server = send(good(), BenchRequest([1], "Once", 1), api_key="secret")
    assert server.bodies[0]["prompt"] == "Once"
    assert b"Authorization: Bearer secret\r\n" in server.heads[0]


def test_chats():
    def delta(finish=None, **fields):
        return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})

    opening = delta(role="assistant", content="")
    script = fixed(
        HEADERS, opening, delta(content=""), delta(content="Hi"), delta("stop"), usage(9, 2), DONE
    )
    record, server = send(
        script, BenchRequest([1], "Once", 2), endpoint="/v1/chat/completions", keep_text=True
    )
    # The opening piece is no token; a piece without text yet is.
    assert (record.error, record.num_output_tokens, len(record.token_times)) == (None, 2, 2)
    assert record.text == "Hi"
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "Once"}]
    assert "prompt" not in server.bodies[0]
    assert server.heads[0].startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")


def test_a_last_token_without_text_counts():
    record, _ = send(fixed(HEADERS, token("a"), token("", "length"), usage(3, 2), DONE))
    assert (record.num_output_tokens, len(record.token_times)) == (2, 2)


def test_a_finish_of_its_own_does_not_count():
    record, _ = send(fixed(HEADERS, token("a"), token("b"), token("", "stop"), usage(3, 2), DONE))
    assert len(record.token_times) == 2


def test_without_usage_tokens_are_counted():
    record, _ = send(
        fixed(HEADERS, token("a"), token("bc", token_ids=[5, 6]), token("d", "stop"), DONE)
    )
    assert (record.num_prompt_tokens, record.num_output_tokens) == (3, 4)
    assert len(record.token_times) == 3


def test_events_in_pieces():
    """Events may be cut anywhere, by chunks of HTTP and by reads of the socket."""
    body = b"".join([token("ä"), token("b", "stop"), usage(3, 2), DONE])
    record, _ = send(fixed(HEADERS, *(body[i : i + 1] for i in range(len(body)))))
    assert (record.error, record.num_output_tokens) == (None, 2)
    data = b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\r\n\r\ndata: [DONE]\r\n\r\n'
    pieces = [chunk(data[i : i + 7]) for i in range(0, len(data), 7)]
    record, _ = send(fixed(HEADERS, *pieces))
    assert (record.error, record.num_output_tokens) == (None, 1)


def test_without_done_but_whole():
    record, _ = send(fixed(HEADERS, token("a", "stop"), b"0\r\n\r\n"))
    assert record.error is None


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (fixed(), "closed the connection without an answer"),
        (fixed(HEADERS), "closed the connection in the middle"),
        (fixed(HEADERS, token("a")), "closed the connection in the middle"),
        (fixed(HEADERS, token("a"), DONE), "ended before the answer did"),
        (fixed(HEADERS, usage(3, 0), token("", "stop"), DONE), "no tokens"),
        (fixed(b"220 mail.example.org ESMTP\r\n"), "not HTTP"),
        (fixed(plain(b"<html>hello")), "not a stream of events: b'<html>hello'"),
        (fixed(plain(b"[]", content_type="application/json")), "not a stream"),
        (fixed(HEADERS, chunk(b"data: {oops\n\n")), "not OpenAI's: b'{oops'"),
        (fixed(HEADERS, event({"choices": 3})), "not OpenAI's"),
        (fixed(HEADERS, event([1])), "not OpenAI's"),
        (fixed(HEADERS, chunk(b"data: \xff\n\n")), "not OpenAI's"),
        (fixed(HEADERS, event({"error": {"message": "died"}}), DONE), "failed in its answer: died"),
        (fixed(HEADERS, *[chunk(b"x" * 60_000)] * 20), "more than 1048576 bytes"),
        (
            fixed(plain({"error": {"message": "too long"}}, "400 Bad Request")),
            "HTTP 400: too long",
        ),
        (fixed(plain(b"oh no", "500 Internal Server Error")), "HTTP 500: b'oh no'"),
        (fixed(plain({"detail": "x"}, "422 U")), "HTTP 422: {'detail': 'x'}"),
        (fixed(b"HTTP/1.1 503 Busy\r\nConnection: close\r\n\r\n"), "HTTP 503"),
    ],
)
def test_failures_become_errors(script, message):
    record, _ = send(script)
    assert message in record.error


def test_a_silent_server():
    record, _ = send(silent, timeout=0.05)
    assert record.error == "The answer did not end within 0.05 s."


def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        client = Client(f"http://127.0.0.1:{taken.getsockname()[1]}", "fake")
        record = asyncio.run(client.send(REQUEST, scheduled_time=2.5))
    assert record.error.startswith("Cannot connect: ")
    assert record.scheduled_time == 2.5
    assert record.token_times == []


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port", ""])
def test_wrong_addresses(url):
    with pytest.raises(ConfigError, match="is not an address"):
        Client(url, "fake")


def test_paths_of_the_base_url_are_kept():
    with fake_server(good()) as server:
        asyncio.run(Client(f"{server.url}/proxy/", "fake").send(REQUEST))
    assert server.heads[0].startswith(b"POST /proxy/v1/completions HTTP/1.1\r\n")


def test_cancelling_closes_the_connection():
    async def scenario(server):
        request = BenchRequest([1, 2, 3], None, 4000)
        sending = asyncio.create_task(Client(server.url, "fake").send(request))
        while not server.bodies:
            await asyncio.sleep(0.005)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        while server.num_open:  # a piece of the answer finds the connection closed
            await asyncio.sleep(0.005)

    with fake_server(good(step_time=0.05)) as server:  # the whole answer takes minutes
        asyncio.run(asyncio.wait_for(scenario(server), 60))
    assert len(server.bodies) == 1


def test_is_chat():
    assert is_chat("/v1/chat/completions/")
    assert not is_chat("/v1/completions")
