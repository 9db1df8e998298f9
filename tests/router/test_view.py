"""Engine view of a router: joined servers, keys, losses, refusals, viewers that do not read."""

import asyncio
import itertools
import json
from types import SimpleNamespace

import msgspec
import numpy as np

from octavo.config import ServerConfig
from octavo.kv_cache.block_map import OWNER_SHIFT, BlockMap
from octavo.observability.view_events import Hello, Tick, encode_event
from octavo.router.job import read_job
from octavo.router.joined_view import EngineNumbers, JoinedView
from octavo.server import viewers
from octavo.server.view_picture import Picture
from octavo.terminal.engine_state import EngineState, owner_of
from tests.router.servers import DONE, Routed, stream, whole
from tests.server.fake_engine import Call
from tests.server.test_view import FakeEngine, Watching, answer, has, read, record

HELLO = Hello(1.0, "1", ["toy"], 16, 2048, 256)
KEYS = ServerConfig(api_key=["a", "b"])


class Named:
    """Part of `Upstream` that a joined view reads."""

    def __init__(self, name):
        self.name = name


class Server:
    """Events of a server with a fake engine.

    Args:
        view: the joined view.
        name: name of the server.
        num_engines: number of its engines.
    """

    def __init__(self, view, name, num_engines=1):
        self.view = view.add(Named(name))
        self.engine = FakeEngine(num_engines)
        self.audience = None

    def connect(self, audience=None, hello=HELLO):
        self.picture, self.audience = Picture(self.engine), audience
        hello = msgspec.structs.replace(hello, all_requests=audience is None)
        update = self.picture.update([audience], 10.0)
        self._send(encode_event("hello", hello) + update.whole(audience))

    def tick(self, time=11.0):
        self._send(self.picture.update([self.audience], time).news(self.audience))

    def _send(self, events):
        self.view.events += [(name, json.dumps(data).encode()) for name, data in read(events)]


def update(view, *states, time=20.0):
    """Return the events of an update; the states take them in."""
    view.update(time)
    events = read(view.news)
    for state in states:
        for name, event in events:
            state.take(name, event)
    return dict(events)


def follow(view):
    """Return a viewer's state after the whole state."""
    state = EngineState()
    for name, event in read(view.whole()):
        state.take(name, event)
    return state


def make_view(*num_engines, is_own=None):
    view = JoinedView(EngineNumbers(), is_own)
    servers = [Server(view, f"s{i}", count) for i, count in enumerate(num_engines)]
    for server in servers:
        server.connect()
    return view, servers


