"""Requests through a router: the client sees one server's answer, of however many servers."""

import asyncio
import json
from types import SimpleNamespace

import aiohttp
import pytest

from octavo.config import ServerConfig
from octavo.router import proxy
from tests.router.servers import DONE, Routed, events, stream, text_of, whole

KEY = SimpleNamespace(host="server", port=80, ssl=None, is_ssl=False)
REFUSED = aiohttp.ClientConnectorError(KEY, ConnectionRefusedError(111, "refused"))
BROKEN = aiohttp.ClientPayloadError("connection reset")
LOST = b'data: {"error": {"message": "gone", "code": "engine_unavailable"}}\n\n'


def refuse(request):
    raise REFUSED


def routed(test):
    """Run a test that is a coroutine."""
    return lambda: asyncio.run(test())


WHOLE = stream(*events("one ", "two ", "three"), DONE)


@routed
async def test_an_answer_comes_back_as_it_is():
    answer = whole(choices=[], usage={"prompt_tokens": 2, "completion_tokens": 3})
    async with Routed([answer]) as router:
        trace = f"00-{'a' * 32}-{'b' * 16}-01"
        headers = {"authorization": "Bearer client", "traceparent": trace, "tracestate": "c=d"}
        got = await router.ask(temperature=0.5, headers=headers)
        assert (got.status_code, got.json()["choices"]) == (200, [])
        (asked,) = router.servers[0].asked
        assert json.loads(asked.content)["temperature"] == 0.5
        assert asked.headers["authorization"] == "Bearer client"
        assert asked.headers["x-request-id"] == got.headers["x-request-id"]
        assert (asked.headers["traceparent"], asked.headers["tracestate"]) == (trace, "c=d")
        metrics = (await router.client.get("/metrics")).text
        assert 'octavo:router_tokens_total{kind="completion"} 3.0' in metrics
        got = await router.client.get("/v1/models?a=%20b")
        assert router.servers[0].asked[-1].url == "http://server/v1/models?a=%20b"


@pytest.mark.parametrize("split", [1, 7, 50])
def test_events_are_found_however_they_come(split):
    data = b"".join([*events("one ", "two ", "three"), DONE]).replace(b"\n", b"\r\n")
    pieces = [data[i : i + split] for i in range(0, len(data), split)]

    async def test():
        async with Routed([stream(*pieces)]) as router:
            assert text_of(await router.ask(stream=True)) == "one two three"

    asyncio.run(test())


