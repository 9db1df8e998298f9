"""Tool calls and reasoning in chats, with a fake engine."""

import json

import pytest

from octavo.parsers.answer import Format
from tests.server import fake_engine
from tests.server.fake_engine import FakeAsyncLLM, events, make_tokenizer, with_server

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}"
    "<{{ m.role }}>{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if think %}<think>\n{% endif %}{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ANSWER = f"<think>\nI add.\n</think>\n\nSure.\n{CALL}\n{CALL}"


@pytest.fixture(autouse=True)
def _long_prompts(monkeypatch):
    monkeypatch.setattr(fake_engine, "MAX_MODEL_LEN", 4096)


async def whole_and_streamed(served, **fields):
    """Return the message and finish reason of a whole answer, after a check of the streamed one."""
    whole = (await served.chat(**fields)).json()
    (choice,) = whole["choices"]
    message = choice["message"]
    merged = {"content": "", "reasoning": "", "reasoning_content": "", "calls": {}}
    reason = None
    for item in await events(await served.chat(**fields, stream=True)):
        (chunk,) = json.loads(item)["choices"]
        reason = chunk["finish_reason"] or reason
        for name, piece in chunk["delta"].items():
            if name == "tool_calls":
                for call in piece:
                    known = merged["calls"].setdefault(call["index"], {"arguments": ""})
                    known.update({k: call[k] for k in ("id", "type") if k in call})
                    known["name"] = call["function"].get("name", known.get("name"))
                    known["arguments"] += call["function"].get("arguments", "")
            elif name != "role":
                merged[name] += piece
    assert reason == choice["finish_reason"]
    assert merged["content"] == (message["content"] or "")
    assert merged["reasoning"] == merged["reasoning_content"] == (message["reasoning"] or "")
    assert [call["name"] for call in merged["calls"].values()] == [
        call["function"]["name"] for call in message.get("tool_calls", [])
    ]
    assert [call["arguments"] for call in merged["calls"].values()] == [
        call["function"]["arguments"] for call in message.get("tool_calls", [])
    ]
    assert all(call["type"] == "function" for call in merged["calls"].values())
    assert len({call["id"] for call in merged["calls"].values()}) == len(merged["calls"])
    return message, choice["finish_reason"]


def serve(scenario, template=TEMPLATE, answer=ANSWER):
    async def run(served):
        served.engine.answer = answer
        await scenario(served)

    with_server(run, lambda: FakeAsyncLLM(tokenizer=make_tokenizer(template)))


def test_calls_reasoning_and_text():
    async def scenario(served):
        message, reason = await whole_and_streamed(served, tools=[TOOL], max_tokens=200)
        assert reason == "tool_calls"
        assert message["content"] == "Sure."
        assert message["reasoning"] == message["reasoning_content"] == "I add."
        assert [c["function"] for c in message["tool_calls"]] == [
            {"name": "add", "arguments": '{"a": 1}'}
        ] * 2

    serve(scenario)


def test_special_tokens_are_found_once(monkeypatch):
    calls = []
    find = Format.special_ids
    monkeypatch.setattr(
        Format, "special_ids", lambda fmt, tokenizer: calls.append(1) or find(fmt, tokenizer)
    )

    async def scenario(served):
        for _ in range(3):
            assert (await served.chat(tools=[TOOL])).status_code == 200
        assert calls == [1]

    serve(scenario)


def test_a_call_without_text():
    async def scenario(served):
        message, _ = await whole_and_streamed(served, tools=[TOOL], max_tokens=200)
        assert message["content"] is None

    serve(scenario, answer=CALL)


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "none"}], ids=str)
def test_calls_without_tools_are_text(fields):
    async def scenario(served):
        message, reason = await whole_and_streamed(served, **fields, max_tokens=200)
        assert reason == "stop"
        assert message["content"] == f"Sure.\n{CALL}\n{CALL}"
        assert "tool_calls" not in message

    serve(scenario)


def test_an_answer_that_is_cut():
    async def scenario(served):
        message, reason = await whole_and_streamed(served, tools=[TOOL], max_tokens=80)
        assert reason == "length"
        (call,) = message["tool_calls"]
        assert '{"a": 1}'.startswith(call["function"]["arguments"])

    serve(scenario)


def test_too_many_tools():
    async def scenario(served):
        response = await served.chat(tools=[TOOL] * 129)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
        assert "128" in response.json()["error"]["message"]

    serve(scenario)


