"""Fuzzer of the API in a small form: in this process, against a fake engine."""

import asyncio
import collections
import json

import fuzz_api
import pytest

from octavo.config import EngineConfig, ServerConfig
from octavo.server.app import build_app
from octavo.server.state import ServerState
from tests.server.fake_engine import FakeAsyncLLM


class InProcess:
    """Client that sends requests to the application itself."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        config = EngineConfig.from_kwargs(
            served_model_name=["fuzzed"], max_logprobs=-1, profiler_dir="/x"
        )
        self.engine: FakeAsyncLLM

        async def start() -> FakeAsyncLLM:
            self.engine = FakeAsyncLLM(config)
            return self.engine

        async def begin() -> None:
            self.state.start()
            await self.state.get_engine()

        settings = ServerConfig(
            max_request_bytes=65536, max_num_queued_reqs=48, enable_admin=True, host="localhost"
        )
        self.state = ServerState(settings, config, start)
        self.app = build_app(self.state)
        runner.run(begin())

    def send(self, request: fuzz_api.Request) -> tuple[int, dict[str, str], bytes]:
        return self._runner.run(asyncio.wait_for(self._send(request), 100))

    async def _send(self, request: fuzz_api.Request) -> tuple[int, dict[str, str], bytes]:
        path, _, query = request.target.partition(b"?")
        headers = [(b"host", b"localhost"), *((n.lower(), v) for n, v in request.headers)]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": path.decode("latin-1"),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "client": ("10.0.0.1", 1),
            "server": ("localhost", 80),
        }
        sent = []
        unread = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive():
            if not unread:
                await asyncio.Event().wait()
            return unread.pop()

        async def send(message):
            sent.append(message)

        await self.app(scope, receive, send)
        start, *bodies = sent
        found = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        return start["status"], found, b"".join(m.get("body", b"") for m in bodies)

    def close(self) -> None:
        self._runner.run(self.state.close())


@pytest.fixture
def server():
    with asyncio.Runner() as runner:
        made = InProcess(runner)
        yield made
        made.close()


def description_of(server):
    return json.loads(server.send(fuzz_api.get("/openapi.json"))[2])


def test_no_request_gets_a_5xx(server):
    _, _, before = server.send(fuzz_api.HEALTHY)
    statuses = fuzz_api.fuzz(description_of(server), server.send, 400, seed=1)
    assert statuses.total() >= 400
    # Valid and invalid requests reach each check.
    numbers = collections.Counter()
    for (_, status), count in statuses.items():
        numbers[status] += count
    assert numbers[200] > 20
    assert numbers[400] > 20
    assert numbers[415] > 0
    _, _, after = server.send(fuzz_api.HEALTHY)
    assert json.loads(after)["choices"] == json.loads(before)["choices"]
    assert server.engine.num_unfinished_requests == 0
    assert server.state.num_active == 0
    assert server.state._num_admitted == 0


def test_a_fault_is_found_and_shrunk(server):
    description = description_of(server)
    # Hypothesis' draws depend on the imported modules; with all routes, few are good for this one.
    few = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
    description["paths"] = {path: description["paths"][path] for path in few}
    server.engine.tokenizer.decode = None  # /detokenize fails for every request
    with pytest.raises(fuzz_api.FuzzError, match=r"status 500 .*detokenize.*tokens.*: \[\]"):
        fuzz_api.fuzz(description, server.send, 1000, seed=1)


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (503, "application/json", b'{"error":{"message":"x","type":"t","param":null,"code":null}}'),
        (400, "application/json", b'{"detail":"x"}'),
        (418, "application/json", b'{"error":{"message":"x","type":"t","param":null,"code":null}}'),
        (200, "application/json", b'{"choices":[]}'),
        (200, "text/event-stream", b"data: {}\n\ndata: [DONE]\n\n"),
        (200, "text/event-stream", b"data: [DONE]\n"),
        (
            200,
            "text/event-stream",
            b'data: {"error":{"message":"x","type":"server_error","param":null,"code":null}}\n\n'
            b"data: [DONE]\n\n",
        ),
    ],
)
def test_answers_that_may_not_be(status, kind, body):
    with pytest.raises(fuzz_api.FuzzError):
        fuzz_api.check(fuzz_api.HEALTHY, status, {"content-type": kind}, body)
