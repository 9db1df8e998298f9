"""Media with uuids: requests reach the server that has received their contents last."""

import asyncio
import json

import pytest

from octavo.config import ServerConfig
from octavo.router.job import read_job
from tests.router.servers import Routed, stream, whole

CHAT = "/v1/chat/completions"


def routed(test):
    return lambda: asyncio.run(test())


def part(uuid, url=None):
    return {"type": "image_url", "image_url": url and {"url": url}, "uuid": uuid}


def chat(*parts, **fields):
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **fields}


class Keeper:
    """Server that keeps pictures by their uuids and answers with them, as one of `FakeServer`."""

    def __init__(self):
        self.kept = {}
        self.fails = False

    def __call__(self, request):
        if self.fails:
            raise ConnectionResetError("gone")
        body = json.loads(request.content)
        scope = body.get("cache_salt"), request.headers.get("authorization")
        found = []
        for one in body["messages"][0]["content"]:
            key = *scope, one.get("uuid")
            if one["image_url"]:
                self.kept[key] = one["image_url"]["url"]
            elif key not in self.kept:
                return whole(400, error={"code": "unknown_uuid", "message": "none"})(request)
            found.append(self.kept[key])
        made = {"choices": [{"index": 0, "message": {"content": "".join(found)}}]}
        return whole(**made, kv_transfer_params={"x": 1})(request)


async def ask(router, *parts, key=None, path=CHAT, **fields):
    """Return the answer's text, or the code of its error."""
    headers = None if key is None else {"authorization": f"Bearer {key}"}
    got = await router.client.post(path, json=chat(*parts, **fields), headers=headers)
    body = got.json()
    if got.status_code == 200:
        return body["choices"][0]["message"]["content"]
    assert got.status_code == 400, body
    return body["error"]["code"]


@routed
async def test_a_uuid_reaches_the_server_that_has_its_picture():
    async with Routed([Keeper() for _ in range(3)]) as router:
        for i in range(6):
            assert await ask(router, part(f"u{i}", f"picture {i}")) == f"picture {i}"
        assert all(server.asked for server in router.servers)
        for i in (5, 0, 3, 1, 4, 2) * 2:
            assert await ask(router, part(f"u{i}")) == f"picture {i}"
            for path in (f"{CHAT}/render", "/tokenize", "/invocations"):
                assert await ask(router, part(f"u{i}"), path=path) == f"picture {i}"
        assert await ask(router, part("other")) == "unknown_uuid"
        # The last picture counts, wherever it was sent.
        for i in range(6):
            assert await ask(router, part("u", f"new {i}")) == f"new {i}"
            assert await ask(router, part("u")) == f"new {i}"
        homes = [server for server in router.servers if (None, None, "u") in server.answer.kept]
        assert len(homes) > 1


@routed
async def test_several_uuids_of_a_request():
    async with Routed([Keeper(), Keeper()]) as router:
        await ask(router, part("a", "A"))
        await ask(router, part("b", "B"), part("c", "C"))
        assert await ask(router, part("c"), part("b")) == "CB"
        for server in router.servers:
            for name in "ab":
                server.answer.kept.setdefault((None, None, name), "older ")
        # No server has the last picture of both.
        assert await ask(router, part("a"), part("b")) == "unknown_uuid"
        assert await ask(router, part("a"), part("b", "new ")) == "Anew "
        assert await ask(router, part("b"), part("a")) == "new A"
        assert await ask(router, part("c")) == "C"


@routed
async def test_only_the_same_client_and_scope():
    config = ServerConfig(api_key=["one", "two"])
    async with Routed([Keeper(), Keeper()], config=config, server_api_key="theirs") as router:
        for _ in range(2):
            await ask(router, part("a", "A"), key="one", cache_salt="s")
        for salt in ({}, {"cache_salt": "s"}):
            for path in (CHAT, f"{CHAT}/render", "/tokenize", "/invocations"):
                assert await ask(router, part("a"), key="two", path=path, **salt) == "unknown_uuid"
        assert await ask(router, part("a"), key="one") == "unknown_uuid"
    async with Routed([Keeper()], config=config, server_api_key="theirs") as router:
        for path in (CHAT, f"{CHAT}/render", "/tokenize", "/invocations"):
            for key, name in ("one", "A"), ("two", "B"):
                assert await ask(router, part("b", name), key=key, path=path) == name
            assert await ask(router, part("b"), key="one", path=path) == "A"
    # Keys of the servers.
    async with Routed([Keeper(), Keeper()]) as router:
        await ask(router, part("a", "A"), key="one")
        assert await ask(router, part("a"), key="two") == "unknown_uuid"
        assert await ask(router, part("a")) == "unknown_uuid"
        assert await ask(router, part("a"), key="one") == "A"


