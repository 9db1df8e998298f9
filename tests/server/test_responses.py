"""OpenAI's Responses API, with a fake engine and the types of OpenAI's client."""

import asyncio
import json
from collections import defaultdict

import pytest
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import TypeAdapter

from octavo.server import http_state, responses
from tests.server import fake_engine
from tests.server.fake_engine import Call, FakeAsyncLLM, make_tokenizer, with_server
from tests.server.test_tools import ANSWER, CALL, TEMPLATE

EVENT = TypeAdapter(ResponseStreamEvent)
ITEM = TypeAdapter(ResponseItem)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "name": "add", "description": "Add.", "parameters": PARAMETERS}
OTHER = {"type": "function", "name": "sub", "parameters": PARAMETERS}
LOGPROBS = ["message.output_text.logprobs"]
PATH = "/v1/responses"


@pytest.fixture(autouse=True)
def _long_prompts(monkeypatch):
    monkeypatch.setattr(fake_engine, "MAX_MODEL_LEN", 4096)


def serve(scenario, answer=ANSWER, template=TEMPLATE, step_time=0.0, **settings):
    async def run(served):
        served.engine.answer = answer
        served.engine.step_time = step_time
        await scenario(served)

    with_server(run, lambda: FakeAsyncLLM(tokenizer=make_tokenizer(template)), **settings)


async def create(served, given="hi", **fields):
    """Return a response, after a check of its form."""
    response = await served.post(PATH, input=given, **fields)
    return checked(response)


def checked(response):
    assert response.status_code == 200, response.text
    Response.model_validate_json(response.text, strict=True)
    found = response.json()
    for item in found["output"]:
        ITEM.validate_python(item, strict=True)
    return found


async def refused(served, given="hi", status=400, **fields):
    """Return the error of a request, which is the same with a stream."""
    errors = []
    for stream in (False, True):
        response = await served.post(PATH, input=given, stream=stream, **fields)
        assert response.status_code == status, response.text
        errors.append(response.json()["error"])
    assert errors[0] == errors[1]
    return errors[0]


def parse(body):
    """Return the events of a stream, after checks of their form, numbers and order."""
    events = []
    for number, block in enumerate(body.split("\n\n")[:-1]):
        name, data = block.split("\n")
        data = data.removeprefix("data: ")
        event = json.loads(data)
        assert EVENT.validate_json(data, strict=True).type == event["type"]
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def fold(events):
    """Return the last response of a stream, after a check that all other events agree with it."""
    final = events[-1]["response"]
    output, parts, texts = [], defaultdict(dict), defaultdict(str)
    logprobs = defaultdict(list)
    is_open = False
    for event in events:
        kind, index = event["type"], event.get("output_index")
        place = (index, event.get("content_index"))
        if kind == "response.output_item.added":
            assert not is_open
            assert index == len(output)
            is_open = True
            output.append(event["item"])
            assert event["item"]["status"] == "in_progress"
        elif kind == "response.output_item.done":
            assert is_open
            is_open = False
            assert event["item"]["id"] == output[index]["id"]
            output[index] = event["item"]
        elif index is not None:
            assert is_open
            assert index == len(output) - 1
            assert event["item_id"] == output[index]["id"]
            if kind == "response.content_part.added":
                assert event["part"]["text"] == ""
                parts[place] = event["part"]
            elif kind == "response.content_part.done":
                assert event["part"]["type"] == parts[place]["type"]
                assert event["part"]["text"] == texts[place]
                parts[place] = event["part"]
            elif kind.endswith(".delta"):
                texts[place] += event["delta"]
                logprobs[place] += event.get("logprobs", [])
            else:
                assert event.get("text", event.get("arguments")) == texts[place]
                assert event.get("logprobs", []) == logprobs[place]
    assert not is_open
    for index, item in enumerate(output):
        if item["type"] == "function_call":
            assert item["arguments"] == texts[index, None]
        else:
            assert item["content"] == [parts[index, 0]]
            assert parts[index, 0].get("logprobs", []) == logprobs[index, 0]
    assert output == final["output"]
    return final


def bare(response):
    """Return a response without what differs from request to request."""
    text = json.dumps(response).replace(response["id"].partition("_")[2], "ID")
    found = json.loads(text) | {"created_at": 0, "completed_at": 0, "background": False}
    for item in found["output"]:
        item.pop("call_id", None)
    return found


