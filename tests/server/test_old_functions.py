"""The older fields functions and function_call, and messages of the role function."""

import json

import pytest

from tests.server import fake_engine
from tests.server.fake_engine import FakeAsyncLLM, events, make_tokenizer, with_server
from tests.server.test_tools import ANSWER, CALL, TEMPLATE, TOOL

ADD = TOOL["function"]
USER = {"role": "user", "content": "1+1?"}


@pytest.fixture(autouse=True)
def _long_prompts(monkeypatch):
    monkeypatch.setattr(fake_engine, "MAX_MODEL_LEN", 4096)


def serve(scenario, answer=ANSWER):
    async def run(served):
        served.engine.answer = answer
        await scenario(served)

    with_server(run, lambda: FakeAsyncLLM(tokenizer=make_tokenizer(TEMPLATE)))


def test_a_call_whole_and_streamed():
    """The answer has the first call only."""

    async def scenario(served):
        fields = {"functions": [ADD], "max_tokens": 200}
        (choice,) = (await served.chat(**fields)).json()["choices"]
        assert choice["finish_reason"] == "function_call"
        called = {"name": "add", "arguments": '{"a": 1}'}
        assert choice["message"]["function_call"] == called
        assert "tool_calls" not in choice["message"]
        assert choice["message"]["content"] == "Sure."
        pieces, reason = {"name": "", "arguments": ""}, None
        for item in await events(await served.chat(**fields, stream=True)):
            (chunk,) = json.loads(item)["choices"]
            reason = chunk["finish_reason"] or reason
            assert "tool_calls" not in chunk["delta"]
            for name, text in chunk["delta"].get("function_call", {}).items():
                pieces[name] += text
        assert (pieces, reason) == (called, "function_call")

    serve(scenario)


def test_an_answer_without_a_call():
    async def scenario(served):
        (choice,) = (await served.chat(functions=[ADD])).json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert "function_call" not in choice["message"]

    serve(scenario, answer="No.")


def test_choices():
    async def scenario(served):
        for choice, required in ((None, False), ("auto", False), ({"name": "add"}, True)):
            fields = {} if choice is None else {"function_call": choice}
            response = await served.chat(functions=[ADD], **fields, max_tokens=200)
            assert response.status_code == 200
            form = json.loads(served.engine.params[-1].structured_outputs.structural_tag)["format"]
            assert form["type"] == ("sequence" if required else "triggered_tags")
            calls = form["elements"][-1] if required else form
            assert calls["stop_after_first"]
        response = await served.chat(functions=[ADD], function_call="none", max_tokens=200)
        assert response.json()["choices"][0]["message"]["content"].count(CALL) == 2
        assert served.engine.params[-1].structured_outputs is None

    serve(scenario)


def test_the_prompt_is_that_of_tools():
    """Older messages and fields become the newer ones."""

    async def scenario(served):
        call = {"name": "add", "arguments": '{"a": 1}'}
        old = [
            USER,
            {"role": "assistant", "content": None, "function_call": call},
            {"role": "function", "name": "add", "content": "2"},
        ]
        new = [
            USER,
            {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": "2"},
        ]
        assert (await served.chat(*old, functions=[ADD])).status_code == 200
        assert (await served.chat(*new, tools=[TOOL])).status_code == 200
        first, second = served.engine.requests[-2:]
        assert first.prompt_token_ids == second.prompt_token_ids
        assert "<tool>2" in served.engine.tokenizer.decode(first.prompt_token_ids)

    serve(scenario)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"functions": [ADD], "tools": [TOOL]}, "functions", "does not go with tools"),
        ({"function_call": "auto", "tools": [TOOL]}, "function_call", "does not go with tools"),
        ({"functions": [ADD], "tool_choice": "auto"}, "functions", "does not go with tool_choice"),
        ({"function_call": "auto"}, "function_call", "needs functions"),
        ({"functions": [ADD], "function_call": "any"}, "function_call", "'any' is not allowed"),
        ({"functions": [ADD], "function_call": {"name": "x"}}, "function_call", "'x' is not"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name", "'a b' is not allowed"),
        ({"functions": [ADD, ADD]}, "functions", "'add' twice"),
        (
            {"messages": [USER, {"role": "function", "name": "add", "content": "2"}]},
            "messages",
            "answers no function_call",
        ),
        (
            {"messages": [USER, {"role": "function", "content": "2"}]},
            "messages",
            "has the name of the function",
        ),
        (
            {"messages": [USER | {"function_call": {"name": "add"}}]},
            "messages",
            "not allowed with role 'user'",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": {"arguments": ""}}]},
            "messages",
            "messages[0].function_call=",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "function_call": {"name": "add"},
                        "tool_calls": [{"function": {"name": "add"}}],
                    }
                ]
            },
            "messages",
            "both function_call and tool_calls",
        ),
    ],
    ids=str,
)
def test_wrong_fields(fields, param, words):
    async def scenario(served):
        response = await served.chat(*fields.pop("messages", []), **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert words in error["message"]

    serve(scenario)