class TestJoinedView:
    def test_engines_steps_and_requests_get_numbers_of_the_router(self):
        view, (a, b) = make_view(2, 1)
        update(view)
        state = follow(view)
        assert state.frames[-1].engines == [0, 1, 2]
        assert state.frames[-1].servers == {"0": "s0", "1": "s0", "2": "s1"}
        a.engine.step_log.add(1, 10.5, [record(10, ("a#7", 4))])
        b.engine.step_log.add(0, 10.5, [record(10, ("b#7", 1)), record(11, ("b#7", 1))])
        a.engine.answers, b.engine.answers = [answer(7)], [answer(7), answer(8)]
        for server in (a, b):
            server.tick(time=12.0)
        update(view, state)
        assert [(s.engine, s.number, s.time, s.parts) for s in state.steps] == [
            (1, 10, 10.002, [["0/7", 4]]),
            (2, 10, 10.002, [["1/7", 1]]),
            (2, 11, 11.002, [["1/7", 1]]),
        ]
        rows = state.frames[-1].requests["rows"]
        assert [(row[0], row[1]) for row in rows] == [("0/7", 1), ("1/7", 2), ("1/8", 2)]
        late = follow(view)  # the next update continues at the same step
        b.engine.step_log.add(0, 12.0, [record(12, ("b#7", 1))])
        b.tick()
        update(view, state, late)
        assert (state.last, late.last) == (3, 3)

    def test_maps_show_the_owners_of_all_servers(self):
        rng = np.random.default_rng(1)
        view, servers = make_view(1, 1)
        update(view)
        states = [follow(view)]
        expected = {}
        for step in range(12):
            for number, server in enumerate(servers):
                owners = [f"x#{i + step // 3}" for i in range(3)]
                cells = (rng.integers(1, 4096, 30) | rng.integers(0, 4, 30) << OWNER_SHIFT).astype(
                    "<u4"
                )
                server.picture._maps = {0: BlockMap(30, 1, cells.tobytes(), b"", owners)}
                server.tick()
                names = [None, *(f"{number}/{i + step // 3}" for i in range(3))]
                expected[str(number)] = [
                    (c & 4095, names[c >> OWNER_SHIFT]) for c in cells.tolist()
                ]
            update(view, *states, time=20.0 + 2 * step)  # a frame keeps a map each second
            states.append(follow(view))
            for state in states:
                for name, cells in expected.items():
                    found = state.frames[-1].maps[name].cells
                    seen = [(c % 4096, state.owners.get(owner_of(c))) for c in found]
                    assert seen == cells

    def test_a_lost_server_comes_back(self):
        view, (_, b) = make_view(1, 2)
        state = EngineState()
        update(view)
        state = follow(view)
        b.view.events.append(("end", b"it is silent"))
        update(view, state)
        assert state.frames[-1].engines == [0]
        assert state.frames[-1].health == "s1: it is silent"
        b.view.events.append(("end", b"it cannot be reached"))
        b.connect()
        update(view, state)
        assert (state.frames[-1].engines, state.frames[-1].health) == ([0, 1, 2], "ok")
        assert [death["engine"] for death in state.deaths] == [1, 2]
        assert {death["reason"] for death in state.deaths} == {
            "its server s1 was lost: it is silent"
        }
        assert len(follow(view).deaths) == 2
        assert "tick" not in update(view)

    def test_a_key_sees_the_details_of_its_own_requests(self):
        view = JoinedView(EngineNumbers(), lambda name: name == "secret-7")
        (server,) = [Server(view, "s0")]
        server.connect()
        server.engine.answers = [answer(7), answer(8)]
        server.tick()
        update(view)
        ((_, hello), _, (_, requests)) = read(view.whole())
        assert hello["all_requests"] is False
        assert [row[0] for row in requests["rows"]] == ["0/7"]
        assert [other[0] for other in requests["others"]] == ["0/7", "0/8"]
        assert b"secret-8" not in view.whole()

    def test_a_server_that_hides_requests_still_does(self):
        view, (a, b) = make_view(1, 1)
        b.connect(audience="t")
        a.engine.answers, b.engine.answers = [answer(7)], [answer(8), answer(9, "t")]
        for server in (a, b):
            server.tick()
        update(view)
        ((_, hello), _, (_, requests)) = read(view.whole())
        assert hello["all_requests"] is False
        assert [row[0] for row in requests["rows"]] == ["0/7", "1/9"]
        assert [other[0] for other in requests["others"]] == ["1/8", "1/9"]

    def test_other_events_end_a_server(self):
        view, (a, _) = make_view(1, 1)
        a.view.events.append(("tick", b'{"time": "now"}'))
        update(view)
        a.tick()
        update(view)
        assert a.view.fault.startswith("its events cannot be read")
        assert view.has_begun  # by the other one
        assert follow(view).frames[-1].engines == [1]

    def test_owners_are_forgotten(self, monkeypatch):
        monkeypatch.setattr("octavo.router.joined_view._MAX_OWNERS", 8)
        view, (server,) = make_view(1)
        for number in range(40):
            cells = np.array([1 | 1 << OWNER_SHIFT], "<u4").tobytes()
            server.picture._maps = {0: BlockMap(1, 1, cells, b"", [f"x#{number}"])}
            server.tick()
            update(view)
        assert len(server.view.labels) <= 17
        assert view._shown["0"].owners == [max(server.view.labels)]


def view_events(*names, engines=(0,)):
    """Return a server's answer to a view: events that stay open."""
    tick = Tick(1.0, engines=list(engines), health="ok")
    events = [encode_event("hello", HELLO), encode_event("tick", tick)]
    rows = [[str(i), 0, "answer", name, 4, 4, 1, 0, 1.0] for i, name in enumerate(names)]
    events.append(b"event: requests\ndata: " + json.dumps({"rows": rows}).encode() + b"\n\n")
    return [b"".join(events), asyncio.Event()]


