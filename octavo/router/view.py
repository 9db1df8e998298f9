"""Engine view of a router: the joined views of its servers.

The router reads a server's view only while it has viewers of its own: one stream of each server for
all viewers with the same key.

With several keys, a viewer sees the ids and sizes of its own key's requests. A server that cannot
tell the clients' keys apart shows all requests to the router; then the router selects those whose
id is one of the key's requests in flight, and of no other key's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence

import aiohttp
import msgspec

from octavo.errors import RequestError, reason_of
from octavo.router.config import RouterConfig
from octavo.router.homes import Homes
from octavo.router.job import Job
from octavo.router.joined_view import EngineNumbers, JoinedView, ServerView
from octavo.router.pool import Pool, Upstream
from octavo.router.streams import MEDIA_TYPES, complete_parts, data_of
from octavo.server.auth import tenant_of
from octavo.server.errors import UnavailableError
from octavo.server.viewers import Viewer, Viewers
from octavo.system import clock

logger = logging.getLogger(__name__)

_PATH = "/v1/engine/view"
_RETRY = 0.5
_LOOK = 0.05
_MAX_EVENT = 16 * 2**20
_MAX_WAITING = 256
"""Most events of a server that wait for the next tick."""
_MAX_MESSAGE = 64 * 2**10
_NAMED = re.compile(r"(?:cmpl|chatcmpl|generate|msg|ollama)-(.*)-\d+-\d+", re.DOTALL)
_RESPONSE = re.compile(r"(resp_[^-]+)-\d+-\d+")
"""Ids of answers as servers make them: the client's or the router's id of the request, the number
of the prompt, and the number of the answer."""


class ViewRefusedError(RequestError):
    """Refusal of the view by all servers.

    Args:
        status: status of a server's answer.
        message: its message.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Audience:
    """Viewers with the same key: their joined view, and the tasks that read the servers' views.

    Args:
        view: the joined view.
        headers: headers with the key, for the servers.
    """

    def __init__(self, view: JoinedView, headers: list[tuple[str, str]]) -> None:
        self.view = view
        self._headers = [*headers, ("accept-encoding", "identity")]
        self._tasks: dict[Upstream, asyncio.Task[None]] = {}

    def follow(self, upstreams: Sequence[Upstream]) -> None:
        """Begin to read new servers, and stop to read those that have left."""
        for upstream in set(self._tasks).difference(upstreams):
            self._tasks.pop(upstream).cancel()
            del self.view.servers[upstream]
        for upstream in upstreams:
            if upstream not in self._tasks:
                reading = self._keep_reading(self.view.add(upstream))
                self._tasks[upstream] = asyncio.create_task(reading)

    def close(self) -> None:
        """Stop to read the servers."""
        for task in self._tasks.values():
            task.cancel()

    def check(self) -> None:
        """Raise `ViewRefusedError` if all servers refuse the view."""
        ready = [server for server in self.view.servers.values() if server.upstream.ready]
        refusals = [server.refusal for server in ready]
        known = [refusal for refusal in refusals if refusal is not None]
        if known and len(known) == len(refusals):
            raise ViewRefusedError(*known[0])

    async def _keep_reading(self, server: ServerView) -> None:
        while True:
            if server.upstream.ready:
                reason = await self._read(server)
                server.events.append(("end", reason.encode()))
            await asyncio.sleep(_RETRY)

    async def _read(self, server: ServerView) -> str:
        """Read a server's view until it ends; return the reason."""
        upstream = server.upstream
        try:
            async with upstream.guard():
                response = await upstream.ask("GET", _PATH, self._headers, b"")
            try:
                if response.status != 200:
                    return await self._note_refusal(server, response)
                end = MEDIA_TYPES["text/event-stream"]
                chunks = _chunks(upstream, response)
                async for events in complete_parts(chunks, end, _MAX_EVENT):
                    server.events += [(_name_of(event), data_of(event)) for event in events]
                    while len(server.events) > _MAX_WAITING:
                        await asyncio.sleep(_LOOK)
                    if server.fault:
                        return server.fault
            finally:
                response.close()
        except TimeoutError:
            return "it is silent"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return reason_of(error)
        return "it has ended the stream"

    async def _note_refusal(self, server: ServerView, response: aiohttp.ClientResponse) -> str:
        body = b""
        async for chunk in _chunks(server.upstream, response):
            body += chunk
            if len(body) > _MAX_MESSAGE:
                break
        try:
            message = str(msgspec.json.decode(body)["error"]["message"])
        except (msgspec.MsgspecError, ValueError, KeyError, TypeError):
            message = f"The server {server.upstream.name} has no engine view."
        server.refusal = response.status, message
        return f"it does not show its engines: {message}"


