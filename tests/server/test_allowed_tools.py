"""tool_choice with some of the tools, strict functions, and tools of other kinds."""

import json

import pytest

from tests.server import fake_engine
from tests.server.fake_engine import FakeAsyncLLM, make_tokenizer, with_server
from tests.server.test_tools import TEMPLATE, TOOL, whole_and_streamed

OTHER = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "NAME", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(autouse=True)
def _long_prompts(monkeypatch):
    monkeypatch.setattr(fake_engine, "MAX_MODEL_LEN", 4096)


def serve(scenario, answer="No.", template=TEMPLATE, **settings):
    async def run(served):
        served.engine.answer = answer
        await scenario(served)

    with_server(run, lambda: FakeAsyncLLM(tokenizer=make_tokenizer(template)), **settings)


def allowed(*names, mode="auto"):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_grammar_has_only_these(mode):
    async def scenario(served):
        fields = {"tools": [TOOL, OTHER], "max_tokens": 200}
        response = await served.chat(**fields, tool_choice=allowed("sub", mode=mode))
        assert response.status_code == 200
        form = json.loads(served.engine.params[-1].structured_outputs.structural_tag)["format"]
        calls = form["elements"][-1] if mode == "required" else form
        (tag,) = calls["tags"]
        assert '"sub"' in tag["begin"]
        assert not calls["stop_after_first"]
        # The prompt has all of them: it stays the same from turn to turn.
        await served.chat(**fields)
        first, second = (r.prompt_token_ids for r in served.engine.requests[-2:])
        assert first == second

    serve(scenario)


@pytest.mark.parametrize("name", ["add", "sub"])
def test_a_call_of_another_tool_is_text(name):
    answer = CALL.replace("NAME", name)

    async def scenario(served):
        fields = {"tools": [TOOL, OTHER], "tool_choice": allowed("sub"), "max_tokens": 200}
        message, reason = await whole_and_streamed(served, **fields)
        if name == "sub":
            assert reason == "tool_calls"
            assert message["tool_calls"][0]["function"]["name"] == "sub"
        else:
            assert (reason, message["content"]) == ("stop", answer)

    serve(scenario, answer)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": allowed("mul")}, "tools[0].function.name='mul' is not a function"),
        ({"tool_choice": allowed()}, "list of 1 to 128"),
        ({"tool_choice": allowed("add", mode="any")}, "auto"),
        ({"tool_choice": {"type": "allowed_tools"}}, "allowed_tools"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "name": "x"}]},
                }
            },
            "type 'custom' is not supported",
        ),
        ({"tools": [], "tool_choice": allowed("add")}, "needs tools"),
        (
            {
                "tool_choice": allowed("add", mode="required"),
                "response_format": {"type": "json_object"},
            },
            "both constrain",
        ),
    ],
    ids=str,
)
def test_wrong_choices(fields, words):
    async def scenario(served):
        response = await served.chat(**({"tools": [TOOL, OTHER]} | fields))
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]
        assert response.json()["error"]["param"].startswith(("tool_choice", "tools"))

    serve(scenario)


def test_custom_tools_are_refused_by_name():
    async def scenario(served):
        tool = {"type": "custom", "custom": {"name": "run_code"}}
        response = await served.chat(tools=[tool])
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "tools"
        assert "'run_code', of type 'custom' is not supported" in error["message"]

    serve(scenario)


def test_a_call_without_its_marker():
    """A strict function is only called as the grammar says, so this is text."""
    answer = '{"name": "add", "arguments": {"a": 1}}'

    async def scenario(served):
        for value in (True, False):
            fields = {"tools": [strict(value)], "max_tokens": 200}
            message, reason = await whole_and_streamed(served, **fields)
            assert reason == ("stop" if value else "tool_calls")
            assert message["content"] == (answer if value else None)

    serve(scenario, answer)


def strict(value):
    return {"type": "function", "function": TOOL["function"] | {"strict": value}}


@pytest.mark.parametrize("value", [True, False, None])
@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "pythonic", "xlam"])
def test_strict(value, parser):
    """A grammar holds a strict function's calls, also in formats without a marker."""

    async def scenario(served):
        response = await served.chat(tools=[strict(value)], max_tokens=200)
        assert response.status_code == 200
        outputs = served.engine.params[-1].structured_outputs
        assert outputs.backend == ("auto" if parser == "hermes" else "llguidance")
        form = {"response_format": {"type": "json_object"}}
        response = await served.chat(tools=[strict(value)], **form)
        assert response.status_code == (400 if value else 200)

    serve(scenario, tool_call_parser=parser)


@pytest.mark.parametrize("value", [True, False])
def test_a_schema_that_no_grammar_has(value):
    """A strict function needs a grammar; another has none then."""

    async def scenario(served):
        parameters = {"type": "object", "properties": {"a": {}}}
        function = {"name": "add", "parameters": parameters, "strict": value}
        tools = [{"type": "function", "function": function}]
        response = await served.chat(tools=tools, max_tokens=200)
        assert response.status_code == (400 if value else 200)
        if value:
            assert "'add' is strict" in response.json()["error"]["message"]
            assert response.json()["error"]["param"] == "tools"
        else:
            assert served.engine.params[-1].structured_outputs is None

    serve(scenario, tool_call_parser="gemma4")