class Watched(Watching):
    """Viewer of a router."""

    def __init__(self, routed, key=None):
        super().__init__(SimpleNamespace(http=routed.client), key)


def run(scenario, answers, **settings):
    settings = {"failover_timeout": 60} | settings

    async def whole_scenario():
        async with Routed(answers, **settings) as routed:
            await scenario(routed)
            await asyncio.sleep(0)
            assert len(routed.state.view) == 0
            assert routed.state.view._work_task is None

    asyncio.run(whole_scenario())


def opened(*names):
    return lambda request: stream(*view_events(*names))(request)


def both_engines(events):
    return any(event.get("engines") == [0, 1] for _, event in events)


def test_a_router_reads_each_server_once_while_it_has_viewers():
    async def scenario(routed):
        assert not any(server.asked for server in routed.servers)
        watching = [Watched(routed) for _ in range(3)]
        for one in watching:
            await one.until(both_engines)
        assert [len(server.asked) for server in routed.servers] == [1, 1]
        for one in watching:
            await one.close()
        again = Watched(routed)
        await again.until(both_engines)
        assert [len(server.asked) for server in routed.servers] == [2, 2]
        await again.close()

    run(scenario, [opened(), opened()])


def test_a_server_that_ends_its_stream_is_read_again():
    gates, again = [], asyncio.Event()

    async def answered(request):
        pieces = view_events()
        gates.append(pieces[1])
        if len(gates) > 1:
            await again.wait()
        return stream(*pieces)(request)

    async def scenario(routed):
        watching = Watched(routed)
        await watching.until(has("hello"))
        gates[0].set()
        text = "it has ended the stream"
        await watching.until(lambda found: any(text in e.get("health", "") for _, e in found))
        again.set()
        events = await watching.until(lambda found: any("deaths" in e for _, e in found))
        health = [event["health"] for _, event in events if "health" in event]
        assert health == ["ok", "s0: it has ended the stream", "ok"]
        await watching.close()

    run(scenario, [answered])


def test_keys_of_a_router_whose_servers_have_none():
    busy = asyncio.Event()

    async def answered(request):
        if request.url.endswith("/v1/engine/view"):
            return opened("cmpl-of-a-0-1", "cmpl-of-b-0-2", "cmpl-mine-0-3", "odd")(request)
        await busy.wait()
        return whole()(request)

    async def scenario(routed):
        sent = [
            asyncio.create_task(
                routed.ask(
                    headers={"authorization": f"Bearer {key}", "x-request-id": f"of-{key}"},
                    **fields,
                )
            )
            for key, fields in (("a", {}), ("b", {"request_id": "mine"}))
        ]
        while len(routed.servers[0].asked) < 2:
            await asyncio.sleep(0.01)
        for key, names in (("a", ["cmpl-of-a-0-1"]), ("b", ["cmpl-of-b-0-2", "cmpl-mine-0-3"])):
            watching = Watched(routed, key)
            events = dict(await watching.until(has("requests")))
            assert [row[3] for row in events["requests"]["rows"]] == names
            assert len(events["requests"]["others"]) == 4
            assert "odd" not in watching.call.body.decode()
            await watching.close()
        busy.set()
        await asyncio.gather(*sent)
        watching = Watched(routed, "a")
        assert dict(await watching.until(has("requests")))["requests"]["rows"] == []
        await watching.close()
        assert (await routed.client.get("/v1/engine/view")).status_code == 401

    run(scenario, [answered], config=KEYS)