async def whole_and_streamed(served, given="hi", **fields):
    """Return the whole response, after checks of the streamed and the stored one."""
    whole = await create(served, given, **fields)
    response = await served.post(PATH, input=given, **fields, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = parse(response.text)
    begun = [event["type"] for event in events[:2]]
    assert begun == ["response.created", "response.in_progress"]
    assert [event["response"]["status"] for event in events[:2]] == ["in_progress"] * 2
    assert events[-1]["type"] == f"response.{whole['status']}"
    final = fold(events)
    assert bare(final) == bare(whole)
    for made in (whole, final):
        assert checked(await served.http.get(f"{PATH}/{made['id']}")) == made
    return whole


def prompt_of(served):
    return bytes(t for t in served.engine.requests[-1].prompt_token_ids if t < 256).decode()


def test_items_of_all_kinds():
    async def scenario(served):
        response = await whole_and_streamed(served, tools=[TOOL])
        reasoning, message, *calls = response["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "I add."}]
        (part,) = message["content"]
        assert (part["type"], part["text"]) == ("output_text", "Sure.")
        assert [(c["name"], c["arguments"]) for c in calls] == [("add", '{"a": 1}')] * 2
        assert len({c["call_id"] for c in calls}) == 2
        assert len({item["id"] for item in response["output"]}) == 4
        assert {item["status"] for item in response["output"]} == {"completed"}
        assert (response["status"], response["error"]) == ("completed", None)
        prompt = len(served.engine.requests[-1].prompt_token_ids)
        assert response["usage"] == {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len(ANSWER) + 1,
            "output_tokens_details": {"reasoning_tokens": len("I add.")},
            "total_tokens": prompt + len(ANSWER) + 1,
        }

    serve(scenario)


def test_a_response_that_is_cut():
    async def scenario(served):
        for limit, status in ((5, "incomplete"), (80, "incomplete"), (None, "completed")):
            response = await whole_and_streamed(served, tools=[TOOL], max_output_tokens=limit)
            assert response["status"] == status
            assert response["output"][-1]["status"] == status
            cut = {"reason": "max_output_tokens"} if limit else None
            assert response["incomplete_details"] == cut

    serve(scenario)


def test_an_empty_response_has_a_message():
    async def scenario(served):
        (message,) = (await whole_and_streamed(served))["output"]
        assert [part["text"] for part in message["content"]] == [""]

    serve(scenario, answer="")


def test_fields_are_returned():
    fields = {
        "model": "fake",
        "instructions": "Be kind.",
        "temperature": 0.5,
        "top_p": 0.25,
        "max_output_tokens": 200,
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "parallel_tool_calls": False,
        "max_tool_calls": 3,
        "reasoning": {"effort": "low", "summary": "auto"},
        "tools": [{**TOOL, "strict": True}],
        "tool_choice": {"type": "function", "name": "add"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
    }

    async def scenario(served):
        found = await whole_and_streamed(
            served, **fields, service_tier="flex", truncation="disabled"
        )
        assert {name: found[name] for name in fields} == fields
        assert (found["service_tier"], found["truncation"]) == ("default", "disabled")
        params = served.engine.params[-1]
        assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.25, 200)
        found = await create(served)
        assert (found["temperature"], found["top_p"], found["store"]) == (1.0, 1.0, True)

    serve(scenario)


def test_the_conversation_reaches_the_template():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("1 +", "2?")]},
        {"type": "reasoning", "id": "rs_x", "summary": [{"type": "summary_text", "text": "Hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Wait", "annotations": []}],
        },
        {"type": "function_call", "call_id": "x", "name": "add", "arguments": '{"a": 2}'},
        {"type": "function_call", "call_id": "y", "name": "add", "arguments": '{"a": 3}'},
        {"type": "function_call_output", "call_id": "x", "output": "3"},
        {
            "type": "function_call_output",
            "call_id": "y",
            "output": [{"type": "input_text", "text": "4"}],
        },
        {"role": "assistant", "content": "A"},
        {"role": "assistant", "content": "B"},
        {"type": "reasoning", "summary": [], "encrypted_content": "?"},
        {"role": "developer", "content": "So?"},
    ]

    async def scenario(served):
        response = await create(served, items, instructions="Be kind.")
        calls = [
            f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}}}}}\n</tool_call>'
            for a in (2, 3)
        ]
        prompt = (
            "<system>Be kind.<user>1 +\n2?<assistant><think>\nHm\n</think>\n\nWait"
            f"{''.join(calls)}<tool>3<tool>4<assistant>A<assistant>B<system>So?<assistant>"
        )
        assert prompt_of(served) == prompt
        counted = await served.post(f"{PATH}/input_tokens", input=items, instructions="Be kind.")
        assert counted.json() == {
            "object": "response.input_tokens",
            "input_tokens": response["usage"]["input_tokens"],
        }

    serve(scenario)


