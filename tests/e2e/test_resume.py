"""Streams of a real server whose clients lose their connections, and whose engine is killed."""

import json
import signal

import httpx
import openai
import pytest

from octavo.server.client import Client
from tests.e2e.harness import Server, serve

BODY = {
    "model": "octavo/stories",
    "max_tokens": 300,
    "ignore_eos": True,
    "temperature": 0.8,
    "seed": 7,
    "stream": True,
    "stream_options": {"include_usage": True},
}
COMPLETION = {**BODY, "prompt": "Once upon a time", "n": 2, "logprobs": 2}
REQUESTS = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": {**BODY, "messages": [{"role": "user", "content": "A story, please."}]},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ["--max-model-len", "512", "--kv-cache-memory-bytes", "24M", "--resume-grace", "120"]
    with serve(tmp_path_factory.mktemp("resume"), *flags, spare=True) as server:
        yield server


def begin(server: Server, path: str, num_events: int = 10, last: str | None = None) -> bytes:
    """Send a request, or the same one again; disconnect after some events."""
    headers = {} if last is None else {"Last-Event-ID": last}
    found = b""
    with httpx.stream(
        "POST", server.url + path, json=REQUESTS[path], headers=headers, timeout=120
    ) as response:
        assert response.status_code == 200
        for piece in response.iter_raw():
            found += piece
            if found.count(b"\n\n") >= num_events:
                break
    events = found.split(b"\n\n")[:-1]  # a truncated event does not count
    return b"".join(event + b"\n\n" for event in events[:num_events])


def last_id(events: bytes) -> str:
    return [line for line in events.split(b"\n") if line.startswith(b"id: ")][-1][4:].decode()


def content(events: bytes) -> tuple[list[str], list[list[float]], object]:
    """Return texts, logprobs and usage, which do not depend on the tokens of an event."""
    texts, logprobs, usage = ["", ""], [[], []], None
    *parts, done, nothing = events.split(b"\n\n")
    assert done.endswith(b"data: [DONE]")
    assert not nothing
    for part in parts:
        event = json.loads(part.partition(b"data: ")[2])
        usage = event["usage"] or usage
        for choice in event["choices"]:
            texts[choice["index"]] += (
                choice["text"] if "text" in choice else choice["delta"]["content"]
            )
            if choice["logprobs"] is not None:
                logprobs[choice["index"]] += choice["logprobs"]["token_logprobs"]
    return texts, logprobs, usage


@pytest.fixture(scope="module")
def undisturbed(server):
    """Return the undisturbed answer to each request."""
    return {path: content(begin(server, path, 10**6)) for path in REQUESTS}


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("killed", [False, True], ids=["", "killed"])
def test_who_comes_back_gets_the_bytes_of_an_undisturbed_stream(server, undisturbed, path, killed):
    first = begin(server, path, 3)  # a server that is slower than its engine sends few events
    assert b"[DONE]" not in first
    restarts = server.metric("octavo:engine_restarts_total")
    if killed:
        server.engine_process().send_signal(signal.SIGKILL)
    second = begin(server, path, 3, last_id(first))
    name = last_id(first).rpartition(":")[0]
    third = httpx.get(
        f"{server.url}/v1/streams/{name}", headers={"Last-Event-ID": last_id(second)}, timeout=120
    )
    assert third.status_code == 200
    events = first + second + third.content
    server.wait_for_metric("octavo:engine_restarts_total", restarts + killed)
    assert content(events) == undisturbed[path]
    assert httpx.get(f"{server.url}/v1/streams/{name}?from=0", timeout=120).content == events
    assert server.get(f"/v1/streams/{name}x").status_code == 404


def test_clients_read_events_with_ids(server, undisturbed):
    expected, _, usage = undisturbed["/v1/completions"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(
            client.completions.create(model="", prompt="", stream=True, extra_body=COMPLETION)
        )
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected
    assert chunks[-1].usage.completion_tokens == usage["completion_tokens"]
    own = Client(server.url)
    assert sorted("".join(own.complete("", COMPLETION))) == sorted("".join(expected))
    own.close()
