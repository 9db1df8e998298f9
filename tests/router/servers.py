"""Fake servers of a router, as functions."""

import asyncio
import inspect
import json
from types import SimpleNamespace

import httpx
from multidict import CIMultiDict

from octavo.config import ServerConfig
from octavo.router.app import build_app
from octavo.router.config import RouterConfig
from octavo.router.pool import Upstream
from octavo.router.state import RouterState


class Content:
    """Body of an answer that arrives in pieces; an error among the pieces is raised."""

    def __init__(self, pieces):
        self._pieces = iter(pieces)

    async def readany(self):
        await asyncio.sleep(0)
        piece = next(self._pieces, b"")
        if isinstance(piece, Exception):
            raise piece
        if isinstance(piece, asyncio.Event):
            await piece.wait()
            return await self.readany()
        return piece

    async def read(self):
        return b"".join([piece async for piece in self._all()])

    async def _all(self):
        while piece := await self.readany():
            yield piece


class FakeServer:
    """Server that answers requests by a function, in place of `aiohttp.ClientSession`.

    Args:
        answer: called with a request; returns (status, headers, pieces of a body), or raises. It
            may be a coroutine function.
    """

    def __init__(self, answer):
        self.answer = answer
        self.ready = 200
        self.adapters = []
        """Names of its adapters; None: it does not tell them."""
        self.asked = []

    async def request(self, method, url, headers, data, allow_redirects):
        assert not allow_redirects
        if url.path in ("/ready", "/health"):
            if isinstance(self.ready, asyncio.Event):
                await self.ready.wait()
            if isinstance(self.ready, Exception):
                raise self.ready
            return SimpleNamespace(status=self.ready, close=lambda: None)
        if url.path == "/v1/models" and "x-request-id" not in dict(headers):
            return self._models()
        request = SimpleNamespace(
            method=method, url=str(url), headers=CIMultiDict(headers), content=data
        )
        self.asked.append(request)
        answer = self.answer(request)
        status, headers, pieces = await answer if inspect.isawaitable(answer) else answer
        content = Content(pieces)
        return SimpleNamespace(
            status=status,
            headers=CIMultiDict(headers),
            raw_headers=[(k.encode(), v.encode()) for k, v in headers.items()],
            content=content,
            read=content.read,
            close=lambda: None,
        )

    def _models(self):
        cards = [{"id": "m", "parent": None}]
        cards += [{"id": name, "parent": "m"} for name in self.adapters or ()]
        content = json.dumps({"data": cards}).encode()
        status = 401 if self.adapters is None else 200

        return SimpleNamespace(status=status, content=Content([content]), close=lambda: None)

    async def close(self):
        await self.real.close()


def upstream(name, server, api_key=None):
    """Return a server as the router sees it."""
    made = Upstream(name, "http://server", api_key=api_key)
    server.real, made.http = made.http, server
    return made


def events(*texts, finish="stop", index=0):
    """Return a stream of an answer as a server sends it, one piece for each event."""
    made = []
    for number, text in enumerate(texts):
        last = finish if number == len(texts) - 1 else None
        choice = {"index": index, "text": text, "finish_reason": last}
        made.append({"id": "cmpl", "created": 1, "model": "m", "choices": [choice]})
    return [f"data: {json.dumps(event)}\n\n".encode() for event in made]


DONE = b"data: [DONE]\n\n"


def stream(*pieces):
    return lambda request: (200, {"content-type": "text/event-stream; charset=utf-8"}, pieces)


def whole(status=200, headers=(), **fields):
    headers = {"content-type": "application/json", **dict(headers)}
    return lambda request: (status, headers, [json.dumps(fields).encode()])


class Routed:
    """Router of fake servers, and a client of it.

    Args:
        answering: answers of the servers.
        prefilling: answers of the prefill servers.
        config: settings of the router's HTTP.
        **router: settings of the router.
    """

    def __init__(self, answering, prefilling=(), config=None, **router):
        router = {"health_check_interval": 0.02, "health_check_timeout": 60} | router
        if prefilling:
            router["prefill_servers"] = ["http://p"]
        settings = RouterConfig(**({"failover_timeout": 0.1} | router))
        self.state = RouterState(config or ServerConfig(), settings, {})
        self.servers = [FakeServer(answer) for answer in answering]
        self.prefill = [FakeServer(answer) for answer in prefilling]

    async def __aenter__(self):
        for pool, servers in (
            (self.state.answering, self.servers),
            (self.state.prefilling, self.prefill),
        ):
            for number, server in enumerate(servers):
                pool.add(upstream(f"s{number}", server, self.state.router.server_api_key))
        transport = httpx.ASGITransport(build_app(self.state))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://router", timeout=20)
        while not all(u.ready for pool in self.state.pools for u in pool.upstreams):
            await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, *error):
        await self.client.aclose()
        await self.state.close()
        assert all(
            (u.num_waiting, u.num_running, u.num_requests) == (0, 0, 0)
            for pool in self.state.pools
            for u in pool.upstreams
        )

    async def ask(self, path="/v1/completions", headers=None, **fields):
        fields = {"model": "m", "prompt": "a"} | fields
        return await self.client.post(path, json=fields, headers=headers)


def text_of(answer):
    """Return the text of a stream, which has to be whole."""
    assert answer.status_code == 200, answer.text
    *lines, last = [line for line in answer.text.split("\n\n") if line]
    assert last == "data: [DONE]", answer.text
    found = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert all("error" not in event for event in found), answer.text
    return "".join(choice["text"] for event in found for choice in event["choices"])
