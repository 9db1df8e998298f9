"""Stored responses and conversations: each stays at the server that made it."""

import asyncio
import json
from urllib.parse import unquote

import pytest

from octavo.config import ServerConfig
from octavo.errors import RequestError
from octavo.router.stored_objects import id_of, named_objects
from tests.router.servers import FakeServer, Routed, upstream, whole

RESPONSES = "/v1/responses"


def routed(test):
    return lambda: asyncio.run(test())


class Store:
    """Server that stores responses and conversations, as an answer of `FakeServer`."""

    def __init__(self, letter):
        self.letter, self.ids = letter, set()

    def __call__(self, request):
        path = unquote(request.url.removeprefix("http://server"))
        body = json.loads(request.content or b"{}")
        if request.method == "POST" and path in ("/v1/responses", "/v1/conversations"):
            for field in ("previous_response_id", "conversation"):
                given = body.get(field)
                given = given["id"] if isinstance(given, dict) else given
                if given not in {*self.ids, None}:
                    code = "previous_response_not_found"
                    return whole(400, error={"code": code, "message": "none"})(request)
            kind = "resp" if path == "/v1/responses" else "conv"
            name = f"{kind}_{self.letter}{len(self.ids):031x}"
            self.ids.add(name)
            made = {"id": name, "server": self.letter}
            if not body.get("stream"):
                return whole(**made)(request)
            event = {"type": "response.created", "sequence_number": 0, "response": made}
            data = f"event: response.created\ndata: {json.dumps(event)}\n\n".encode()
            return 200, {"content-type": "text/event-stream"}, [data[:9], data[9:]]
        name = path.split("/")[3].partition("?")[0]
        if name not in self.ids:
            return whole(404, error={"code": "not_found", "message": "none"})(request)
        if request.method == "DELETE":
            self.ids.discard(name)
        return whole(id=name, server=self.letter)(request)


def stores(number=3):
    return [Store("abc"[i]) for i in range(number)]


async def make(router, path=RESPONSES, headers=None, **body):
    got = await router.client.post(path, json={"input": "hi"} | body, headers=headers)
    assert got.status_code == 200, got.text
    return got.json()


@routed
async def test_an_object_stays_at_its_server():
    async with Routed(stores()) as router:
        made = [await make(router) for _ in range(6)]
        assert {m["server"] for m in made} == {"a", "b", "c"}
        for one in made:
            path = f"{RESPONSES}/{one['id']}"
            for asked in (path, f"{path}/input_items?limit=3", path.replace("_", "%5f")):
                assert (await router.client.get(asked)).json()["server"] == one["server"]
            again = await make(router, previous_response_id=one["id"])
            assert again["server"] == one["server"]
            got = await router.client.post(f"{path}/cancel", json={})
            assert got.json()["server"] == one["server"]
        num_asked = sum(len(server.asked) for server in router.servers)
        assert num_asked == 6 * 6, "no other server was asked"
        talk = await make(router, "/v1/conversations")
        for conversation in (talk["id"], {"id": talk["id"]}):
            answer = await make(router, conversation=conversation)
            assert answer["server"] == talk["server"]
        item = {"type": "item_reference", "id": f"msg_{made[0]['id'][5:]}_0"}
        for _ in range(3):
            assert (await make(router, input=[item]))["server"] == made[0]["server"]


@routed
async def test_the_object_of_a_stream():
    async with Routed(stores()) as router:
        await make(router)
        got = await router.client.post(RESPONSES, json={"input": "hi", "stream": True})
        name = json.loads(got.text.partition("data: ")[2])["response"]["id"]
        before = [len(server.asked) for server in router.servers]
        assert (await router.client.get(f"{RESPONSES}/{name}")).json()["id"] == name
        after = [len(server.asked) for server in router.servers]
        assert sum(after) == sum(before) + 1


@routed
async def test_an_object_that_the_router_does_not_know():
    """All servers are asked; a restart of the router forgets the places."""
    servers = stores()
    servers[2].ids.add("resp_old")
    async with Routed(servers) as router:
        for _ in range(2):
            got = await router.client.get(f"{RESPONSES}/resp_old")
            assert got.json() == {"id": "resp_old", "server": "c"}
        assert (await make(router, previous_response_id="resp_old"))["server"] == "c"
        asked = sum(len(server.asked) for server in router.servers)
        assert (await router.client.get(f"{RESPONSES}/resp_none")).status_code == 404
        assert sum(len(server.asked) for server in router.servers) == asked + 3
        body = {"input": "hi", "previous_response_id": "resp_none"}
        got = await router.client.post(RESPONSES, json=body)
        assert got.json()["error"]["code"] == "previous_response_not_found"
        # A server that is not ready may have it.
        router.servers[0].ready = 503
        while router.state.answering.upstreams[0].ready:
            await asyncio.sleep(0.005)
        got = await router.client.get(f"{RESPONSES}/resp_none")
        assert (got.status_code, got.json()["error"]["code"]) == (503, "unavailable")