LOSSES = {
    "refused": refuse,
    "broken at once": stream(BROKEN),
    "broken later": stream(*events("one ", "two ", finish=None), BROKEN),
    "ended early": stream(*events("one tw", finish=None)),
    "engine lost": stream(*events("one ", finish=None), LOST),
    "engine lost in the same piece": stream(b"".join([*events("one ", finish=None), LOST])),
    "half an event": stream(*events("one ", finish=None), b'data: {"choi', BROKEN),
    "no event": stream(*events("one ", finish=None), b"data: []\n\n"),
    "no JSON": stream(*events("one ", finish=None), b"data: {\n\n"),
    "busy": whole(429, error={"message": "busy"}),
    "draining": whole(503, error={"message": "stops"}),
    "stopped": whole(503, error={"message": "stopped", "code": "unavailable"}),
    "proxy": lambda request: (502, {}, [b"<html>\xff"]),
    "too much": stream(*events("one ", finish=None), b"x" * 300_000),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_another_server_goes_on(loss, monkeypatch):
    monkeypatch.setattr(proxy, "_MOST_EVENT", 200_000)

    async def test():
        async with Routed([loss, WHOLE]) as router:
            for _ in range(2):
                assert text_of(await router.ask(stream=True)) == "one two three"
            bodies = [json.loads(a.content) for s in router.servers for a in s.asked]
            assert len({body["seed"] for body in bodies}) == 2, "one for each request"

    asyncio.run(test())


@routed
async def test_an_answer_that_is_no_stream_is_asked_for_again():
    async with Routed([lambda r: (200, {}, [b"{", BROKEN]), whole(choices=[1])]) as router:
        assert (await router.ask()).json() == {"choices": [1]}


@routed
async def test_a_refusal_comes_back_once_all_have_refused():
    busy = whole(429, {"Retry-After": "7"}, error={"message": "busy"})
    async with Routed([busy, busy]) as router:
        got = await router.ask()
        assert (got.status_code, got.headers["retry-after"]) == (429, "7")
        assert [len(server.asked) for server in router.servers] == [1, 1]


@routed
async def test_what_is_wrong_with_a_request_is_not_asked_twice():
    async with Routed([whole(400, error={"param": "n"}), whole(choices=[])]) as router:
        got = [await router.ask() for _ in range(2)]
        assert sorted(answer.status_code for answer in got) == [200, 400]


@routed
async def test_a_request_that_servers_die_of_is_not_given_to_all_of_them():
    async with Routed([stream(BROKEN)] * 5) as router:
        got = await router.ask(stream=True)
        assert got.status_code == 503
        assert "3 servers in a row were lost" in got.json()["error"]["message"]
        assert sum(len(server.asked) for server in router.servers) == 3


@routed
async def test_no_server_within_the_time():
    async with Routed([refuse], failover_timeout=0.02) as router:
        router.servers[0].ready = 503
        got = await router.ask()
        assert (got.status_code, got.json()["error"]["code"]) == (503, "unavailable")
        assert (await router.client.get("/ready")).status_code == 503
        assert (await router.client.get("/health")).status_code == 200


@routed
async def test_a_request_waits_for_a_server():
    async with Routed([refuse], failover_timeout=60) as router:
        asked = asyncio.create_task(router.ask(stream=True))
        while router.state.answering.upstreams[0].epoch < 3:  # it has failed twice
            await asyncio.sleep(0.005)
        router.servers[0].answer = WHOLE
        assert text_of(await asked) == "one two three"


@routed
async def test_a_request_waits_for_the_successor_of_the_only_server():
    """A server that shuts down rejects requests only for itself."""
    async with Routed([LOSSES["stopped"]], failover_timeout=60) as router:
        (server,) = router.servers
        asked = asyncio.create_task(router.ask())
        while not server.asked:
            await asyncio.sleep(0.005)
        server.answer = whole(choices=[1])
        assert (await asked).json() == {"choices": [1]}


@routed
async def test_an_answer_that_differs_is_not_mixed_with_the_first():
    first = stream(*events("one ", "tw", finish=None), BROKEN)
    async with Routed([first, stream(*events("one ", "five"), DONE)]) as router:
        got = (await router.ask(stream=True)).text
        assert '"one "' in got
        assert "five" not in got
        assert "differs from what was sent already" in got
        assert got.endswith("data: [DONE]\n\n")


@routed
async def test_a_server_that_stands_still_is_given_up():
    still = asyncio.Event()
    first = stream(*events("one ", finish=None), still)
    async with Routed([first, WHOLE], health_check_timeout=0.03) as router:
        asked = [asyncio.create_task(router.ask(stream=True)) for _ in range(2)]
        while not router.servers[0].asked:
            await asyncio.sleep(0.005)
        router.servers[0].ready = still
        assert [text_of(await a) for a in asked] == ["one two three"] * 2


@routed
async def test_a_client_that_goes_away_is_nobodys_burden():
    still = asyncio.Event()
    async with Routed([stream(*events("one ", finish=None), still)]) as router:
        asked = asyncio.create_task(router.ask(stream=True))
        while not router.servers[0].asked:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        while router.state.answering.upstreams[0].num_requests:
            await asyncio.sleep(0.01)


@routed
async def test_keys_of_the_router_and_of_its_servers():
    config = ServerConfig(api_key=["mine"])
    async with Routed([whole(choices=[])], config=config, server_api_key="theirs") as router:
        assert (await router.ask()).status_code == 401
        assert (await router.ask(headers={"authorization": "Bearer mine"})).status_code == 200
        (asked,) = router.servers[0].asked
        assert asked.headers.getall("authorization") == ["Bearer theirs"]
        assert json.loads(asked.content)["cache_salt"]
        assert (await router.client.get("/metrics")).status_code == 200


@routed
async def test_bodies_that_do_not_come_take_no_places():
    async def half():
        yield b'{"prompt": '
        await asyncio.sleep(60)

    config = ServerConfig(max_num_queued_reqs=1)
    async with Routed([whole(choices=[])], config=config) as router:
        headers = {"content-type": "application/json"}
        slow = [
            asyncio.create_task(
                router.client.post("/v1/completions", content=half(), headers=headers)
            )
            for _ in range(3)
        ]
        await asyncio.sleep(0.1)
        got = await router.ask()
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        assert got.status_code == 200


@routed
async def test_too_many_and_too_large_requests():
    still = asyncio.Event()
    config = ServerConfig(max_num_queued_reqs=1, max_request_bytes=2000)
    async with Routed([stream(still, *events("one"), DONE)], config=config) as router:
        first = asyncio.create_task(router.ask(stream=True))
        while not router.servers[0].asked:
            await asyncio.sleep(0.005)
        assert (await router.ask()).status_code == 429
        assert (await router.client.get("/v1/models")).status_code == 429
        still.set()
        assert text_of(await first) == "one"
        assert (await router.ask(prompt="a" * 3000)).status_code == 413


@routed
async def test_headers_of_the_connection_stay():
    answer = whole(200, {"connection": "x", "server": "y", "x-other": "z"}, choices=[])
    async with Routed([answer]) as router:
        headers = {"cookie": "secret", "x-deadline-ms": "500000", "x-forwarded-for": "6.6.6.6"}
        got = await router.ask(headers=headers)
        assert (got.headers.get("server"), got.headers["x-other"]) == (None, "z")
        asked = router.servers[0].asked[0].headers
        assert "cookie" not in asked
        assert asked.getall("x-forwarded-for") == ["127.0.0.1"]  # no client names another address
        assert 400_000 < int(asked["x-deadline-ms"]) <= 500_000


@routed
async def test_what_is_not_the_routers():
    async with Routed([whole(choices=[])]) as router:
        for path in ("/v1/streams/abc", "/server_info", "/invocations"):
            assert (await router.client.get(path)).status_code in (404, 405)
        assert not router.servers[0].asked
        servers = (await router.client.get("/")).json()["servers"]
        assert servers == [{"name": "s0", "ready": True, "requests": 0}]


# Prefill on one server, decode on another

PARAMS = {"remote_host": "p", "do_remote_prefill": True}
PREFILL = whole(choices=[], kv_transfer_params=PARAMS)


def prefills(text, where):
    return f'router_prefills_total{{where="{where}"}} 1.0' in text


@routed
async def test_a_prompt_is_computed_by_one_and_answered_by_the_other():
    async with Routed([WHOLE], [PREFILL]) as router:
        assert text_of(await router.ask(stream=True, max_tokens=9)) == "one two three"
        prefill, decode = (
            json.loads(s[0].asked[0].content) for s in (router.prefill, router.servers)
        )
        assert (prefill["max_tokens"], decode["max_tokens"]) == (1, 9)
        assert decode["kv_transfer_params"] == PARAMS
        assert decode["seed"] == prefill["seed"]
        assert prefills((await router.client.get("/metrics")).text, "remote")


@pytest.mark.parametrize(
    "prefill",
    [
        refuse,
        stream(BROKEN),
        whole(429, error={}),
        whole(500, error={}),
        whole(choices=[]),
        lambda r: (200, {}, [b"no json"]),
        lambda r: (200, {}, [b"[]"]),
    ],
    ids=["refused", "broken", "busy", "error", "no place", "no JSON", "no object"],
)
def test_who_answers_computes_the_prompt_if_nobody_else_can(prefill):
    async def test():
        async with Routed([WHOLE], [prefill]) as router:
            assert text_of(await router.ask(stream=True)) == "one two three"
            (asked,) = router.servers[0].asked
            assert "kv_transfer_params" not in json.loads(asked.content)
            assert prefills((await router.client.get("/metrics")).text, "local")

    asyncio.run(test())


@routed
async def test_another_prefill_server_does_it():
    async with Routed([WHOLE], [stream(BROKEN), PREFILL]) as router:
        for _ in range(2):
            assert text_of(await router.ask(stream=True)) == "one two three"
            for upstream in router.state.prefilling.upstreams:
                while not upstream.ready:
                    await asyncio.sleep(0.005)
        assert all("kv_transfer_params" in json.loads(a.content) for a in router.servers[0].asked)


@routed
async def test_a_decode_server_is_lost_and_the_prompt_handed_over_again():
    async with Routed([stream(*events("one ", finish=None), BROKEN), WHOLE], [PREFILL]) as router:
        for _ in range(2):
            assert text_of(await router.ask(stream=True)) == "one two three"
        assert len(router.prefill[0].asked) == sum(len(s.asked) for s in router.servers)


def has(*names):
    """Return a server that answers requests for some models, and 404 for others."""

    def answer(request):
        model = json.loads(request.content)["model"]
        if model in names:
            return whole(model=model)(request)
        error = {"message": "unknown", "code": "model_not_found"}
        return whole(404, error=error)(request)

    return answer


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("lists", [True, False])
def test_requests_reach_a_server_that_has_the_adapter(path, lists):
    """Also if the router does not know which one has it."""

    async def main():
        async with Routed([has("m"), has("m", "a"), has("m")]) as router:
            router.servers[1].adapters = ["a"] if lists else None
            for upstream, server in zip(
                router.state.answering.upstreams, router.servers, strict=True
            ):
                server.adapters = server.adapters if lists else None
                upstream.list_at = 0.0
            known = {"a"} if lists else None
            while router.state.answering.upstreams[1].adapters != known:
                await asyncio.sleep(0.002)
            for _ in range(10):
                answer = await router.ask(path, model="a", input="x")
                assert (answer.status_code, answer.json()["model"]) == (200, "a")
            asked = [len(server.asked) for server in router.servers]
            assert asked == [0, 10, 0] if lists else asked[1] == 10
            for server in router.servers:
                server.asked.clear()
            unknown = await router.ask(path, model="x", input="x")
            assert unknown.json()["error"]["code"] == "model_not_found"
            assert sum(len(server.asked) for server in router.servers) == (1 if lists else 3)

    asyncio.run(main())


@pytest.mark.parametrize(
    "path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/%6Coad_lora_adapter"]
)
def test_adapters_are_not_changed_through_a_router(path):
    """Its key of the servers may be an operator's."""

    async def main():
        async with Routed([whole()], server_api_key="admin") as router:
            answer = await router.ask(path, lora_name="a", lora_path="a")
            assert answer.status_code == 404
            assert "each of its servers" in answer.json()["error"]["message"]
            assert router.servers[0].asked == []

    asyncio.run(main())
