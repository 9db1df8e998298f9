"""Requests to /v1/responses as Codex sends them: tools in namespaces, and notes of the client."""

import pytest

from tests.server.test_responses import (
    OTHER,
    PARAMETERS,
    TOOL,
    create,
    refused,
    serve,
    whole_and_streamed,
)

pytestmark = pytest.mark.usefixtures("_long_prompts")


@pytest.fixture
def _long_prompts(monkeypatch):
    monkeypatch.setattr("tests.server.fake_engine.MAX_MODEL_LEN", 4096)


AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{**TOOL, "strict": False}, {**OTHER, "description": None, "strict": None}],
}
SHELL = {**OTHER, "name": "exec_command", "description": None, "strict": False}
CALL = '<tool_call>\n{"name": "agents__add", "arguments": {"a": 1}}\n</tool_call>'
CODEX = {
    "tools": [SHELL, AGENTS],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a217b8-3c5f-7363-bc49-37f992bc97a2",
}
METADATA = {"client_metadata": {"x-codex-installation-id": "a"}}
DEVELOPER = {
    "type": "message",
    "id": "msg_01a217b8",
    "role": "developer",
    "content": [{"type": "input_text", "text": "You are an agent."}],
}
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}


def test_a_call_of_a_function_in_a_namespace():
    async def scenario(served):
        found = await whole_and_streamed(served, [DEVELOPER, USER], **CODEX | {"store": True})
        (called,) = found["output"]
        assert (called["name"], called["namespace"]) == ("add", "agents")
        assert called["arguments"] == '{"a": 1}'
        assert found["tools"] == CODEX["tools"]
        prompt = served.engine.tokenizer.decode(served.engine.requests[-1].prompt_token_ids)
        for name in ("exec_command", "agents__add", "agents__sub"):
            assert f'"name": "{name}"' in prompt
        assert prompt.count("Other agents.") == 1
        # The next turn has the call, with its namespace, and its output.
        output = {"type": "function_call_output", "call_id": called["call_id"], "output": "2"}
        await create(served, [DEVELOPER, USER, called, output], **CODEX)
        prompt = served.engine.tokenizer.decode(served.engine.requests[-1].prompt_token_ids)
        assert '{"name": "agents__add", "arguments"' in prompt

    serve(scenario, CALL)


def test_the_metadata_are_no_unknown_field():
    async def scenario(served):
        response = await served.post("/v1/responses", input=[USER], **CODEX, **METADATA)
        assert response.status_code == 200
        assert "x-octavo-ignored-fields" not in response.headers

    serve(scenario, CALL)


@pytest.mark.parametrize("kind", ["function", "allowed_tools"])
def test_the_choice_of_a_function_in_a_namespace(kind):
    async def scenario(served):
        chosen = {"type": "function", "name": "add", "namespace": "agents"}
        choice = chosen
        if kind == "allowed_tools":
            choice = {"type": kind, "mode": "required", "tools": [chosen]}
        found = await create(served, tools=[SHELL, AGENTS], tool_choice=choice)
        assert found["tool_choice"] == choice
        form = served.engine.params[-1].structured_outputs.structural_tag
        assert "agents__add" in form
        assert "agents__sub" not in form
        wrong = {**chosen, "namespace": "others"}
        error = await refused(served, tools=[SHELL, AGENTS], tool_choice=wrong)
        assert error["param"] == "tool_choice"

    serve(scenario, CALL)


@pytest.mark.parametrize(
    ("tools", "param", "words"),
    [
        ([{"type": "web_search"}], "tools[0].type", "switch such tools off in the client"),
        ([{**AGENTS, "tools": [AGENTS]}], "tools[0].tools[0].type", "'namespace' is not supported"),
        (
            [{**AGENTS, "tools": [{"type": "custom", "name": "x"}]}],
            "tools[0].tools[0].type",
            "custom",
        ),
        ([{**AGENTS, "tools": []}], "tools[0].tools", "a list of one or more"),
        ([{**AGENTS, "tools": 5}], "tools[0].tools", "5"),
        ([{"type": "namespace", "name": "a"}], "tools[0].tools", "None"),
        ([AGENTS, AGENTS], "tools", "'agents__add'"),
        ([{**TOOL, "name": "agents__add"}, AGENTS], "tools", "'agents__add'"),
        ([{**AGENTS, "tools": [{"type": "function"}]}], "tools[0].tools[0].name", "missing"),
        ([{**AGENTS, "tools": [TOOL] * 129}], "tools[0].tools", "128"),
        (
            [{**AGENTS, "name": f"n{i}", "tools": [TOOL, OTHER]} for i in range(100)],
            "tools",
            "128",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_tools(tools, param, words):
    async def scenario(served):
        error = await refused(served, tools=tools)
        assert error["param"] == param
        assert words in error["message"]

    serve(scenario)


def test_a_function_is_no_namespace():
    async def scenario(served):
        tool = {**TOOL, "tools": [{"type": "function", "name": "x", "parameters": PARAMETERS}]}
        found = await create(served, tools=[tool])
        assert "tools" not in found["tools"][0]
        prompt = served.engine.tokenizer.decode(served.engine.requests[-1].prompt_token_ids)
        assert "__x" not in prompt

    serve(scenario)