def test_the_prompt_begins_the_thought():
    async def scenario(served):
        fields = {"chat_template_kwargs": {"think": True}, "max_tokens": 99}
        message, _ = await whole_and_streamed(served, **fields)
        assert (message["reasoning"], message["content"]) == ("Hm", "Yes")
        message, _ = await whole_and_streamed(served, **fields, include_reasoning=False)
        assert (message["reasoning"], message["content"]) == (None, "Yes")

    serve(scenario, answer="Hm\n</think>\nYes")


def test_a_template_without_tools():
    async def scenario(served):
        response = await served.chat(tools=[TOOL])
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
        message, _ = await whole_and_streamed(served, max_tokens=200)
        assert message["content"] == ANSWER

    serve(scenario, template="{% for m in messages %}{{ m.content }}{% endfor %}")


def test_required_calls():
    """The engine gets the form of the answer."""

    async def scenario(served):
        named = {"type": "function", "function": {"name": "add"}}
        for choice in (None, "auto", "required", named):
            fields = {} if choice is None else {"tool_choice": choice}
            assert (await served.chat(tools=[TOOL], **fields, max_tokens=200)).status_code == 200
            wanted = served.engine.params[-1].structured_outputs
            form = json.loads(wanted.structural_tag)["format"]
            required = choice not in (None, "auto")
            assert form["type"] == ("sequence" if required else "triggered_tags")
            calls = form["elements"][-1] if required else form
            assert calls["stop_after_first"] is (choice is named)
            (tag,) = calls["tags"]
            assert tag["content"]["json_schema"] == TOOL["function"]["parameters"]
        fields = {"tools": [TOOL], "parallel_tool_calls": False, "max_tokens": 200}
        assert (await served.chat(**fields)).status_code == 200
        wanted = served.engine.params[-1].structured_outputs
        assert json.loads(wanted.structural_tag)["format"]["stop_after_first"]
        # The form that the request itself has comes first.
        form = {"type": "json_object"}
        assert (await served.chat(tools=[TOOL], response_format=form)).status_code == 200
        wanted = served.engine.params[-1].structured_outputs
        assert wanted.json_object

    serve(scenario)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [TOOL, TOOL]}, "tools", "'add' twice"),
        (
            {"tools": [TOOL], "tool_choice": {"function": {"name": "x"}}},
            "tool_choice",
            "not a function of tools",
        ),
        *(
            (
                {"tools": [{"type": "function", "function": {"name": "f", **wrong}}]},
                f"tools[0].function.{field}",
                words,
            )
            for wrong, field, words in [
                ({"name": "a b"}, "name", "'a b' is not allowed"),
                ({"name": ""}, "name", "'' is not allowed"),
                ({"parameters": {"properties": [1]}}, "parameters", "not an object of schemas"),
                ({"parameters": {"required": 5}}, "parameters", "not a list of names"),
            ]
        ),
        (
            {"tools": [TOOL], "use_beam_search": True, "n": 2, "temperature": 0},
            "tools",
            "not available with use_beam_search",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "has no name"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "custom"}},
            "tool_choice",
            "not supported; use function",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "tool_choice",
            "both constrain",
        ),
    ],
)
def test_wrong_choices(fields, param, words):
    async def scenario(served):
        response = await served.chat(**fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert words in response.json()["error"]["message"]

    serve(scenario)


def test_a_schema_that_is_too_large():
    async def scenario(served):
        words = {f"word{i}": {"type": "string", "enum": ["x" * 9000]} for i in range(70)}
        function = {"name": "f", "parameters": {"type": "object", "properties": words}}
        response = await served.chat(tools=[{"type": "function", "function": function}])
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"

    serve(scenario)


def test_ids_of_the_model_are_used_once():
    """Kimi's ids name the function; an id that occurs again would mix up the results."""
    call = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    calls = [
        call.format(name) for name in ("functions.add:0", "functions.add:1", "functions.add:0")
    ]

    async def scenario(served):
        served.engine.answer = (
            f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"
        )
        message, _ = await whole_and_streamed(served, tools=[TOOL], max_tokens=400)
        ids = [call["id"] for call in message["tool_calls"]]
        assert ids[:2] == ["functions.add:0", "functions.add:1"]
        assert ids[2].startswith("call_")

    with_server(
        scenario,
        lambda: FakeAsyncLLM(tokenizer=make_tokenizer(TEMPLATE)),
        tool_call_parser="kimi_k2",
    )
