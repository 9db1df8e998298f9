"""Streams through a router when a server is lost in the middle of them."""

import asyncio
import json
import re

import pytest

from octavo.config import EngineConfig, ServerConfig
from octavo.router.streams import MEDIA_TYPES, complete_parts
from octavo.server.app import build_app
from octavo.server.state import ServerState
from tests.router.servers import Routed
from tests.router.test_app import AppServer
from tests.router.test_proxy import BROKEN
from tests.server import fake_engine
from tests.server.fake_engine import FakeAsyncLLM, make_tokenizer
from tests.server.test_tools import ANSWER, TEMPLATE, TOOL

HI = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS = {
    "openai": [TOOL],
    "anthropic": [{"name": "add", "input_schema": TOOL["function"]["parameters"]}],
    "responses": [{"type": "function", **TOOL["function"]}],
}


@pytest.fixture(autouse=True)
def _long_prompts(monkeypatch):
    monkeypatch.setattr(fake_engine, "MAX_MODEL_LEN", 4096)


def run(test):
    """Run a coroutine function with a server of reasoning and calls."""

    async def go():
        settings = EngineConfig.from_kwargs(served_model_name=["fake"])
        engine = FakeAsyncLLM(settings, tokenizer=make_tokenizer(TEMPLATE))
        engine.answer = ANSWER

        async def start():
            return engine

        state = ServerState(ServerConfig(), settings, start)
        state.start()
        server = AppServer(build_app(state))
        try:
            await test(server)
        finally:
            await server.client.aclose()
            await state.close()

    asyncio.run(go())


def cut(server, at):
    """Return the answer of a server that breaks after a number of bytes, and of a whole one."""
    asked = []

    async def answer(request):
        asked.append(request)
        status, headers, (content,) = await server.answer(request)
        if len(asked) > 1:
            return status, headers, [content]
        return status, headers, [content[:at], BROKEN]

    return answer


def merged(text):
    """Return the choice that the events of a chat make up."""
    message = {"calls": {}, "reason": None}
    *lines, last = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert last == "[DONE]"
    for line in lines:
        event = json.loads(line)
        assert "error" not in event, event
        for choice in event["choices"]:
            message["reason"] = choice["finish_reason"] or message["reason"]
            for key, piece in choice["delta"].items():
                if key != "tool_calls":
                    message[key] = message.get(key, "") + piece
                    continue
                for call in piece:
                    known = message["calls"].setdefault(call["index"], {"arguments": ""})
                    known.update({k: call[k] for k in ("id", "type") if k in call})
                    function = call["function"]
                    known["arguments"] += function.get("arguments", "")
                    if "name" in function:
                        assert "name" not in known
                        known["name"] = function["name"]
    return message


def test_calls_and_reasoning_continue():
    """A chat has the same reasoning, text, calls and ids, wherever its server is lost."""

    async def test(server):
        body = HI | {"stream": True, "tools": TOOLS["openai"], "max_tokens": 300}
        path, headers = "/v1/chat/completions", {"x-request-id": "same"}
        direct = await server.client.post(path, json=body, headers=headers)
        message = merged(direct.text)
        assert len(message["calls"]) == 2
        assert message["reasoning"] == "I add."
        ends = [found.end() for found in re.finditer("\n\n", direct.text)]
        for at in [0, 5, *(end + extra for end in ends[::4] for extra in (0, 30))]:
            async with Routed([cut(server, at)] * 2) as router:
                got = await router.client.post(path, json=body, headers=headers)
                assert merged(got.text) == message, at

    run(test)


CASES = {
    "/v1/messages": HI | {"model": "fake", "max_tokens": 300, "tools": TOOLS["anthropic"]},
    "/v1/responses": {"input": "hi", "tools": TOOLS["responses"]},
    "/api/chat": HI | {"model": "fake", "tools": TOOLS["openai"]},
    "/api/generate": {"model": "fake", "prompt": "hi"},
}


@pytest.mark.parametrize("path", CASES)
def test_other_streams_end_with_their_own_error(path):
    """Complete events, and then an error as in the API; before the first event all is repeated."""
    ollama = path.startswith("/api/")
    end = b"\n" if ollama else b"\n\n"

    async def test(server):
        body = CASES[path] | {"stream": True}
        direct = (await server.client.post(path, json=body)).content
        first = direct.index(end) + len(end)
        middle = direct.index(end, len(direct) // 2) + len(end)
        for at in (first, first + 7, middle, middle + 3):
            async with Routed([cut(server, at)] * 2) as router:
                got = await router.client.post(path, json=body)
                assert got.status_code == 200
                *parts, last = [part for part in got.content.split(end) if part]
                sent = direct[:at].count(end)
                assert len(parts) == sent
                data = last if ollama else last.partition(b"data: ")[2]
                error = json.loads(data)
                if ollama:
                    assert "was lost" in error["error"]
                elif path == "/v1/messages":
                    assert last.startswith(b"event: error\n")
                    assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")
                else:
                    assert last.startswith(b"event: error\n")
                    assert (error["type"], error["code"]) == ("error", "unavailable")
                    numbers = [json.loads(p.partition(b"data: ")[2]) for p in parts]
                    assert error["sequence_number"] == numbers[-1]["sequence_number"] + 1
        async with Routed([cut(server, first - 2)] * 2) as router:
            got = await router.client.post(path, json=body)
            assert got.content.count(end) == direct.count(end)
            assert b"was lost" not in got.content

    run(test)


def test_lines_are_not_held_back():
    """The client has each line of Ollama's stream before the server sends the next one."""

    async def test():
        more = asyncio.Event()

        def answer(request):
            headers = {"content-type": "application/x-ndjson"}
            return 200, headers, [b'{"a":1}\n', more, b'{"b":2}\n']

        async with Routed([answer]) as router:
            sent = asyncio.Queue()
            job = {"method": "POST", "path": "/api/chat", "raw_path": b"/api/chat"}
            scope = {
                **job,
                "type": "http",
                "query_string": b"",
                "headers": [(b"content-type", b"application/json"), (b"host", b"router")],
            }
            body = [{"type": "http.request", "body": b"{}", "more_body": False}]

            async def receive():
                if not body:
                    await asyncio.Event().wait()
                return body.pop()

            app = router.client._transport.app
            task = asyncio.create_task(app(scope, receive, sent.put))
            start, first = await sent.get(), await sent.get()
            assert (start["status"], first["body"]) == (200, b'{"a":1}\n')
            more.set()
            assert (await sent.get())["body"] == b'{"b":2}\n'
            await task

    asyncio.run(test())


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_parts_are_complete_however_they_come(size):
    data = b"event: a\ndata: 1\n\ndata: 2\r\n\r\ndata: 3\n\nrest"

    async def chunks():
        for i in range(0, len(data), size):
            yield data[i : i + size]

    async def read(limit=100):
        end = MEDIA_TYPES["text/event-stream"]
        return [part async for parts in complete_parts(chunks(), end, limit) for part in parts]

    parts = asyncio.run(read())
    assert b"".join(parts) == data
    assert len(parts) == 4
    if size < 10:
        with pytest.raises(ValueError, match="more than 10 bytes"):
            asyncio.run(read(10))
