"""Anthropic's Messages API, with a fake engine."""

import asyncio
import json

import pytest

from octavo.server import anthropic
from tests.server import fake_engine
from tests.server.fake_engine import FakeAsyncLLM, make_tokenizer, with_server
from tests.server.test_tools import ANSWER, CALL, TEMPLATE

TOOL = {
    "name": "add",
    "description": "Add.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(autouse=True)
def _long_prompts(monkeypatch):
    monkeypatch.setattr(fake_engine, "MAX_MODEL_LEN", 4096)


def serve(scenario, answer=ANSWER, template=TEMPLATE, **settings):
    async def run(served):
        served.engine.answer = answer
        await scenario(served)

    with_server(run, lambda: FakeAsyncLLM(tokenizer=make_tokenizer(template)), **settings)


async def send(served, *messages, **fields):
    body = {"model": "fake", "max_tokens": 300, "messages": list(messages) or [USER], **fields}
    return await served.post("/v1/messages", **body)


async def whole_and_streamed(served, *messages, **fields):
    """Return the whole message, after a check of the streamed one."""
    whole = (await send(served, *messages, **fields)).json()
    response = await send(served, *messages, **fields, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.strip().split("\n\n")
    events = []
    for line in lines:
        name, data = line.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert events[0]["type"] == "message_start"
    assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
    message = events[0]["message"]
    assert message["content"] == []
    for event in events[1:-2]:
        index = event["index"]
        if event["type"] == "content_block_start":
            assert index == len(message["content"])
            message["content"].append({**event["content_block"], "open": True, "json": ""})
        block = message["content"][index]
        assert block["open"]
        if event["type"] == "content_block_stop":
            block["open"] = False
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                block["json"] += delta["partial_json"]
            elif delta["type"] != "signature_delta":
                kind = block["type"]
                block[kind] += delta[kind]
    for block in message["content"]:
        assert not block.pop("open")
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    message |= events[-2]["delta"] | {"usage": events[-2]["usage"]}
    assert without_ids(message) == without_ids(whole)
    return whole


def without_ids(message):
    """Ids differ from request to request."""
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {**message, "id": "", "content": blocks}


def test_blocks():
    async def scenario(served):
        message = await whole_and_streamed(served, tools=[TOOL])
        calls = [block.pop("id") for block in message["content"][2:]]
        assert len(set(calls)) == 2
        use = {"type": "tool_use", "name": "add", "input": {"a": 1}}
        assert message["content"] == [
            {"type": "thinking", "thinking": "I add.", "signature": ""},
            {"type": "text", "text": "Sure."},
            use,
            use,
        ]
        assert message["stop_reason"] == "tool_use"
        prompt = len(served.engine.requests[-1].prompt_token_ids)
        assert message["usage"] == {
            "input_tokens": prompt,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": len(ANSWER) + 1,
        }

    serve(scenario)


PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


@pytest.mark.parametrize(
    ("fields", "reason", "text"),
    [
        ({}, ("end_turn", None), "Hello, you"),
        ({"max_tokens": 5}, ("max_tokens", None), "Hello"),
        ({"stop_sequences": [","]}, ("stop_sequence", ","), "Hello"),
    ],
    ids=str,
)
def test_stop_reasons(fields, reason, text):
    async def scenario(served):
        message = await whole_and_streamed(served, **fields)
        assert (message["stop_reason"], message["stop_sequence"]) == reason
        assert message["content"] == [{"type": "text", "text": text}]

    serve(scenario, answer="Hello, you")


def test_the_conversation_reaches_the_template():
    """Blocks of all kinds become the messages that the template knows."""

    async def scenario(served):
        thought = {"type": "thinking", "thinking": "Hm", "signature": ""}
        use = {"type": "tool_use", "id": "x", "name": "add", "input": {"a": 2}}
        result = {"type": "tool_result", "tool_use_id": "x", "content": [text("3"), text("!")]}
        response = await send(
            served,
            {"role": "user", "content": [text("1 +"), text("2?")]},
            {"role": "assistant", "content": [thought, text("Wait"), use]},
            {"role": "user", "content": [result, text("So?")]},
            system=[{**text("Be kind."), "cache_control": {"type": "ephemeral"}}],
        )
        assert response.status_code == 200
        prompt = bytes(t for t in served.engine.requests[-1].prompt_token_ids if t < 256).decode()
        assert prompt == (
            "<system>Be kind.<user>1 +\n2?<assistant><think>\nHm\n</think>\n\nWait<tool_call>\n"
            '{"name": "add", "arguments": {"a": 2}}\n</tool_call><tool>3\n!<user>So?<assistant>'
        )

    def text(value):
        return {"type": "text", "text": value}

    serve(scenario)


def test_a_prefilled_answer():
    async def scenario(served):
        message = await whole_and_streamed(served, USER, {"role": "assistant", "content": "I"})
        prompt = bytes(t for t in served.engine.requests[-1].prompt_token_ids if t < 256).decode()
        assert prompt.endswith("<assistant>I")
        assert message["content"] == [{"type": "text", "text": " am"}]

    serve(scenario, answer=" am")


def test_fields_of_claude_code():
    template = TEMPLATE + "{{ reasoning_effort }} {{ enable_thinking }}"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    edit = {"type": "clear_thinking_20251015", "keep": "all"}

    async def scenario(served):
        response = await send(
            served,
            context_management={"edits": [edit]},
            output_config={
                "effort": "max",
                "format": {"type": "json_schema", "schema": schema},
            },
            thinking={"type": "adaptive"},
        )
        assert response.status_code == 200
        assert "X-Octavo-Ignored-Fields" not in response.headers
        prompt = bytes(t for t in served.engine.requests[-1].prompt_token_ids if t < 256).decode()
        assert prompt.endswith("max True")
        assert json.loads(served.engine.params[-1].structured_outputs.json) == schema

    serve(scenario, answer="{}", template=template)


def test_choices_of_tools():
    async def scenario(served):
        for choice, kind in [
            ({"type": "auto"}, "triggered_tags"),
            ({"type": "any", "disable_parallel_tool_use": True}, "sequence"),
            ({"type": "tool", "name": "add"}, "sequence"),
        ]:
            response = await send(served, tools=[TOOL], tool_choice=choice)
            assert response.status_code == 200
            wanted = served.engine.params[-1].structured_outputs
            assert json.loads(wanted.structural_tag)["format"]["type"] == kind
        message = await whole_and_streamed(served, tools=[TOOL], tool_choice={"type": "none"})
        assert [block["type"] for block in message["content"]] == ["text"]

    serve(scenario, answer=CALL)


def test_count_tokens():
    async def scenario(served):
        fields = {"model": "fake", "messages": [USER], "system": "s", "tools": [TOOL]}
        response = await served.post("/v1/messages/count_tokens", **fields)
        assert response.status_code == 200
        await send(served, system="s", tools=[TOOL])
        prompt = served.engine.requests[-1].prompt_token_ids
        assert response.json() == {"input_tokens": len(prompt)}

    serve(scenario)


@pytest.mark.parametrize(
    ("fields", "status", "kind", "words"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": ["x"]}, 400, "invalid_request_error", "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].type='document' is not supported here; use text, image or "
            "tool_result.",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "document"}]}]},
            400,
            "invalid_request_error",
            "type='document' is not supported here; use text, image, tool_use or thinking.",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "a",
                                "content": [{"type": "document"}],
                            }
                        ],
                    }
                ]
            },
            400,
            "invalid_request_error",
            "messages[0].content[0].content[0].type='document' is not supported here; use text or "
            "image.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].source.type=None is not supported",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": PNG}]}]},
            400,
            "invalid_request_error",
            "not supported here; send text only",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 5}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].input",
        ),
        ({"system": 5}, 400, "invalid_request_error", "system=5"),
        ({"tools": [{"name": "x"}]}, 400, "invalid_request_error", "tools[0].input_schema"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "w", "input_schema": {}}]},
            400,
            "invalid_request_error",
            "tools[].type='web_search_20250305' is not supported",
        ),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "needs tools"),
        ({"model": "other"}, 404, "not_found_error", "other"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            400,
            "invalid_request_error",
            "context_management",
        ),
        ({"output_config": {"effort": "x"}}, 400, "invalid_request_error", "output_config.effort"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            400,
            "invalid_request_error",
            "output_config.format.schema",
        ),
    ],
    ids=str,
)
def test_errors_have_anthropics_form(fields, status, kind, words):
    async def scenario(served):
        for stream in (False, True):
            response = await send(served, **{**fields, "stream": stream})
            assert response.status_code == status
            body = response.json()
            assert (body["type"], body["error"]["type"]) == ("error", kind)
            assert words in body["error"]["message"]

    serve(scenario)