def test_choices_of_tools():
    async def scenario(served):
        allowed = {"type": "allowed_tools", "tools": [{"type": "function", "name": "sub"}]}
        prompts = set()
        for choice, kind, names in [
            ("auto", "triggered_tags", ["add", "sub"]),
            ("required", "sequence", ["add", "sub"]),
            ({"type": "function", "name": "add"}, "sequence", ["add"]),
            ({**allowed, "mode": "auto"}, "triggered_tags", ["sub"]),
            ({**allowed, "mode": "required"}, "sequence", ["sub"]),
        ]:
            found = await create(served, tools=[TOOL, OTHER], tool_choice=choice)
            assert found["tool_choice"] == choice
            assert [tool["name"] for tool in found["tools"]] == ["add", "sub"]
            # All choices have the same prompt, and so the same cached prefix.
            prompts.add(prompt_of(served))
            wanted = json.loads(served.engine.params[-1].structured_outputs.structural_tag)
            form = wanted["format"]
            assert form["type"] == kind
            tags = form if kind == "triggered_tags" else form["elements"][-1]
            found = [
                n for n in ("add", "sub") if f'"{n}"' in json.dumps(tags["tags"]).replace("\\", "")
            ]
            assert found == names
        (prompt,) = prompts
        assert "sub" in prompt
        assert "null" not in prompt  # of fields that the request does not have
        found = await whole_and_streamed(served, tools=[TOOL], tool_choice="none")
        assert [item["type"] for item in found["output"]] == ["message"]
        await create(served, tools=[TOOL], parallel_tool_calls=False)
        wanted = json.loads(served.engine.params[-1].structured_outputs.structural_tag)
        assert wanted["format"]["stop_after_first"]

    serve(scenario, answer=CALL)


def test_allowed_tools_leave_the_prompt_as_it_is():
    async def scenario(served):
        allowed = {"type": "allowed_tools", "tools": [{"type": "function", "name": "sub"}]}
        for choice in ("auto", {**allowed, "mode": "auto"}, {**allowed, "mode": "required"}):
            await create(served, tools=[TOOL, OTHER], tool_choice=choice)
            assert prompt_of(served).startswith("add sub <")

    shown = "{% for t in tools %}{{ t.function.name }} {% endfor %}"
    serve(scenario, answer=CALL, template=shown + TEMPLATE)


def test_formats_of_text():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    async def scenario(served):
        form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
        found = await create(served, text={"format": form})
        assert found["text"]["format"] == form
        assert json.loads(served.engine.params[-1].structured_outputs.json) == schema
        await create(served, text={"format": {"type": "json_object"}})
        assert served.engine.params[-1].structured_outputs.json_object

    serve(scenario, answer='{"a":1}')


def test_reasoning_effort_reaches_the_template():
    async def scenario(served):
        await create(served, reasoning={"effort": "high"})
        assert prompt_of(served).startswith("high")

    serve(scenario, template="{{ reasoning_effort }}" + TEMPLATE)


def test_logprobs():
    async def scenario(served):
        found = await whole_and_streamed(served, include=LOGPROBS, top_logprobs=2)
        entries = found["output"][0]["content"][0]["logprobs"]
        assert bytes(b for e in entries[:-1] for b in e["bytes"]).decode() == "Hällo"
        assert {len(e["top_logprobs"]) for e in entries} == {2}
        found = await create(served, include=["reasoning.encrypted_content"])
        assert found["output"][0]["content"][0]["logprobs"] == []

    serve(scenario, answer="Hällo", template=fake_engine.TEMPLATE)


def test_logprobs_of_an_answer_with_parts():
    async def scenario(served):
        error = await refused(served, include=LOGPROBS, tools=[TOOL])
        assert error["param"] == "include"

    serve(scenario)


def test_responses_follow_each_other():
    async def scenario(served):
        first = await create(served, tools=[TOOL], instructions="Be kind.")
        calls = [item["call_id"] for item in first["output"] if item["type"] == "function_call"]
        outputs = [
            {"type": "function_call_output", "call_id": call, "output": str(i)}
            for i, call in enumerate(calls)
        ]
        second = await create(served, outputs, previous_response_id=first["id"], tools=[TOOL])
        prompt = prompt_of(served)
        assert prompt.endswith(
            f"<user>hi<assistant><think>\nI add.\n</think>\n\nSure.{CALL}{CALL}"
            "<tool>0<tool>1<assistant>"
        )
        assert "Be kind." not in prompt  # instructions belong to one response
        assert second["previous_response_id"] == first["id"]
        await create(served, "And?", previous_response_id=second["id"])
        assert prompt_of(served).count("Sure.") == 2
        # References mean the items themselves.
        references = [{"type": "item_reference", "id": i["id"]} for i in first["output"]]
        for given in (references, [{"id": r["id"]} for r in references]):
            await create(served, [*given, *outputs])
            assert prompt_of(served) == prompt.removeprefix(
                prompt[: prompt.index("<user>hi") + len("<user>hi")]
            )

    serve(scenario)


