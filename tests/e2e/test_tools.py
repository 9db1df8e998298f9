"""Tool calls of the built-in model, which a grammar forces, with OpenAI's client."""

import json
import os
import random
import runpy
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import ollama
import openai
import pydantic
import pytest

from tests.e2e import harness
from training import synthetic

ROOT = Path(__file__).parents[2]
MODEL = "octavo/stories"
SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "kind": {"enum": ["a cat", "a dog"]},
    },
    "required": ["animal", "age", "kind"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("find_animal", "draw_animal")
]
NAMED = {"type": "function", "function": {"name": "draw_animal"}}
CHATS = [[{"role": "user", "content": f"Tell me about {x}."}] for x in ("Tom", "a dog", "rain")]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with harness.serve(folder) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def call(client, chat, choice="required", **fields):
    """Return (name, arguments) of the calls of an answer, and its reason to finish."""
    answer = client.chat.completions.create(
        model=MODEL, messages=chat, tools=TOOLS, tool_choice=choice, seed=3, **fields
    )
    (choice,) = answer.choices
    calls = choice.message.tool_calls or []
    return [(c.function.name, c.function.arguments) for c in calls], choice.finish_reason


def streamed(client, chat, choice="required", at_first=lambda: None, **fields):
    """Return the same of a streamed answer; `at_first` runs after the first piece of arguments."""
    calls, reason, begun = {}, None, False
    for chunk in client.chat.completions.create(
        model=MODEL, messages=chat, tools=TOOLS, tool_choice=choice, seed=3, stream=True, **fields
    ):
        (part,) = chunk.choices
        reason = part.finish_reason or reason
        for piece in part.delta.tool_calls or []:
            name, arguments = calls.get(piece.index, (None, ""))
            calls[piece.index] = (
                piece.function.name or name,
                arguments + (piece.function.arguments or ""),
            )
            if calls[piece.index][1] and not begun:
                begun = True
                at_first()
    return [calls[i] for i in sorted(calls)], reason


def check(calls, reason, names=("find_animal", "draw_animal")):
    assert reason == "tool_calls"
    assert calls
    for name, arguments in calls:
        assert name in names
        jsonschema.validate(json.loads(arguments), SCHEMA)


def test_alone_streamed_and_in_company(client):
    alone = [call(client, chat, parallel_tool_calls=False) for chat in CHATS]
    for calls, reason in alone:
        check(calls, reason)
        assert len(calls) == 1
    assert [streamed(client, chat, parallel_tool_calls=False) for chat in CHATS] == alone
    with ThreadPoolExecutor(6) as threads:
        company = threads.map(lambda chat: call(client, chat, parallel_tool_calls=False), CHATS * 4)
        assert list(company) == alone * 4


def test_a_named_function(client):
    for chat in CHATS:
        found = call(client, chat, NAMED, temperature=1)
        check(*found, names=["draw_animal"])
        assert streamed(client, chat, NAMED, temperature=1) == found


def test_a_call_that_is_cut(client):
    calls, reason = call(client, CHATS[0], NAMED, max_tokens=26)
    assert reason == "length"
    ((name, arguments),) = calls
    assert name == "draw_animal"
    ((_, whole),), _ = call(client, CHATS[0], NAMED)
    assert whole.startswith(arguments)


def test_an_engine_that_dies_within_a_call(client, server):
    expected = call(client, CHATS[1], NAMED)

    def kill():
        server.engine_process().send_signal(signal.SIGKILL)

    assert streamed(client, CHATS[1], NAMED, at_first=kill) == expected


def test_an_engine_that_dies_within_a_call_of_a_background_response(client, server):
    def make(at_first):
        """Return the response, without ids and times, after `at_first` at the first arguments."""
        begun = False
        for event in client.responses.create(
            model=MODEL,
            input=CHATS[1][0]["content"],
            tools=[{"type": "function", **tool["function"], "strict": True} for tool in TOOLS],
            tool_choice={"type": "function", "name": "draw_animal"},
            temperature=0,
            background=True,
            stream=True,
        ):
            if event.type == "response.function_call_arguments.delta" and not begun:
                begun = True
                at_first()
        made = event.response
        stored = client.responses.retrieve(made.id)
        assert stored == made
        assert [item.type for item in made.output][-1] == "function_call"
        found = made.model_dump(exclude={"created_at", "completed_at"})
        found["output"][-1].pop("call_id")
        found["usage"].pop("input_tokens_details")
        return json.dumps(found).replace(made.id.removeprefix("resp_"), "ID")

    expected = make(lambda: None)
    assert make(lambda: server.engine_process().send_signal(signal.SIGKILL)) == expected


