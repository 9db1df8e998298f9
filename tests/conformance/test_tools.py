"""The suite over HTTP: Octavo with a fake engine, servers with faults, and a parrot."""

import asyncio
import contextlib
import json
import threading

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response

from octavo.config import EngineConfig, ServerConfig
from octavo.conformance import parrot, tools
from octavo.conformance.cases import read_cases
from octavo.server.app import build_app
from octavo.server.state import ServerState
from tests.e2e.harness import free_port, serve
from tests.server import fake_engine
from tests.server.fake_engine import FakeAsyncLLM, make_tokenizer


class ForcedAsyncLLM(FakeAsyncLLM):
    """Fake engine whose answers are the choice that the request forces."""

    async def process(self, prompt, params, request_id, options, add_special_tokens):
        assert params.structured_outputs is not None
        (self.answer,) = params.structured_outputs.choice
        return await super().process(prompt, params, request_id, options, add_special_tokens)


@contextlib.contextmanager
def running(make_app):
    """Serve the app that an async function returns, in a thread; yield the address."""
    port, servers = free_port(), []
    ready = threading.Event()

    async def run():
        config = uvicorn.Config(await make_app(), port=port, log_level="error", lifespan="off")
        servers.append(uvicorn.Server(config))
        asyncio.get_running_loop().call_soon(ready.set)
        await servers[0].serve()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    ready.wait(120)
    try:
        while not servers[0].started:
            threading.Event().wait(0.01)
        yield f"127.0.0.1:{port}"
    finally:
        servers[0].should_exit = True
        thread.join(120)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_octavo_keeps_the_laws(name, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fake_engine, "MAX_MODEL_LEN", 8192)

    async def octavo():
        config = EngineConfig.from_kwargs(served_model_name=["fake"])
        engine = ForcedAsyncLLM(config, make_tokenizer())

        async def start():
            return engine

        flags = ServerConfig(tool_call_parser=name, reasoning_parser="qwen3")
        state = ServerState(flags, config, start)
        state.start()
        return build_app(state)

    file = tmp_path / "report.json"
    with running(octavo) as url:
        status = tools.main([url, "--format", name, "--long", "400", "--json", str(file)])
    report = json.loads(file.read_text())
    assert report["broken"] == report["not_forced"] == {}
    assert status == 0
    num_cases = len([case for case in read_cases() if case.format == name])
    assert report["laws"]["text"] == {"kept": num_cases, "tried": num_cases}
    assert report["laws"]["cut"]["tried"] >= 3
    assert report["laws"]["linear"]["tried"] == 1
    assert f"text          {num_cases} of  {num_cases}" in capsys.readouterr().out


CASE = next(case for case in read_cases() if case.id == "hermes/call")


def scripted(respond):
    """Return a maker of a server that answers chats with `respond(body)`."""

    async def make():
        app = FastAPI()

        @app.get("/v1/models")
        def models():
            return {"data": [{"id": "fake"}]}

        @app.post("/v1/chat/completions")
        async def chat(request: Request):
            return respond(await request.json())

        return app

    return make


def choice(written, **message):
    token = {"bytes": [*written.encode()]}
    return {
        "choices": [{"message": message, "finish_reason": "stop", "logprobs": {"content": [token]}}]
    }


@pytest.mark.parametrize(
    ("respond", "status", "said"),
    [
        (lambda body: Response("no grammar", 400), 2, "cannot be forced: call: HTTP 400"),
        (lambda body: Response("oops", 500), 1, "BROKEN hermes/call text: HTTP 500: oops"),
        (lambda body: Response("no JSON"), 1, "BROKEN hermes/call text: no JSON"),
        (lambda body: choice("Hello", content="Hello"), 2, "the model wrote 'Hello'"),
        (lambda body: {"choices": []}, 1, "BROKEN hermes/call text: no chat completion"),
        (lambda body: [1], 1, "BROKEN hermes/call text: no chat completion"),
        (
            lambda body: (
                Response('data: {"choices": [{"delta": 1}]}\n\n')
                if body.get("stream")
                else choice(CASE.text, content="")
            ),
            1,
            "BROKEN hermes/call text: no chat completion",
        ),
        (
            lambda body: choice(f"{body['structured_outputs']['choice'][0]} more", content=""),
            2,
            "cannot be forced",
        ),
        (
            lambda body: (
                Response('data: {"error": {"message": "died"}}\n\n')
                if body.get("stream")
                else choice(CASE.text + "<|end|>", content="")
            ),
            1,
            "BROKEN hermes/call text: error in the stream",
        ),
    ],
    ids=[
        "refused",
        "error",
        "no-json",
        "other-text",
        "empty",
        "list",
        "odd-stream",
        "longer-text",
        "error-in-stream",
    ],
)
def test_servers_with_faults(respond, status, said, capsys):
    with running(scripted(respond)) as url:
        assert tools.main([url, "--format", "hermes", "--only", "/call$"]) == status
    assert said in capsys.readouterr().out


def test_what_cannot_be_tried(capsys):
    assert tools.main(["127.0.0.1:1", "--format", "hermes"]) == 2
    assert "No OpenAI-compatible server answers" in capsys.readouterr().err
    for flags in (["--only", "("], ["--only", "zzz"], ["--long", "3"], ["--format", "x"]):
        with pytest.raises(SystemExit):
            tools.main(["127.0.0.1:1", "--format", "hermes", *flags])


def test_a_parrot(tmp_path, capsys):
    """It writes the marks as tokens, and its prompt has none of the text's."""
    template = tmp_path / "template.jinja"
    template.write_text(fake_engine.TEMPLATE + "{% if tools %}{% endif %}")
    folder = tmp_path / "parrot"
    assert parrot.main([str(folder), "--template", str(template)]) == 0
    flags = ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    only = "/(escapes|thought-between|marker-end)$"
    with serve(tmp_path, *flags, "--kv-cache-memory-bytes", "64M", model=str(folder)) as server:
        flags = ["--format", "hermes", "--force", "parrot", "--only", only]
        status = tools.main([server.url, *flags])
        out = capsys.readouterr().out
        assert status == 0, out
        assert "text           3 of   3" in out
        assert "cannot be forced" not in out
        case = CASE.filled(1)
        connection = tools.Server(server.url, force="parrot")
        with pytest.raises(tools.NotForcedError, match="repeats up to"):
            connection.whole(next(c for c in read_cases() if c.is_long).filled(5000))
        assert connection.whole(case).calls[0].name == "get_weather"
        connection.close()


def test_a_model_that_is_no_parrot(capsys):
    with running(scripted(lambda body: choice("Hello", content="Hello"))) as url:
        flags = ["--format", "hermes", "--force", "parrot", "--only", "/call$"]
        assert tools.main([url, *flags]) == 2
    assert "is no parrot" in capsys.readouterr().out