def test_input_items():
    async def scenario(served):
        first = await create(served, [{"role": "user", "content": str(i)} for i in range(3)])
        second = await create(served, "last", previous_response_id=first["id"])
        path = f"{PATH}/{second['id']}/input_items"

        async def page(**query):
            response = await served.http.get(path, params=query)
            assert response.status_code == 200, response.text
            ResponseItemList.model_validate_json(response.text, strict=True)
            found = response.json()
            for item in found["data"]:
                ITEM.validate_python(item, strict=True)
            return found

        everything = (await page(order="asc"))["data"]
        assert everything[3:4] == first["output"]
        assert [item["content"][0]["text"] for item in everything] == ["0", "1", "2", "x", "last"]
        newest = await page()
        assert newest["data"] == everything[::-1]
        assert not newest["has_more"]
        seen, after = [], {}
        while True:
            found = await page(order="asc", limit=2, **after)
            seen += found["data"]
            assert (found["first_id"], found["last_id"]) == (
                found["data"][0]["id"],
                found["data"][-1]["id"],
            )
            after = {"after": found["last_id"]}
            if not found["has_more"]:
                break
        assert seen == everything
        for query, param in [
            ({"limit": "0"}, "limit"),
            ({"limit": "101"}, "limit"),
            ({"limit": "²"}, "limit"),
            ({"order": "up"}, "order"),
            ({"after": "msg_x"}, "after"),
        ]:
            response = await served.http.get(path, params=query)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)

    serve(scenario, answer="x")


def test_deleted_and_unknown_responses(monkeypatch):
    async def scenario(served):
        made = await create(served)
        path = f"{PATH}/{made['id']}"
        gone = await served.http.delete(path)
        assert gone.json() == {"id": made["id"], "object": "response", "deleted": True}
        unstored = await create(served, store=False)
        assert unstored["store"] is False
        for name in (made["id"], unstored["id"], "resp_x", "..%2F..%2Flock", "resp_" + "0" * 32):
            for request in (
                served.http.get(f"{PATH}/{name}"),
                served.http.delete(f"{PATH}/{name}"),
                served.http.get(f"{PATH}/{name}/input_items"),
                served.http.get(f"{PATH}/{name}?stream=true"),
                served.post(f"{PATH}/{name}/cancel"),
            ):
                response = await request
                assert response.status_code == 404, response.text
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            if "/" not in name:
                error = await refused(served, previous_response_id=name)
                assert error["param"] == "previous_response_id"
                assert error["code"] == "previous_response_not_found"
        many = [{"type": "item_reference", "id": f"msg_{i:032x}_0"} for i in range(99)]
        await refused(served, many)
        monkeypatch.setattr(responses, "MAX_REFERENCED", 1)
        kept = [(await create(served))["output"][0]["id"] for _ in range(2)]
        error = await refused(served, [{"type": "item_reference", "id": i} for i in kept])
        assert "refers to items of more than" in error["message"]
        item = made["output"][0]["id"]
        error = await refused(served, [{"type": "item_reference", "id": item}])
        assert (error["param"], error["code"]) == ("input[0].id", "item_not_found")

    serve(scenario)


def test_another_key_finds_nothing():
    async def scenario(served):
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("a", "b"))
        served.http.headers.update(mine)
        made = await create(served)
        running = await create(served, background=True)
        conversation = (
            await served.post("/v1/conversations", items=[{"role": "user", "content": "x"}])
        ).json()
        item = (await served.http.get(f"/v1/conversations/{conversation['id']}/items")).json()
        served.http.headers.update(other)
        for name in (made["id"], running["id"]):
            path = f"{PATH}/{name}"
            for request in (
                served.http.get(path),
                served.http.get(f"{path}?stream=true"),
                served.http.delete(path),
                served.http.get(f"{path}/input_items"),
                served.post(f"{path}/cancel"),
            ):
                assert (await request).status_code == 404
            error = await refused(served, previous_response_id=name)
            assert error["code"] == "previous_response_not_found"
        await refused(served, status=404, conversation=conversation["id"])
        for name in (made["output"][0]["id"], item["data"][0]["id"]):
            error = await refused(served, [{"type": "item_reference", "id": name}])
            assert error["code"] == "item_not_found"
        path = f"/v1/conversations/{conversation['id']}"
        for request in (
            served.http.get(path),
            served.post(path, metadata={}),
            served.http.get(f"{path}/items"),
            served.post(f"{path}/items", items=[{"role": "user", "content": "x"}]),
            served.http.delete(path),
        ):
            assert (await request).status_code == 404
        served.http.headers.update(mine)
        assert (await until_done(served, running["id"]))["status"] == "completed"
        assert checked(await served.http.get(f"{PATH}/{made['id']}")) == made

    serve(scenario, api_key=["a", "b"], step_time=0.002)