def test_an_id_of_two_keys_is_shown_to_none():
    async def scenario(routed):
        view = routed.state.view
        headers = [("x-request-id", "same")]
        jobs = [read_job("POST", "/v1/completions", "", headers, b"{}", key) for key in "aab"]
        with view.claim(jobs[0]), view.claim(jobs[1]):
            assert view._is_own("a", "cmpl-same-0-1")
            with view.claim(jobs[2]):
                assert not view._is_own("a", "cmpl-same-0-1")
                assert not view._is_own("b", "cmpl-same-0-1")
            assert view._is_own("a", "cmpl-same-0-1")
        assert not view._is_own("a", "cmpl-same-0-1")
        view._stored.note("a", "resp_1", None)
        assert not view._is_own("b", "resp_1-0-7")

    run(scenario, [stream(DONE)], config=KEYS)


def test_a_refusal_of_all_servers_is_the_answer():
    refused = {"error": {"message": "The API key is not one that this server accepts."}}

    async def all_refuse(routed):
        response = await routed.client.get("/v1/engine/view")
        assert (response.status_code, response.json()["error"]["message"]) == (
            401,
            refused["error"]["message"],
        )

    async def one_refuses(routed):
        watching = Watched(routed)
        text = "s0: it does not show its engines: The API key"
        await watching.until(lambda events: any(text in e.get("health", "") for _, e in events))
        await watching.close()

    run(all_refuse, [whole(401, **refused), whole(401, **refused)])
    run(one_refuses, [whole(401, **refused), opened()])


def test_servers_without_a_view_and_a_view_that_is_off():
    async def no_view(routed):
        response = await routed.client.get("/v1/engine/view")
        assert (response.status_code, response.json()["error"]["message"]) == (
            404,
            "The server s0 has no engine view.",
        )

    async def none_ready(routed):
        for server in routed.servers:
            server.ready = 503
        while any(u.ready for u in routed.state.answering.upstreams):
            await asyncio.sleep(0.01)
        response = await routed.client.get("/v1/engine/view")
        assert response.status_code == 503

    async def off(routed):
        response = await routed.client.get("/v1/engine/view")
        assert "--no-ui" in response.json()["error"]["message"]

    run(no_view, [lambda request: (404, {}, [b"not found"])])
    run(none_ready, [opened()], failover_timeout=0.1)
    run(off, [opened()], config=ServerConfig(ui=False))


def test_the_servers_get_the_routers_key_or_the_clients():
    async def scenario(routed):
        for _ in range(2):
            watching = Watched(routed, "client")
            await watching.until(has("hello"))
            await watching.close()
        key = routed.state.router.server_api_key or "client"
        asked = routed.servers[0].asked
        assert [request.headers["authorization"] for request in asked] == [f"Bearer {key}"] * 2

    run(scenario, [opened()])
    run(scenario, [opened()], server_api_key="of the router")


def test_a_viewer_that_does_not_read_is_dropped(monkeypatch):
    monkeypatch.setattr(viewers, "MAX_QUEUE_BYTES", 1000)

    async def scenario(routed):
        slow = Watched(routed)
        stuck = asyncio.Event()

        async def send(message):
            slow.call.sent.append(message)
            if len(slow.call.sent) > 2:
                await stuck.wait()

        slow.call.send = send
        quick = Watched(routed)
        await quick.until(has("requests"))
        view = next(iter(routed.state.view._audiences.values())).view
        server = next(iter(view.servers.values()))
        first, second = routed.state.view._viewers
        for number in itertools.count():
            data = json.dumps({"time": 1.0, "health": f"{number:100}"}).encode()
            server.events.append(("tick", data))
            await asyncio.sleep(0.05)
            if first._ended:
                break
        assert not second._ended
        assert len(routed.state.view) == 2
        stuck.set()
        await slow.call.task
        assert slow.call.sent[-1]["more_body"] is False
        assert len(routed.state.view) == 1
        await quick.close()

    run(scenario, [opened()])


def test_streams_end_when_the_router_drains():
    async def scenario(routed):
        watching = Watched(routed)
        await watching.until(has("hello"))
        routed.state.begin_drain()
        await watching.call.task
        assert watching.call.sent[-1]["more_body"] is False

    run(scenario, [opened()])


def test_a_lost_viewer_leaves_no_task():
    async def scenario(routed):
        router = SimpleNamespace(http=routed.client)
        await Call(router, "/v1/engine/view", b"", method="GET", cut_after=0).task

    run(scenario, [opened()])
