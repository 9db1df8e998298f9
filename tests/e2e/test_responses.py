"""Responses API of the built-in model, with OpenAI's client."""

import json
import signal
import time

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.e2e import harness

EVENT = TypeAdapter(ResponseStreamEvent)
TOOLS = {
    "multiply": lambda a, b: a * b,
    "get_weather": lambda city: {"weather": "sunny", "degrees": len(city) + 15},
}


def describe(name, description, **types):
    """Return a tool that the built-in model knows; see examples/agent.py."""
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {
        "type": "function",
        "name": name,
        "description": description,
        "parameters": parameters,
        "strict": False,
    }


DESCRIPTIONS = [
    describe("multiply", "Multiply two numbers", a="integer", b="integer"),
    describe("get_weather", "Get the weather in a city", city="string"),
]
STORY = {"model": "octavo/stories", "input": "Tell me a story about a dog.", "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(folder):
    with harness.serve(folder, "--state-dir", str(folder / "state")) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_loop_of_tools(client):
    given, previous, cached = "What is 12 * 7?", None, []
    for _ in range(3):
        response = client.responses.create(
            model="octavo/stories",
            input=given,
            tools=DESCRIPTIONS,
            temperature=0,
            max_output_tokens=200,
            previous_response_id=previous,
        )
        cached.append(response.usage.input_tokens_details.cached_tokens)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        given = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": json.dumps(TOOLS[call.name](**json.loads(call.arguments))),
            }
            for call in calls
        ]
        previous = response.id
    assert response.output_text == "12 * 7 = 84"
    assert cached[1] > 0
    items = list(client.responses.input_items.list(response.id, order="asc", limit=2))
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]


def test_whole_streamed_and_in_the_background(client):
    whole = client.responses.create(**STORY, max_output_tokens=30)
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(**STORY, max_output_tokens=30) as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    done = client.responses.create(**STORY, max_output_tokens=30, background=True)
    while done.status in ("queued", "in_progress"):
        time.sleep(0.02)
        done = client.responses.retrieve(done.id)
    assert done.output_text == whole.output_text
    assert done.usage.output_tokens == whole.usage.output_tokens == 30
    events = list(client.responses.retrieve(done.id, stream=True, starting_after=2))
    assert [event.sequence_number for event in events] == list(range(3, 3 + len(events)))
    for event in events:
        EVENT.validate_python(event.model_dump(exclude_unset=True), strict=True)
    assert events[-1].response.output_text == whole.output_text
    count = client.responses.input_tokens.count(model="octavo/stories", input=STORY["input"])
    assert count.input_tokens == whole.usage.input_tokens


def test_parsed_output(client):
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    form = {"type": "json_schema", "name": "dog", "schema": schema, "strict": True}
    made = client.responses.create(**STORY, max_output_tokens=60, text={"format": form})
    assert isinstance(json.loads(made.output_text)["age"], int)


def test_a_conversation(client):
    conversation = client.conversations.create(metadata={"a": "b"})
    for question in ("Tell me about Tom.", "And then?"):
        made = client.responses.create(
            **{**STORY, "input": question}, max_output_tokens=8, conversation=conversation.id
        )
    assert made.usage.input_tokens_details.cached_tokens > 0
    items = list(client.conversations.items.list(conversation.id, order="asc"))
    assert [item.role for item in items] == ["user", "assistant"] * 2
    client.conversations.items.delete(items[0].id, conversation_id=conversation.id)
    assert client.conversations.retrieve(conversation.id) == conversation
    assert client.conversations.delete(conversation.id).deleted


def test_cancel_and_delete(client):
    begun = client.responses.create(**STORY, background=True)
    cancelled = client.responses.cancel(begun.id)
    assert cancelled.status in ("cancelled", "completed")
    assert client.responses.retrieve(begun.id).status == cancelled.status
    client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)


def test_an_engine_that_dies_and_a_restart(client, server, folder):
    fields = {**STORY, "max_output_tokens": 120}
    expected = client.responses.create(**fields).output_text
    events = []
    for event in client.responses.create(**fields, background=True, stream=True):
        events.append(event)
        if len(events) == 8:
            server.engine_process().send_signal(signal.SIGKILL)
    made = events[-1].response
    assert made.output_text == expected
    assert [event.sequence_number for event in events] == list(range(len(events)))
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    with (
        harness.serve(folder, "--state-dir", str(folder / "state")) as second,
        openai.OpenAI(base_url=second.url + "/v1", api_key="none", max_retries=0) as again,
    ):
        assert again.responses.retrieve(made.id) == made
        assert list(again.responses.retrieve(made.id, stream=True)) == events
        following = again.responses.create(
            **{**STORY, "input": "And then?"}, max_output_tokens=8, previous_response_id=made.id
        )
        assert following.usage.input_tokens > made.usage.input_tokens + 100