async def until_done(served, name):
    while True:
        found = checked(await served.http.get(f"{PATH}/{name}"))
        if found["status"] not in ("queued", "in_progress"):
            return found
        await asyncio.sleep(0.002)


def test_background():
    async def scenario(served):
        whole = await create(served, tools=[TOOL])
        begun = await create(served, tools=[TOOL], background=True)
        assert begun["status"] in ("queued", "in_progress")
        assert begun["usage"] is None
        path = f"{PATH}/{begun['id']}"
        items = (await served.http.get(f"{path}/input_items")).json()["data"]
        assert [item["content"][0]["text"] for item in items] == ["hi"]
        error = await refused(served, previous_response_id=begun["id"])
        assert "queued" in error["message"] or "in_progress" in error["message"]
        live = Call(served, f"{path}?stream=true", b"", method="GET")
        found = await until_done(served, begun["id"])
        assert bare(found) == bare(whole)
        assert found["background"]
        await create(served, [{"role": "user", "content": "x"}], previous_response_id=begun["id"])
        await live.task
        body = live.body.decode()
        events = parse(body)
        assert [e["type"] for e in events[:3]] == [
            "response.created",
            "response.queued",
            "response.in_progress",
        ]
        assert fold(events) == found
        # Each later reader gets the same bytes, wherever it begins.
        blocks = body.split("\n\n")[:-1]
        for number in range(len(blocks)):
            query = {"stream": "true", "starting_after": str(number)}
            again = await served.http.get(path, params=query)
            assert again.status_code == 200
            assert again.text == "".join(b + "\n\n" for b in blocks[number + 1 :])
        assert (await served.http.get(f"{path}?stream=true")).text == body
        late = await served.http.get(f"{path}?stream=true&starting_after={len(blocks)}")
        assert late.json()["error"]["param"] == "starting_after"
        assert checked(await served.post(f"{path}/cancel")) == found
        assert served.state.body_bytes == 0
        memory = served.engine.request_memory
        assert memory.used == memory.kept > 0

    serve(scenario, step_time=0.001)


def test_readers_of_a_running_response_get_the_same_bytes():
    async def scenario(served):
        body = json.dumps({"input": "hi", "background": True, "stream": True}).encode()
        first = Call(served, PATH, body)
        while first.body.count(b"\n\n") < 5:
            first.grown.clear()
            await first.grown.wait()
        name = parse(first.body.decode().rpartition("\n\n")[0] + "\n\n")[0]["response"]["id"]
        first.disconnect()
        await first.task
        path = f"{PATH}/{name}?stream=true"
        calls = [Call(served, f"{path}&starting_after={n}", b"", method="GET") for n in (0, 3, 500)]
        whole = Call(served, path, b"", method="GET")
        for call in (*calls, whole):
            await call.task
            assert call.status == 200
        assert whole.body.startswith(first.body)
        events = parse(whole.body.decode())
        assert fold(events)["status"] == "completed"
        blocks = whole.body.split(b"\n\n")[:-1]
        for call, number in zip(calls, (0, 3, 500), strict=True):
            assert call.body == b"".join(b + b"\n\n" for b in blocks[number + 1 :])
        assert served.engine.aborted == []

    serve(scenario, step_time=0.001)


