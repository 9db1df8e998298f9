"""Description at /openapi.json, compared with the server's behaviour."""

import json
import re
from http import HTTPStatus

import pytest
from pydantic import TypeAdapter

from octavo.config import EngineConfig
from octavo.server import answers
from octavo.server.app import ROUTES
from octavo.server.openapi import OPERATIONS, operation_of
from tests.server.fake_engine import FakeAsyncLLM, events, with_server


def profiled_engine():
    settings = {"profiler_dir": "/x", "enable_sleep_mode": True}
    return FakeAsyncLLM(EngineConfig.from_kwargs(served_model_name=["fake"], **settings))


def refs(value):
    """Return all references in a JSON value."""
    if isinstance(value, dict):
        yield from (v for k, v in value.items() if k == "$ref")
        for item in value.values():
            yield from refs(item)
    elif isinstance(value, list):
        for item in value:
            yield from refs(item)


def test_every_address_is_described():
    async def scenario(served):
        description = (await served.http.get("/openapi.json")).json()
        again = (await served.http.get("/openapi.json")).json()
        assert again == description
        assert set(description["paths"]) == {
            key.rpartition(" ")[2].replace(":path", "") for key in OPERATIONS
        }
        schemas = description["components"]["schemas"]
        for ref in refs(description):
            assert ref.removeprefix("#/components/schemas/") in schemas
        for path, _, method in ROUTES:
            shown, known = path.replace(":path", ""), operation_of(path, method)
            operation = description["paths"][shown].pop(method.lower())
            named = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", shown))
            assert ("requestBody" in operation) == (
                known.body is not None or known.form is not None
            )
            answers_ = operation["responses"]
            assert "200" in answers_
            for status, response in answers_.items():
                assert response["description"]
                if status == "204":
                    assert response["content"] == {}
                elif int(status) >= 400 and not (
                    path in ("/health", "/ping", "/ready") and status == "503"
                ):
                    schema = {"$ref": f"#/components/schemas/{known.error.__name__}"}
                    assert response["content"] == {"application/json": {"schema": schema}}
                else:
                    assert response["content"]
            assert {"400", "421", "500"} <= set(answers_)
            if method == "POST" and path not in ("/ping", "/v1/batches/{batch_id}/cancel"):
                assert {"401", "415", "503"} <= set(answers_)
        assert not any(description["paths"].values()), "a method that no route has"
        description = again
        for path in ("/v1/completions", "/v1/chat/completions"):
            content = description["paths"][path]["post"]["responses"]["200"]["content"]
            assert set(content) == {"application/json", "text/event-stream"}

    with_server(scenario)


KEYED = {400, 401, 421, 500, 503}
POSTED = {*KEYED, 200, 404, 408, 413, 415, 429}
OPERATORS = {*KEYED, 200, 403, 415}
STATUSES = {
    "/": {*KEYED, 200},
    "/health": {200, 400, 421, 500, 503},
    "/ready": {200, 400, 421, 500, 503},
    "/ping": {200, 400, 421, 500, 503},
    "/load": {200, 400, 421, 500},
    "/version": {200, 400, 421, 500},
    "/metrics": {200, 400, 421, 500},
    "/v1/models": {*KEYED, 200},
    "/v1/models/{model}": {*KEYED, 200, 404},
    "/v1/completions": POSTED,
    "/v1/chat/completions": POSTED,
    "/invocations": POSTED,
    "/v1/streams/{stream_id}": {*KEYED, 200, 204, 404},
    "/tokenizer_info": {*KEYED, 200, 404},
    "/server_info": {*KEYED, 200, 403},
    "/v1/files": {*POSTED, 403, 507},
    "/v1/files/{file_id}": {*KEYED, 200, 404},
    "/v1/files/{file_id}/content": {*KEYED, 200, 404},
    "/v1/batches": {*POSTED, 507},
    "/v1/batches/{batch_id}": {*KEYED, 200, 404},
    "/v1/batches/{batch_id}/cancel": {*KEYED, 200, 403, 404, 409, 507},
    "/v1/chat/completions/render": POSTED,
    "/tokenize": POSTED,
    "/detokenize": POSTED,
    "/reset_prefix_cache": OPERATORS,
    "/reset_encoder_cache": OPERATORS,
    "/reset_mm_cache": OPERATORS,
    "/sleep": {*OPERATORS, 404},
    "/wake_up": {*OPERATORS, 404},
    "/is_sleeping": {*KEYED, 200, 403, 404},
    "/scale_elastic_ep": {*POSTED, 403, 409},
    "/is_scaling_elastic_ep": {*OPERATORS, 404},
    "/start_profile": {*OPERATORS, 404, 409},
    "/stop_profile": {*OPERATORS, 404, 409},
}