@routed
async def test_an_error_whose_code_is_no_text():
    """The answer of another program in front of a server is passed on."""
    odd = whole(404, error={"code": ["not_found"], "message": "odd"})
    async with Routed([odd]) as router:
        got = await router.client.get(f"{RESPONSES}/resp_none")
        assert (got.status_code, got.json()["error"]["message"]) == (404, "odd")


@routed
async def test_a_server_that_is_busy_may_have_the_object():
    busy = whole(429, error={"message": "busy"})
    async with Routed([busy, *stores(2)]) as router:
        for _ in range(3):
            got = await router.client.get(f"{RESPONSES}/resp_none")
            assert got.status_code == 429


@routed
async def test_the_server_of_an_object_is_not_ready():
    async with Routed(stores(2)) as router:
        one = await make(router)
        home = "ab".index(one["server"])
        router.servers[home].ready = 503
        while router.state.answering.upstreams[home].ready:
            await asyncio.sleep(0.005)
        got = await router.client.get(f"{RESPONSES}/{one['id']}")
        assert got.status_code == 503
        router.servers[home].ready = 200
        while not router.state.answering.upstreams[home].ready:
            await asyncio.sleep(0.005)
        assert (await router.client.get(f"{RESPONSES}/{one['id']}")).json()["id"] == one["id"]


@routed
async def test_keys_that_the_servers_cannot_tell_apart():
    """The servers see one key, so the router keeps the objects of its clients apart."""
    keys = [{"authorization": f"Bearer {name}"} for name in ("one", "two")]
    config = ServerConfig(api_key=["one", "two"])
    async with Routed(stores(1), config=config, server_api_key="theirs") as router:
        made = await make(router, headers=keys[0])
        path = f"{RESPONSES}/{made['id']}"
        assert (await router.client.get(path, headers=keys[0])).status_code == 200
        item = {"type": "item_reference", "id": f"msg_{made['id'][5:]}_0"}
        for asked in (path, path.replace("_", "%5F"), f"{path}%2Finput_items", f"{path}/cancel"):
            for method in ("GET", "POST", "DELETE"):
                got = await router.client.request(method, asked, headers=keys[1], json={})
                assert got.status_code == 404, (method, asked)
        for field in (
            {"previous_response_id": made["id"]},
            {"conversation": made["id"]},
            {"conversation": {"id": made["id"]}},
            {"input": [item]},
        ):
            got = await router.client.post(RESPONSES, json={"input": "a"} | field, headers=keys[1])
            assert got.status_code == 400, field
            got = await router.client.post(
                f"{RESPONSES}/input_tokens", json={"input": "a"} | field, headers=keys[1]
            )
            assert got.status_code == 400, field
        got = await router.client.get(path, headers={"x-api-key": "one"})
        assert got.status_code == 200
        for asked in router.servers[0].asked:
            assert asked.headers["authorization"] == "Bearer theirs"
            assert "x-api-key" not in asked.headers
        assert (await router.client.get(path, headers=keys[0])).status_code == 200


@routed
async def test_a_server_that_was_removed():
    server = FakeServer(Store("a"))
    async with Routed(stores(1)) as router:
        gone = upstream("gone", server)
        router.state.stored.note(None, "resp_x", gone)
        assert (await router.client.get(f"{RESPONSES}/resp_x")).status_code == 404
        await gone.http.close()


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        ("/v1/responses", {"input": "a"}, []),
        ("/v1/responses/input_tokens", {"previous_response_id": "r"}, [("r",)]),
        ("/v1/responses/resp_1/cancel", {}, [("resp_1",)]),
        ("/v1/conversations/conv_1/items/msg_2", {}, [("conv_1",)]),
        ("/v1/responses", {"conversation": {"id": "c"}, "input": [7, {}]}, [("c",)]),
        ("/v1/responses", {"conversation": 3, "previous_response_id": []}, []),
        ("/v1/models/a", {}, []),
    ],
)
def test_what_a_request_names(path, fields, names):
    assert named_objects(path, fields) == names


def test_references_to_too_many_objects():
    items = [{"type": "item_reference", "id": f"msg_{i:032x}_0"} for i in range(65)]
    assert len(named_objects("/v1/responses", {"input": items[:64]})) == 64
    with pytest.raises(RequestError, match="more than 64 responses"):
        named_objects("/v1/responses", {"input": items})


def test_what_is_no_object():
    assert [id_of(data) for data in (b"", b"[]", b'{"id": 3}', b'{"response": {}}')] == [None] * 4