def test_a_cancelled_response():
    async def scenario(served):
        begun = await create(served, background=True)
        path = f"{PATH}/{begun['id']}"
        reader = Call(served, f"{path}?stream=true", b"", method="GET")
        while reader.body.count(b"\n\n") < 8:
            reader.grown.clear()
            await reader.grown.wait()
        cancelled = checked(await served.post(f"{path}/cancel"))
        assert cancelled["status"] == "cancelled"
        (item,) = cancelled["output"]
        assert item["status"] == "incomplete"
        assert ANSWER.startswith("<think>\n" + item["content"][0]["text"])
        assert len(served.engine.aborted) == 1
        assert checked(await served.http.get(path)) == cancelled
        assert checked(await served.post(f"{path}/cancel")) == cancelled
        await reader.task
        assert fold(parse(reader.body.decode())) == cancelled
        error = await refused(served, previous_response_id=begun["id"])
        assert "cancelled" in error["message"]
        foreground = await create(served, max_output_tokens=1)
        response = await served.post(f"{PATH}/{foreground['id']}/cancel")
        assert response.status_code == 400
        assert "background" in response.json()["error"]["message"]
        response = await served.http.get(f"{PATH}/{foreground['id']}?stream=true")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")

    serve(scenario, step_time=0.002)


def test_a_running_response_is_deleted():
    async def scenario(served):
        begun = await create(served, background=True)
        path = f"{PATH}/{begun['id']}"
        assert (await served.http.delete(path)).status_code == 200
        assert (await served.http.get(path)).status_code == 404
        assert len(served.engine.aborted) == 1

    serve(scenario, step_time=0.002)


def test_a_response_that_is_refused_is_not_begun():
    async def scenario(served):
        for fields in ({"tools": [{**TOOL, "name": "?"}]}, {"temperature": -1}):
            error = await refused(served, background=True, **fields)
            assert error["param"] in ("tools[0].name", "temperature")
        assert served.state.background.running == {}
        held = served.state.admit(1, "x")
        with held:
            response = await served.post(PATH, input="hi", background=True)
            assert response.status_code == 429
        assert served.state.objects._data == {}

    serve(scenario, max_num_queued_reqs=1)


@pytest.mark.parametrize("way", ["stream", "background", "whole"])
def test_an_engine_that_dies(way):
    async def scenario(served):
        body = {"input": "hi", "stream": way == "stream", "background": way == "background"}
        call = Call(served, PATH, json.dumps(body).encode())
        while not served.engine.live or served.engine.num_steps < 10:
            await asyncio.sleep(0.001)
        served.engine.die("lightning")
        await call.task
        if way == "whole":
            assert call.status == 503
            return
        if way == "stream":
            found = fold(parse(call.body.decode()))
        else:
            found = await until_done(served, json.loads(call.body)["id"])
            text = (await served.http.get(f"{PATH}/{found['id']}?stream=true")).text
            assert fold(parse(text)) == found
        assert found["status"] == "failed"
        assert found["error"] == {"code": "server_error", "message": "lightning"}
        assert found["output"][-1]["status"] == "incomplete"

    serve(scenario, step_time=0.001)


def test_a_deadline_fails_a_response():
    async def scenario(served):
        await create(served)  # starts the process that renders prompts
        for deadline in (300, 6000):  # on a busy machine the first may pass before it begins
            served.engine.step_time = deadline / 6000
            served.http.headers["x-deadline-ms"] = str(deadline)
            begun = await served.post(PATH, input="hi", background=True)
            if begun.status_code == 200:
                break
        found = await until_done(served, checked(begun)["id"])
        assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
        assert "deadline" in found["error"]["message"]

    serve(scenario)


def test_the_end_of_the_server_waits_for_background_responses():
    async def scenario(served):
        begun = await create(served, background=True)
        assert served.state.num_active == 1
        served.state.begin_drain()
        while served.state.num_active:
            await asyncio.sleep(0.001)
        served.state.draining = False
        assert checked(await served.http.get(f"{PATH}/{begun['id']}"))["status"] == "completed"

    serve(scenario, step_time=0.001)


def test_events_are_dropped_if_memory_is_short():
    async def scenario(served):
        memory = served.engine.request_memory
        begun = await create(served, background=True)
        reader = Call(served, f"{PATH}/{begun['id']}?stream=true", b"", method="GET")
        while not reader.body:
            reader.grown.clear()
            await reader.grown.wait()
        memory.limit = memory.used
        found = await until_done(served, begun["id"])
        await reader.task
        last = reader.body.decode().split("\n\n")[-2]
        assert last.startswith("event: error\n")
        event = EVENT.validate_json(last.partition("data: ")[2], strict=True)
        assert event.sequence_number == reader.body.count(b"\n\n") - 1
        assert (found["status"], event.code) == ("completed", "events_not_found")
        response = await served.http.get(f"{PATH}/{begun['id']}?stream=true")
        assert response.status_code in (400, 404)
        memory.limit = 2**30

    serve(scenario, step_time=0.001)