class RouterView:
    """Viewers of a router's servers.

    Args:
        pools: the servers.
        stored: servers and keys of the stored responses.
        router: settings of the router.
        several_keys: True if the router has several API keys.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        stored: Homes[Upstream],
        router: RouterConfig,
        *,
        several_keys: bool,
    ) -> None:
        self._pools, self._stored, self._router = pools, stored, router
        self._several_keys = several_keys
        self._viewers = Viewers()
        self._audiences: dict[str, _Audience] = {}
        self._numbers = EngineNumbers()
        self._work_task: asyncio.Task[None] | None = None
        self._claims: dict[str, Counter[str | None]] = {}
        """Keys of the requests in flight, by all ids that their answers may have."""

    def __len__(self) -> int:
        """Return the number of viewers."""
        return len(self._viewers)

    def stop(self) -> None:
        """End all streams, and later ones at once."""
        self._viewers.stop()

    @contextlib.contextmanager
    def claim(self, job: Job) -> Iterator[None]:
        """Show a request to its key, while it is answered."""
        for name in job.request_ids:
            self._claims.setdefault(name, Counter())[job.api_key] += 1
        try:
            yield
        finally:
            for name in job.request_ids:
                self._claims[name] -= Counter([job.api_key])
                if not self._claims[name]:
                    del self._claims[name]

    def _is_own(self, api_key: str, request_id: str) -> bool:
        """Return True if a request is the key's, and of no other key."""
        if (found := _NAMED.fullmatch(request_id)) is not None:
            return set(self._claims.get(found[1], ())) == {api_key}
        found = _RESPONSE.fullmatch(request_id)
        return found is not None and self._stored.find(api_key, found[1]) is not None

    async def watch(
        self, headers: list[tuple[str, str]], api_key: str | None
    ) -> AsyncGenerator[list[bytes], None]:
        """Yield the events of a new viewer until it is dropped, or the router stops.

        Args:
            headers: headers with the viewer's key.
            api_key: this key, if the router has keys.

        Raises:
            QueueFullError: there are too many viewers.
            ViewRefusedError: all servers refuse the view.
            UnavailableError: no server has answered.
        """
        key = api_key if self._several_keys else None
        if self._router.server_api_key is not None:
            headers = []  # each client has this key at the servers
        audience = repr((headers, key))
        with self._viewers.add(audience, tenant_of(key)) as viewer:
            try:
                if audience not in self._audiences:
                    self._begin(audience, headers, key)
                await self._wait_for_a_server(self._audiences[audience])
                async for events in viewer.read():
                    yield events
            finally:
                if not any(v.audience == audience for v in self._viewers if v is not viewer):
                    self._audiences.pop(audience).close()
                if not self._audiences and self._work_task is not None:
                    self._work_task.cancel()
                    self._work_task = None

    def _begin(self, audience: str, headers: list[tuple[str, str]], api_key: str | None) -> None:
        """Begin to work for the first viewer of an audience."""
        is_own = None if api_key is None else lambda name: self._is_own(api_key, name)
        self._audiences[audience] = _Audience(JoinedView(self._numbers, is_own), headers)
        if self._work_task is None:
            self._work_task = asyncio.create_task(self._work())
            self._work_task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """End all streams if the work for them has failed; viewers may connect again."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the engine view failed", exc_info=error)
            self._viewers.end_all()

    async def _wait_for_a_server(self, audience: _Audience) -> None:
        try:
            async with asyncio.timeout(self._router.failover_timeout):
                while not audience.view.has_begun:
                    audience.check()
                    await asyncio.sleep(_LOOK)
        except TimeoutError:
            raise UnavailableError(
                "No server has shown its engines: none is ready, or each failed; try again later."
            ) from None

    async def _work(self) -> None:
        while True:
            begin, worked = time.monotonic(), time.thread_time()
            upstreams = [upstream for pool in self._pools for upstream in pool.upstreams]
            for audience in self._audiences.values():
                audience.follow(upstreams)
                audience.view.update(clock.now())
            await self._viewers.send(begin, time.thread_time() - worked, self._send)

    def _send(self, viewer: Viewer) -> None:
        """Send a viewer the events of a tick."""
        assert viewer.audience is not None
        audience = self._audiences.get(viewer.audience)
        if audience is None:
            return  # it has gone
        if not viewer.is_new:
            viewer.put(audience.view.news)
        elif audience.view.has_begun:
            viewer.put(audience.view.whole())
            viewer.is_new = False


async def _chunks(upstream: Upstream, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the body of an answer as it arrives."""
    while True:
        async with upstream.guard():
            chunk = await response.content.readany()
        if not chunk:
            return
        yield chunk


def _name_of(event: bytes) -> str:
    """Return the name of a server-sent event; "" for a comment."""
    lines = event.split(b"\n")
    found = next((line for line in lines if line.startswith(b"event: ")), b"event: ")
    return found[7:].decode(errors="replace").strip()
