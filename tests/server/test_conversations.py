"""Conversations of OpenAI's API, with a fake engine and the types of OpenAI's client."""

import asyncio
import json

import pytest
from openai.types.conversations import Conversation, ConversationItemList
from openai.types.conversations.conversation_item import ConversationItem
from pydantic import TypeAdapter

from octavo.server import conversations, responses
from tests.server.fake_engine import Call
from tests.server.test_responses import create, prompt_of, refused, serve

PATH = "/v1/conversations"
ITEM = TypeAdapter(ConversationItem)


def user(text):
    return {"role": "user", "content": text}


async def begin(served, *texts, **fields):
    items = [user(text) for text in texts] or None
    response = await served.post(PATH, items=items, **fields)
    assert response.status_code == 200, response.text
    Conversation.model_validate_json(response.text, strict=True)
    return response.json()


async def texts(served, conversation, **query):
    query = {"order": "asc", **query}
    response = await served.http.get(f"{PATH}/{conversation['id']}/items", params=query)
    ConversationItemList.model_validate_json(response.text, strict=True)
    found = response.json()["data"]
    for item in found:
        ITEM.validate_python(item, strict=True)
    return [item["content"][0]["text"] for item in found]


def test_responses_of_a_conversation():
    async def scenario(served):
        made = await begin(served, "first", metadata={"a": "b"})
        first = await create(served, "hi", conversation=made["id"])
        assert first["conversation"] == {"id": made["id"]}
        assert prompt_of(served).endswith("<user>first<user>hi<assistant>")
        assert await texts(served, made) == ["first", "hi", "Yes"]
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        await create(served, [reference, user("So?")], conversation={"id": made["id"]})
        assert prompt_of(served).endswith("Yes<assistant>Yes<user>So?<assistant>")
        again = await texts(served, made)
        assert again == ["first", "hi", "Yes", "Yes", "So?", "Yes"]
        assert await texts(served, made, limit=2, order="desc") == ["Yes", "So?"]
        # An answer that fails leaves the conversation as it is.
        served.engine.grammar_error = "no"
        form = {"format": {"type": "json_object"}}
        await refused(served, conversation=made["id"], text=form)
        assert await texts(served, made) == again

    serve(scenario, answer="Yes")


async def pages(served, path, limit):
    """Return the ids of all items of a list, as a client that reads page after page."""
    ids, query = [], {"order": "asc", "limit": limit}
    while True:
        page = (await served.http.get(path, params=query)).json()
        ids += [item["id"] for item in page["data"]]
        assert len(ids) == len(set(ids))
        if not page["has_more"]:
            return ids
        query["after"] = page["last_id"]


@pytest.mark.parametrize("limit", [1, 2])
def test_items_that_repeat_have_ids_of_their_own(limit):
    async def scenario(served):
        made = await begin(served, "a")
        path = f"{PATH}/{made['id']}/items"
        first = await create(served, "b", conversation=made["id"])
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        second = await create(served, [reference, reference], conversation=made["id"])
        given = [{**user(text), "id": "mine"} for text in "cd"]
        added = (await served.post(path, items=given)).json()["data"]
        assert added[0]["id"] == "mine"
        ids = await pages(served, path, limit)
        assert len(ids) == 8
        inputs = await pages(served, f"/v1/responses/{second['id']}/input_items", limit)
        assert inputs == ids[:5]
        for name in ids:
            assert (await served.http.get(f"{path}/{name}")).json()["id"] == name
        whole = (await served.post(PATH, items=given)).json()
        assert len(await pages(served, f"{PATH}/{whole['id']}/items", limit)) == 2

    serve(scenario, answer="Yes")


def test_background_and_streamed_responses_are_appended():
    async def scenario(served):
        made = await begin(served)
        await served.post("/v1/responses", input="a", stream=True, conversation=made["id"])
        assert await texts(served, made) == ["a", "Yes"]
        await served.post("/v1/responses", input="b", background=True, conversation=made["id"])
        while served.state.background.running:
            await asyncio.sleep(0.001)
        await create(served, "c", conversation=made["id"], store=False)
        assert await texts(served, made) == ["a", "Yes", "b", "Yes", "c", "Yes"]

    serve(scenario, answer="Yes")