def test_the_built_in_model_calls_its_tools(client):
    """On cases that training did not see: at least 95 % of the first calls are right."""
    rng, right = random.Random(20261126), []
    while len(right) < 40:
        conversation = synthetic.tool_call(rng)
        messages, tools = conversation["messages"], conversation["tools"]
        first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
        if "tool_calls" not in messages[first]:
            continue
        wanted = messages[first]["tool_calls"][0]["function"]
        reply = client.chat.completions.create(
            model=MODEL, messages=messages[:first], tools=tools, temperature=0, max_tokens=100
        )
        calls = reply.choices[0].message.tool_calls or []
        found = [(c.function.name, json.loads(c.function.arguments)) for c in calls]
        right.append(found == [(wanted["name"], wanted["arguments"])])
    assert sum(right) >= 38


def test_ollamas_client(server):
    def multiply(a: int, b: int) -> int:
        """Multiply two numbers"""

    with ollama.Client(server.url) as client:
        fields = {"tools": [multiply], "options": {"temperature": 0}}
        messages = [{"role": "user", "content": "What is 12 * 7?"}]
        whole = client.chat(MODEL, messages, **fields)
        (called,) = whole.message.tool_calls
        assert (called.function.name, called.function.arguments) == ("multiply", {"a": 12, "b": 7})
        parts = list(client.chat(MODEL, messages, stream=True, **fields))
        assert [c for part in parts for c in part.message.tool_calls or []] == [called]
        for end in (whole, parts[-1]):
            steps = (end.load_duration, end.prompt_eval_duration, end.eval_duration)
            assert min(steps) > 0
            assert sum(steps) <= end.total_duration
        messages += [whole.message, {"role": "tool", "tool_name": "multiply", "content": "84"}]
        parts = list(client.chat(MODEL, messages, stream=True, **fields))
        assert "".join(part.message.content for part in parts) == "12 * 7 = 84"
        answer = client.generate(MODEL, "Tell me about Tom.", format=SCHEMA, options={"seed": 3})
        jsonschema.validate(json.loads(answer.response), SCHEMA)
        with pytest.raises(ollama.ResponseError, match=r"options\.num_ctx=9999 is more than"):
            client.chat(MODEL, messages, options={"num_ctx": 9999})


class Multiply(pydantic.BaseModel):
    """Multiply two numbers"""

    a: int
    b: int


MULTIPLY = openai.pydantic_function_tool(
    Multiply, name="multiply", description="Multiply two numbers"
)
ASKED = [{"role": "user", "content": "What is 12 * 7?"}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 100}


def test_pydantic_models_are_strict_tools(client):
    assert MULTIPLY["function"]["strict"] is True
    answer = client.chat.completions.parse(messages=ASKED, tools=[MULTIPLY], **GREEDY)
    (called,) = answer.choices[0].message.tool_calls
    assert called.function.parsed_arguments == Multiply(a=12, b=7)
    answer = client.chat.completions.parse(
        messages=ASKED, tools=[MULTIPLY], tool_choice="none", **GREEDY
    )
    assert answer.choices[0].message.tool_calls is None


def test_a_streamed_loop_of_tools(client):
    """OpenAI's stream helper, until the model answers."""
    messages, told = list(ASKED), []
    for _ in range(3):
        with client.chat.completions.stream(
            messages=messages, tools=[MULTIPLY], **GREEDY
        ) as stream:
            told += [event.type for event in stream]
            message = stream.get_final_completion().choices[0].message
        if not message.tool_calls:
            break
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
        for called in message.tool_calls:
            numbers = called.function.parsed_arguments
            assert isinstance(numbers, Multiply)
            result = {
                "role": "tool",
                "tool_call_id": called.id,
                "content": str(numbers.a * numbers.b),
            }
            messages.append(result)
    assert message.content == "12 * 7 = 84"
    assert told.count("tool_calls.function.arguments.done") == 1
    assert told.count("content.done") == 1


def test_the_example_agent(server):
    environment = os.environ | {"OCTAVO_URL": server.url + "/v1"}
    command = [sys.executable, str(ROOT / "examples/agent.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "What is 12 * 7?",
        '  multiply({"a": 12, "b": 7}) = 84',
        "12 * 7 = 84",
        "What is the weather in Oslo?",
        '  get_weather({"city": "Oslo"}) = {"weather": "sunny", "degrees": 19}',
        "It is sunny in Oslo and it is 19 degrees.",
    ]


def test_the_example_agent_with_a_cut_call(client, monkeypatch):
    """The arguments of a call that the length limit cuts are no JSON."""
    agent = runpy.run_path(str(ROOT / "examples/agent.py"))
    create = client.chat.completions.create
    shorter = lambda **fields: create(**fields | {"max_tokens": 18})  # noqa: E731
    monkeypatch.setattr(client.chat.completions, "create", shorter)
    answer = agent["answer"](client, MODEL, "What is 12 * 7?")
    assert answer == "The answer was longer than max_tokens."