@routed
async def test_a_lost_server_takes_its_media_with_it():
    async with Routed([Keeper(), Keeper()]) as router:
        for name in "AB":
            await ask(router, part("a", name))
        assert all(server.answer.kept for server in router.servers)
        home = next(s for s in router.servers if "B" in s.answer.kept.values())
        home.answer.fails, home.ready = True, 503
        for _ in range(2):  # the other one has the older picture
            assert await ask(router, part("a")) == "unknown_uuid"
        assert await ask(router, part("a", "C")) == "C"
        assert await ask(router, part("a")) == "C"


@routed
async def test_a_refused_picture_changes_nothing():
    bad = whole(400, error={"message": "bad", "code": "bad"})
    async with Routed([Keeper(), bad]) as router:
        sent = [await ask(router, part("a", str(i))) for i in range(4)]
        assert "bad" in sent
        assert await ask(router, part("a")) == [one for one in sent if one != "bad"][-1]


@routed
async def test_one_server_knows_better():
    """It may have received pictures before the router started."""
    async with Routed([Keeper()]) as router:
        router.servers[0].answer.kept[None, None, "a"] = "A"
        assert await ask(router, part("a")) == "A"
        assert await ask(router, part("b")) == "unknown_uuid"


@routed
async def test_prefill_servers_have_media_of_their_own():
    async with Routed([Keeper(), Keeper()], [Keeper(), Keeper()]) as router:
        for i in range(4):
            assert await ask(router, part(f"u{i}", f"picture {i}")) == f"picture {i}"
        for i in (3, 0, 2, 1):
            assert await ask(router, part(f"u{i}")) == f"picture {i}"
        remote = router.state.metrics.prefills.labels("remote")._value.get()
        assert remote == 8
        for server in router.prefill:
            server.answer.fails, server.ready = True, 503
        assert await ask(router, part("u0")) == "picture 0"


WRONG = [
    {"type": "image", "uuid": "a"},
    {"type": "image_url", "image_url": {"url": 3}, "uuid": "a"},
    {"type": "image_url", "image_url": None, "uuid": 7},
    {"type": "image_url", "image_url": None, "uuid": "a" * 257},
    {"type": "image_url", "image_url": {"url": "data:"}},
    {"type": "input_audio", "input_audio": {}, "uuid": "a"},
]


@pytest.mark.parametrize(
    "messages",
    [None, "a", [], [3], [{"content": "a"}], [{"content": [3, {}]}], [{"content": WRONG}]],
    ids=str,
)
def test_what_has_no_uuid(messages):
    job = read_job("POST", CHAT, "", [], json.dumps({"messages": messages}).encode(), None)
    assert job.media == ([], [])


def test_names_of_media():
    def names(*parts, **fields):
        return read_job("POST", CHAT, "", [], json.dumps(chat(*parts, **fields)).encode(), None)

    sound = {"type": "input_audio", "input_audio": None, "uuid": "a"}
    media = names(part("a", "data:x"), part("b"), sound).media
    assert [len(media.sent), len(media.recalled)] == [1, 2]
    assert names(part("a")).media.recalled == media.sent
    found = {*media.sent, *media.recalled, *names(part("a"), cache_salt="s").media.recalled}
    assert len(found) == 4


@routed
async def test_a_stream_that_is_lost_with_its_picture():
    events = stream(b'data: {"choices": []}\n\n')
    async with Routed([Keeper(), Keeper()]) as router:
        await ask(router, part("a", "A"))
        home = next(s for s in router.servers if s.answer.kept)
        home.answer = events
        got = await router.client.post(CHAT, json=chat(part("a"), stream=True))
        assert "unknown_uuid" in got.text