def test_the_key_may_be_in_x_api_key():
    async def scenario(served):
        assert (await send(served)).json()["error"]["type"] == "authentication_error"
        served.http.headers["x-api-key"] = "secret"
        assert (await send(served)).status_code == 200

    serve(scenario, api_key=["secret"])


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"stop_sequences": ["a"] * 65}, "stop_sequences", "stop_sequences has 65 strings"),
        ({"stop_sequences": ["a" * 300]}, "stop_sequences", "stop_sequences holds a text of 300"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name", "tools[0].name='a b'"),
        (
            {"tools": [TOOL | {"input_schema": {"required": 5}}]},
            "tools[0].input_schema",
            "tools[0].input_schema.required=5",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}},
            "tool_choice",
            "tool_choice.name='x'",
        ),
    ],
    ids=str,
)
def test_errors_have_the_names_of_this_api(fields, param, words):
    async def scenario(served):
        response = await send(served, **fields)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]
        assert response.json()["error"].get("param", param) == param

    serve(scenario)


def test_counting_has_admission_and_deadlines(monkeypatch):
    begun, read_chat = asyncio.Event(), anthropic.read_chat

    async def wait(*args):
        begun.set()
        await go_on.wait()
        return await read_chat(*args)

    go_on = asyncio.Event()

    async def scenario(served):
        body = {"messages": [USER]}
        good = await served.post("/v1/messages/count_tokens", **body)
        assert good.json()["input_tokens"] > 0
        monkeypatch.setattr(anthropic, "read_chat", wait)
        task = asyncio.create_task(served.post("/v1/messages/count_tokens", **body))
        await begun.wait()
        assert (await served.post("/v1/messages/count_tokens", **body)).status_code == 429
        go_on.set()
        assert (await task).status_code == 200
        go_on.clear()
        late = await served.http.post(
            "/v1/messages/count_tokens", json=body, headers={"X-Deadline-Ms": "20"}
        )
        assert late.status_code == 408

    serve(scenario, max_num_queued_reqs=1)


def test_descriptions_are_no_part_of_the_grammar():
    async def scenario(served):
        properties = {"description": {"type": "string", "description": "xyz" * 20}}
        schema = {"type": "object", "properties": properties, "title": "xyz"}
        await send(served, tools=[TOOL | {"input_schema": schema}])
        tag = served.engine.params[-1].structured_outputs.structural_tag
        assert '{"description":{"type":"string"}}' in tag
        assert "xyz" not in tag
        prompt = served.engine.tokenizer.decode(served.engine.requests[-1].prompt_token_ids)
        assert "xyz" * 20 in prompt

    serve(scenario)