def test_a_restart(tmp_path):
    kept = {"turns": 1}

    async def before(served):
        kept["made"] = made = await create(served, tools=[TOOL])
        ended = await create(served, background=True)
        kept["ended"] = await until_done(served, ended["id"])
        kept["events"] = (await served.http.get(f"{PATH}/{ended['id']}?stream=true")).text
        gone = await create(served)
        await served.http.delete(f"{PATH}/{gone['id']}")
        kept["gone"] = gone["id"]
        created = await served.post("/v1/conversations", metadata={"a": "b"})
        kept["conversation"] = created.json()
        await create(served, conversation=created.json()["id"])
        served.engine.paused = True
        kept["cut"] = (await create(served, background=True, previous_response_id=made["id"]))["id"]
        # The process is killed: nothing more is written.
        task = next(iter(served.state.background._tasks))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def after(served):
        for name in ("made", "ended"):
            found = checked(await served.http.get(f"{PATH}/{kept[name]['id']}"))
            assert found == kept[name]
        path = f"{PATH}/{kept['ended']['id']}?stream=true"
        assert (await served.http.get(path)).text == kept["events"]
        assert (await served.http.get(f"{PATH}/{kept['gone']}")).status_code == 404
        cut = checked(await served.http.get(f"{PATH}/{kept['cut']}"))
        assert cut["status"] == "failed"
        assert "restarted" in cut["error"]["message"]
        assert (await served.http.get(f"{PATH}/{cut['id']}/input_items")).json()["data"]
        await refused(served, previous_response_id=cut["id"])
        await create(served, "So?", previous_response_id=kept["made"]["id"])
        assert "Sure." in prompt_of(served)
        found = await served.http.get(f"/v1/conversations/{kept['conversation']['id']}")
        assert found.json() == kept["conversation"]
        await create(served, "So?", conversation=kept["conversation"]["id"])
        kept["turns"] += 1
        assert prompt_of(served).count("<user>") == kept["turns"]

    for scenario in (before, after):
        serve(scenario, state_dir=str(tmp_path))
    serve(after, state_dir=str(tmp_path))
    for file in tmp_path.rglob("*"):
        assert file.stat().st_mode & 0o077 == 0


def test_several_front_ends_store_nothing():
    async def scenario(served):
        response = await create(served)
        assert response["store"] is False
        for fields in (
            {"store": True},
            {"background": True},
            {"previous_response_id": response["id"]},
            {"conversation": "conv_" + "0" * 32},
        ):
            error = await refused(served, **fields)
            assert error["param"] == next(iter(fields))
            assert "--api-server-count" in error["message"]
        reference = {"type": "item_reference", "id": response["output"][0]["id"]}
        error = await refused(served, [reference])
        assert (error["param"], error["code"]) == ("input[0].id", "no_store")
        assert "--api-server-count" in error["message"]
        for path in (f"{PATH}/{response['id']}", f"/v1/conversations/conv_{'0' * 32}"):
            error = (await served.http.get(path)).json()["error"]
            assert error["code"] == "no_store"

    serve(scenario, api_server_count=2)