def test_each_status_and_what_comes_with_it():
    def ref(name):
        return {"$ref": f"#/components/schemas/{name}"}

    async def scenario(served):
        paths = (await served.http.get("/openapi.json")).json()["paths"]
        for path, statuses in STATUSES.items():
            operation, *_ = paths[path].values()
            found = operation["responses"]
            assert {int(status) for status in found} == statuses, path
            for status, response in found.items():
                assert response["description"] == HTTPStatus(int(status)).phrase
        for path, name in (("/health", "Health"), ("/ready", "Readiness")):
            for status in ("200", "503"):
                content = paths[path]["get"]["responses"][status]["content"]
                assert content == {"application/json": {"schema": ref(name)}}
        metrics = paths["/metrics"]["get"]["responses"]["200"]["content"]
        assert metrics["text/plain"] == {"schema": {"type": "string"}}
        for path, kind in (("/v1/completions", "Completion"), ("/v1/chat/completions", "Chat")):
            post = paths[path]["post"]
            assert post["requestBody"] == {
                "required": True,
                "content": {"application/json": {"schema": ref(f"{kind}Body")}},
            }
            content = post["responses"]["200"]["content"]
            assert content["application/json"] == {"schema": ref(f"{kind}Answer")}
            stream = content["text/event-stream"]["schema"]
            assert stream["type"] == "string"
            assert stream["x-event-schema"] == {"anyOf": [ref(f"{kind}Chunk"), ref("ErrorAnswer")]}
        assert set(paths["/tokenize"]["post"]["responses"]["200"]["content"]) == {
            "application/json"
        }
        assert paths["/v1/models/{model}"]["get"]["parameters"] == [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
        start = {"type": "integer", "minimum": 0, "default": 0}
        assert paths["/v1/streams/{stream_id}"]["get"]["parameters"] == [
            {"name": "stream_id", "in": "path", "required": True, "schema": {"type": "string"}},
            {"name": "from", "in": "query", "schema": start},
        ]
        assert "parameters" not in paths["/v1/models"]["get"]

    with_server(scenario)


REQUESTS = [
    {},
    {"n": 2, "logprobs": True, "top_logprobs": 2},
    {"prompt_logprobs": 1, "return_token_ids": True},
    {"echo": True, "logprobs": 2},
    {"stop": "l"},
    {"stop_token_ids": [108]},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream_options": {"include_usage": True}, "return_token_ids": True},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", REQUESTS, ids=str)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answers_are_as_described(path, fields, stream):
    chat = path == "/v1/chat/completions"
    body = {"max_tokens": 5, "stream": stream, **fields}
    if chat:
        body["messages"] = [{"role": "user", "content": "hi"}]
        body.pop("echo", None)
        if body.get("logprobs"):
            body["logprobs"] = True
    else:
        body["prompt"] = "hi"
        body.pop("top_logprobs", None)
        if "logprobs" in body:
            body["logprobs"] = int(body["logprobs"])
    if stream:
        body.pop("prompt_logprobs", None)
    else:
        body.pop("stream_options", None)

    async def scenario(served):
        response = await served.post(path, **body)
        assert response.status_code == 200, response.text
        operation = OPERATIONS[path]
        kind = operation.chunk if stream else operation.answer
        for item in await events(response) if stream else [response.text]:
            TypeAdapter(kind).validate_json(item)

    with_server(scenario)


def test_the_small_answers_are_as_described():
    async def scenario(served):
        for method, path, body in (
            ("GET", "/", None),
            ("GET", "/health", None),
            ("GET", "/ready", None),
            ("GET", "/ping", None),
            ("POST", "/ping", None),
            ("GET", "/load", None),
            ("GET", "/server_info", None),
            ("GET", "/server_info?config_format=json", None),
            ("GET", "/tokenizer_info", None),
            ("POST", "/invocations", {"prompt": "hi"}),
            ("POST", "/invocations", {"messages": [{"role": "user", "content": "hi"}]}),
            ("GET", "/version", None),
            ("GET", "/v1/models", None),
            ("GET", "/v1/models/fake", None),
            ("GET", "/api/tags", None),
            ("GET", "/api/ps", None),
            ("GET", "/api/version", None),
            ("POST", "/api/show", {"model": "fake"}),
            ("POST", "/v1/completions/render", {"prompt": "hi"}),
            (
                "POST",
                "/v1/chat/completions/render",
                {"messages": [{"role": "user", "content": "hi"}]},
            ),
            ("POST", "/tokenize", {"prompt": "hi"}),
            ("POST", "/tokenize", {"prompt": "hi", "return_token_strs": True}),
            ("POST", "/detokenize", {"tokens": [5]}),
            ("POST", "/reset_prefix_cache", {}),
            ("POST", "/reset_encoder_cache", {}),
            ("POST", "/reset_mm_cache", {}),
            ("POST", "/sleep?level=2", {}),
            ("GET", "/is_sleeping", None),
            ("POST", "/wake_up?tags=weights", {}),
            ("POST", "/wake_up", {}),
            ("POST", "/start_profile", {}),
            ("POST", "/stop_profile", {}),
        ):
            response = await served.http.request(method, path, json=body)
            assert response.status_code == 200, response.text
            key = path.replace("/fake", "/{model:path}").partition("?")[0]
            TypeAdapter(OPERATIONS[key].answer).validate_json(response.text)
        served.engine.die("gone")
        for path in ("/health", "/ready"):
            response = await served.http.get(path)
            assert response.status_code == 503
            TypeAdapter(OPERATIONS[path].answer).validate_json(response.text)

    flags = {"enable_admin": True, "enable_tokenizer_info_endpoint": True}
    with_server(scenario, profiled_engine, **flags)


def test_errors_are_as_described_and_declared():
    async def scenario(served):
        described = (await served.http.get("/openapi.json")).json()["paths"]
        post = served.http.post
        big = b'{"prompt":"' + b"x" * 2000 + b'"}'
        for path, response in (
            ("/v1/completions", await served.complete(temperature=-1)),
            ("/v1/completions", await served.complete(model="nope")),
            ("/v1/completions", await post("/v1/completions", content=b"x")),
            ("/v1/completions", await served.post("/v1/completions", prompt="x" * 2000)),
            ("/v1/completions", await served.complete(n=9)),
            ("/v1/chat/completions", await post("/v1/chat/completions", content=big)),
            ("/tokenize", await served.post("/tokenize")),
            ("/v1/completions", await served.complete(deadline_ms=1)),
            ("/detokenize", await served.post("/detokenize", tokens=[300])),
            ("/v1/models/{model}", await served.http.get("/v1/models/nope")),
            ("/v1/streams/{stream_id}", await served.http.get("/v1/streams/nope")),
            ("/v1/streams/{stream_id}", await served.http.get("/v1/streams/nope?from=x")),
            ("/start_profile", await served.post("/start_profile")),
            ("/", await served.http.get("/", headers={"Host": "evil.test"})),
        ):
            assert response.status_code >= 400
            (operation,) = described[path].values()
            assert str(response.status_code) in operation["responses"], (path, response.text)
            TypeAdapter(answers.ErrorAnswer).validate_json(response.text)
            assert json.loads(response.text)["error"]["message"]

    def engine():
        slow = FakeAsyncLLM()
        slow.step_time = 0.01
        return slow

    with_server(
        scenario,
        engine,
        max_request_bytes=1024,
        max_num_queued_reqs=8,
        allowed_hosts=["test"],
    )