def test_items_and_metadata():
    async def scenario(served):
        made = await begin(served, "a")
        path = f"{PATH}/{made['id']}"
        response = await served.post(f"{path}/items", items=[user("b"), user("c")])
        ConversationItemList.model_validate_json(response.text, strict=True)
        b, c = response.json()["data"]
        assert (await served.http.get(f"{path}/items/{c['id']}")).json() == c
        gone = await served.http.delete(f"{path}/items/{b['id']}")
        assert gone.json() == made
        assert await texts(served, made) == ["a", "c"]
        assert (await served.http.get(f"{path}/items/{b['id']}")).status_code == 404
        (d,) = (await served.post(f"{path}/items", items=[user("d")])).json()["data"]
        assert d["id"] not in (b["id"], c["id"])
        changed = (await served.post(path, metadata={"x": "y"})).json()
        assert changed == {**made, "metadata": {"x": "y"}}
        assert (await served.http.get(path)).json() == changed
        # Changes at the same time all happen.
        await asyncio.gather(
            *[served.post(f"{path}/items", items=[user(str(i))]) for i in range(20)]
        )
        found = await texts(served, made, limit=100)
        assert sorted(found) == sorted(["a", "c", "d", *map(str, range(20))])
        assert (await served.http.delete(path)).json()["deleted"] is True
        assert (await served.http.get(path)).status_code == 404
        await refused(served, status=404, conversation=made["id"])

    serve(scenario)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [user("x")] * 21}, "items"),
        ({"items": "x"}, "items"),
        ({"items": [{"type": "item_reference", "id": "x"}]}, "items[0].type"),
        ({"items": [{"role": "x"}]}, "items[0].role"),
        ({"metadata": {"a": 5}}, "metadata.a"),
    ],
    ids=str,
)
def test_bad_conversations(body, param):
    async def scenario(served):
        made = await begin(served)
        paths = [PATH, f"{PATH}/{made['id']}" + ("/items" if "items" in body else "")]
        for path in paths:
            response = await served.post(path, **body)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == param

    serve(scenario)


def test_a_conversation_has_limits(monkeypatch):
    async def scenario(served):
        made = await begin(served, "a", "b", "c")
        error = (await served.post(f"{PATH}/{made['id']}/items", items=[user("d")])).json()["error"]
        assert error["code"] == "conversation_full"
        long = await begin(served, "x" * 900)
        path = f"{PATH}/{long['id']}/items"
        error = (await served.post(path, items=[user("x" * 900)])).json()["error"]
        assert error["code"] == "conversation_full"
        assert len(await texts(served, long)) == 1

    monkeypatch.setattr(conversations, "MAX_ITEMS", 3)
    serve(scenario, max_request_bytes=2048)


def test_one_response_at_a_time_continues_a_conversation():
    async def scenario(served):
        made = await begin(served)
        fields = {"conversation": made["id"]}
        body = json.dumps({"input": "a", "stream": True, **fields}).encode()

        async def locked():
            error = await refused(served, "b", 409, conversation={"id": made["id"]})
            assert (error["param"], error["code"]) == ("conversation", "conversation_locked")
            other = await begin(served)
            await create(served, "b", conversation=other["id"], max_output_tokens=1)

        call = Call(served, "/v1/responses", body)
        await call.wait_for_body()
        await locked()
        call.disconnect()
        await call.task
        begun = await create(served, "a", conversation=made["id"], background=True)
        await locked()
        await served.post(f"/v1/responses/{begun['id']}/cancel")
        assert await texts(served, made) == []
        served.engine.step_time, served.engine.answer = 0.0, "Yes" * 9
        # Neither a refused response nor one that could not begin holds the conversation.
        unknown = [{"type": "item_reference", "id": "x"}]
        for wrong in ({"top_p": 7}, {"input": unknown}):
            for way in ({}, {"stream": True}, {"background": True}):
                body = {"input": "a", **fields, **wrong, **way}
                assert (await served.post("/v1/responses", **body)).status_code == 400
        await create(served, "a", **fields)
        assert await texts(served, made) == ["a", "Yes" * 9]

    serve(scenario, answer="Yes" * 60, step_time=0.03)  # longer than what happens meanwhile


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_response_is_stored(monkeypatch, stream):
    """The conversation has the response, too, before another response can continue it."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    save = responses.save

    async def slow(*args):
        await save(*args)
        begun.set()
        await go_on.wait()

    async def scenario(served):
        made = await begin(served, "first")
        fields = {"input": "hi", "conversation": made["id"], "stream": stream}
        monkeypatch.setattr(responses, "save", slow)
        call = Call(served, "/v1/responses", json.dumps(fields).encode())
        await begun.wait()
        call.disconnect()
        await asyncio.sleep(0.05)
        error = await refused(served, conversation=made["id"], status=409)
        assert error["code"] == "conversation_locked"
        go_on.set()
        await call.task
        assert await texts(served, made) == ["first", "hi", "Yes"]
        await create(served, "So?", conversation=made["id"])
        assert prompt_of(served).endswith("<user>first<user>hi<assistant>Yes<user>So?<assistant>")

    serve(scenario, answer="Yes")