def item(**fields):
    return {"input": [{"role": "user", "content": "x"}, fields]}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "missing"),
        ({"input": []}, "input", "one or more items"),
        ({"input": 5}, "input", "input=5"),
        ({"input": ["x"]}, "input[0]", "not an item"),
        (item(role="critic", content=""), "input[1].role", "critic"),
        (item(role="user", content=5), "input[1].content", "content=5"),
        (item(role="user", content=["x"]), "input[1].content[0]", "not a part"),
        (
            item(role="user", content=[{"type": "input_image", "image_url": "x"}]),
            "input",
            "is of type 'input_image', which is not supported here",
        ),
        (
            item(role="user", content=[{"type": "input_image", "file_id": 5}]),
            "input[1].content[0].file_id",
            "is not a string",
        ),
        (
            item(role="user", content=[{"type": "input_image", "image_url": 5}]),
            "input[1].content[0].image_url",
            "image_url=5",
        ),
        (
            item(role="user", content=[{"type": "input_file", "file_id": "x"}]),
            "input[1].content[0].type",
            "'input_file' is not supported",
        ),
        (item(role="user", content=[{"type": "input_text"}]), "input[1].content[0].text", "None"),
        (item(type="web_search_call"), "input[1].type", "'web_search_call' is not supported"),
        (item(type="function_call", call_id="x", name="f"), "input[1].arguments", "None"),
        (item(type="function_call_output", call_id="x", output="y"), "input", "function_call"),
        (item(type="reasoning", summary="x"), "input[1].summary", "list of parts"),
        (item(type="item_reference"), "input[1].id", "None"),
        (item(type="message", role="user", content="", id=5), "input[1].id", "id=5"),
        (item(type="message", role="user", content="", status="?"), "input[1].status", "completed"),
        *[
            ({"tools": [{"type": kind}]}, "tools[0].type", f"'{kind}' is not supported")
            for kind in (
                "web_search",
                "file_search",
                "code_interpreter",
                "computer_use_preview",
                "mcp",
                "image_generation",
                "local_shell",
                "custom",
            )
        ],
        ({"tools": [{"type": "function"}]}, "tools[0].name", "required"),
        ({"tools": [TOOL, TOOL]}, "tools", "twice"),
        ({"tools": [{**TOOL, "name": "?"}]}, "tools[0].name", "letters"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "any"}, "tool_choice", "'any' is not supported"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "'mcp' is not supported"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name", "string"),
        (
            {
                "tool_choice": {"type": "function", "name": TOOL["name"], "namespace": 5},
                "tools": [TOOL],
            },
            "tool_choice.namespace",
            "5",
        ),
        (
            {"tool_choice": {"type": "function", "name": "x"}, "tools": [TOOL]},
            "tool_choice",
            "'x', which is not a function",
        ),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode", "auto or required"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.tools",
            "one or more",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"top_p": 2}, "top_p", "top_p"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"top_logprobs": 21, "include": LOGPROBS}, "top_logprobs", "20"),
        ({"include": ["x"]}, "include", "'x' is unknown"),
        ({"truncation": "auto"}, "truncation", "'auto' is not supported"),
        ({"prompt": {"id": "x"}}, "prompt", "use instructions and input."),
        ({"messages": []}, "messages", "use input."),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "missing"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "xml"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": 5}}},
            "text.format.schema",
            "5",
        ),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "much"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "16"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a", "512"),
        ({"background": True, "store": False}, "background", "store=true"),
        (
            {"previous_response_id": "resp_x", "conversation": "conv_x"},
            "previous_response_id",
            "one of them",
        ),
        ({"stream_options": {"include_obfuscation": True}}, None, "include_obfuscation"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_bad_requests(fields, param, words):
    async def scenario(served):
        error = await refused(served, **{"given": "hi", **rename(fields)})
        assert error["param"] == (param or "stream_options.include_obfuscation")
        assert words in error["message"]
        assert error["type"] == "invalid_request_error"
        assert served.engine.requests == []

    def rename(fields):
        return {"given" if name == "input" else name: value for name, value in fields.items()}

    serve(scenario)


def test_the_items_before_have_a_limit():
    async def scenario(served):
        long = "x" * 1500
        items = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": long}]}]
        first = await create(served, [*items, {"role": "user", "content": "x"}])
        error = await refused(served, items, previous_response_id=first["id"])
        assert (error["param"], error["code"]) == ("input", "request_too_large")

    serve(scenario, max_request_bytes=2048)


def test_short_requests_cannot_multiply_long_items():
    async def scenario(served):
        answers = (await create(served, "x" * 1800))["id"]
        item = f"msg_{answers.removeprefix('resp_')}_0"
        reference = {"type": "item_reference", "id": item}
        await create(served, [reference] * 2)
        error = await refused(served, [reference] * 5)
        assert (error["code"], error["param"]) == ("request_too_large", "input")
        assert "--max-request-bytes" in error["message"]

    serve(scenario, answer="", max_request_bytes=8192)


def test_loaded_objects_count_as_bodies(monkeypatch):
    monkeypatch.setattr(http_state, "_BODIES_NBYTES", 2**17)
    monkeypatch.setattr(fake_engine, "MAX_MODEL_LEN", 2**18)

    async def scenario(served):
        first = (await create(served, "x" * 2**16))["id"]
        served.engine.paused = True
        running = await create(served, background=True, previous_response_id=first)
        while served.state.background.running and not served.engine.requests[1:]:
            await asyncio.sleep(0.001)
        assert 2**16 < served.state.body_bytes < 2**17
        response = await served.post(PATH, input="hi", previous_response_id=first)
        assert response.status_code == 429
        assert "bodies" in response.json()["error"]["message"]
        listed = await served.http.get(f"{PATH}/{first}/input_items")
        assert listed.status_code == 429
        await served.post(f"{PATH}/{running['id']}/cancel")
        assert served.state.body_bytes == 0
        listed = await served.http.get(f"{PATH}/{first}/input_items")
        assert listed.status_code == 200
        assert served.state.body_bytes == 0

    serve(scenario, answer="Yes" * 20, max_request_bytes=2**17)
