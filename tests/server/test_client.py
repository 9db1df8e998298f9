"""Connection of the client commands, against a tiny server of the test."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from octavo.server.client import Client, ServerError
from octavo.server.usage import Usage


class Handler(BaseHTTPRequestHandler):
    """Handler that sends the server's `answers`, and keeps the requests."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer(b"")

    def do_POST(self):
        self._answer(self.rfile.read(int(self.headers["content-length"])))

    def _answer(self, body):
        asked = json.loads(body) if body else None
        self.server.asked.append((self.path, self.headers.get("authorization"), asked))
        status, answer = self.server.answers[self.path]
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


def stream(*items):
    lines = [item if isinstance(item, str) else json.dumps(item) for item in items]
    return "".join(f"data: {line}\n\n" for line in lines).encode()


@pytest.fixture
def server():
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{made.server_port}/v1"
    made.asked = []
    made.answers = {
        "/v1/models": (200, b'{"data": [{"id": "first"}, {"id": "second"}]}'),
        "/v1/chat/completions": (
            200,
            stream(
                {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
                {"choices": [{"delta": {"content": "Grüß "}}]},
                ": a comment, not data",
                {"choices": [{"delta": {"content": "Gott"}}]},
                {"choices": [{"delta": {}, "finish_reason": "stop"}]},
                {"choices": [], "usage": {}},
                "[DONE]",
            ).replace(b"data: : a comment", b": a comment"),
        ),
        "/v1/completions": (200, stream({"choices": [{"text": " upon"}]}, "[DONE]")),
    }
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_chat_streams_from_the_first_model(server):
    client = Client(server.url + "/", "secret")
    messages = [{"role": "user", "content": "hi"}]
    assert list(client.chat(messages, {"temperature": 0}))[1:3] == ["Grüß ", "Gott"]
    client.close()
    (models, key, _), (path, _, body) = server.asked
    assert (models, key, path) == ("/v1/models", "Bearer secret", "/v1/chat/completions")
    assert body == {
        "model": "first",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": messages,
        "temperature": 0,
    }


def test_complete_with_a_named_model(server):
    client = Client(server.url, None, "second")
    assert list(client.complete("Once", {})) == [" upon"]
    client.close()
    ((path, key, body),) = server.asked
    assert (path, key) == ("/v1/completions", None)
    assert (body["model"], body["stream"], body["prompt"]) == ("second", True, "Once")


@pytest.mark.parametrize("shorten", [lambda url: url, lambda url: url[:-3], lambda url: url[7:-3]])
def test_an_address_may_be_short(server, shorten):
    """The address may lack /v1, and http://, too."""
    client = Client(shorten(server.url))
    assert client.model == "first"
    client.close()


@pytest.mark.parametrize(
    ("told", "usage"),
    [
        ({"prompt_tokens": 20, "completion_tokens": 4}, Usage(20, 4)),
        (
            {
                "prompt_tokens": 20,
                "completion_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 16},
            },
            Usage(20, 4, 16),
        ),
        (
            {"prompt_tokens": 20, "completion_tokens": 4, "prompt_tokens_details": None},
            Usage(20, 4),
        ),
        ({}, None),
        (None, None),
        ("many", None),
    ],
)
def test_tokens_are_the_servers_if_it_tells(server, told, usage):
    event = {"choices": [], "usage": told}
    server.answers["/v1/completions"] = (
        200,
        stream({"choices": [{"text": "a"}], "usage": None}, event, "[DONE]"),
    )
    client = Client(server.url)
    for _ in range(2):
        answer = client.complete("x", {})
        next(answer)
        assert client.usage is None  # not that of the answer before
        assert list(answer) == []
        assert client.usage == usage
    client.close()


def test_what_the_server_says_is_what_the_user_reads(server):
    error = json.dumps({"error": {"message": "too long by 5"}}).encode()
    server.answers["/v1/completions"] = (400, error)
    client = Client(server.url)
    with pytest.raises(ServerError, match="too long by 5"):
        list(client.complete("x", {}))
    server.answers["/v1/completions"] = (200, stream({"error": {"message": "died"}}, "[DONE]"))
    with pytest.raises(ServerError, match="died"):
        list(client.complete("x", {}))
    server.answers["/v1/completions"] = (502, b"<html>")
    with pytest.raises(ServerError, match="502"):
        list(client.complete("x", {}))
    server.answers["/v1/completions"] = (200, b"data: {nonsense\n\n")
    with pytest.raises(ServerError, match="OpenAI"):
        list(client.complete("x", {}))
    client.close()


def test_a_server_that_is_none(server):
    with pytest.raises(ServerError, match="octavo serve"):
        Client("http://127.0.0.1:1/v1")
    for url in ("nonsense", "http://[", "ftp://x"):
        with pytest.raises(ServerError):
            Client(url)
    server.answers["/v1/models"] = (200, b"[]")
    with pytest.raises(ServerError, match="model"):
        Client(server.url)
    server.answers["/v1/models"] = (401, b'{"error": {"message": "no key"}}')
    with pytest.raises(ServerError, match="no key"):
        Client(server.url)


def test_an_explanation_has_the_id_in_its_path(server):
    listed = {"id": "a", "path": "/v1/x", "created": 1.0, "seconds": 2.0, "completion_tokens": 3}
    found = listed | {"status": 200, "finished": True, "wall_ms": 2000.0, "first_token_ms": None}
    found |= {"timeline": [], "causes": [], "cache": {}, "advice": [], "later": "field"}
    server.answers["/v1/requests"] = 200, json.dumps({"data": [listed | {"status": None}]}).encode()
    server.answers["/v1/requests/a%2Fb%3F/explain"] = 200, json.dumps(found).encode()
    server.answers["/v1/requests/none/explain"] = 404, b'{"error": {"message": "not known"}}'
    server.answers["/v1/requests/odd/explain"] = 200, b"<html>"
    client = Client(server.url)
    assert [request.id for request in client.recent_requests().data] == ["a"]
    assert client.explain("a/b?").wall_ms == 2000.0
    with pytest.raises(ServerError, match="not known"):
        client.explain("none")
    with pytest.raises(ServerError, match="not the address of an Octavo server"):
        client.explain("odd")
    client.close()
