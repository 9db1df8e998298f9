"""Servers of a router: their state, their load, and the choice of one for a request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import MappingProxyType

import aiohttp
import msgspec
from yarl import URL

from octavo.errors import reason_of
from octavo.fleet.routing import ADAPTER_ALLOWANCE, PrefixMap, load_of, score
from octavo.lora_request import MAX_ADAPTER_NAME
from octavo.router.homes import Homes
from octavo.router.media import NamedMedia, unknown_media

logger = logging.getLogger(__name__)

# Maximum number of remembered pieces of all servers together: some 25 MB.
_MOST_REMEMBERED = 2**17
KEY_HEADERS = ("authorization", "x-api-key")
"""Headers with the key of a client."""
# Number of adapters that a server likely has in memory: those of the last requests.
_MOST_ADAPTERS = 16
# Maximum number of names that a server is known to lack.
_MOST_LACKING = 1024
# Maximum bytes of a server's list of models.
_MOST_LISTED = 16 * 2**20
# Minimum seconds between two lists, for each second that one takes.
_LIST_REST = 100
# Timeout of connecting to a server in seconds.
_CONNECT_TIMEOUT = 5.0
# Seconds for which an idle connection can be reused: fewer than servers keep one.
_KEEP_ALIVE = 3.0
# Number of consecutive timeouts of probes after which waiting for a server's answers ends.
_SILENT_PROBES = 2


class _Card(msgspec.Struct):
    """Entry of a server's list of models."""

    id: str
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class Upstream:
    """Server of a router.

    Args:
        name: name in logs and metrics.
        url: its address, without a slash at the end.
        socket: the Unix socket on which it listens; None: it listens at the URL's host.
        api_key: sent instead of the client's key; None: the client's is passed on.
    """

    def __init__(
        self, name: str, url: str, socket: str | None = None, api_key: str | None = None
    ) -> None:
        self.name = name
        self.url = url
        self.socket = socket
        self.api_key = api_key
        connector: aiohttp.BaseConnector
        if socket is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE)
        else:
            connector = aiohttp.UnixConnector(socket, limit=0, keepalive_timeout=_KEEP_ALIVE)
        self.http = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=["User-Agent", "Accept", "Accept-Encoding", "Content-Type"],
        )
        self.ready = False
        """True if it accepts requests, as far as known."""
        self.epoch = 0
        """Number of times that it became ready: after a failure it may be tried in the next
        epoch."""
        self.leaving = False
        """True if it receives no more requests, though it is running."""
        self.num_waiting = 0
        """Weight of its requests without an answer so far."""
        self.num_running = 0
        """Number of requests with answers in progress."""
        self.num_requests = 0
        """Number of requests in flight."""
        self.silent = 0
        """Number of consecutive probes that timed out."""
        self.adapters: frozenset[str] | None = None
        """Names of its LoRA adapters; None: unknown."""
        self.lacking: set[str] = set()
        """Names of models that it did not have since the last list."""
        self.list_at = 0.0
        """Second of `time.monotonic` from which it is queried for its adapters again."""
        self.suspected = asyncio.Event()
        """Event that is set after a failed connection, to probe the server at once."""
        self._guards: set[asyncio.Timeout] = set()

    @property
    def load(self) -> int:
        """Load, see `fleet.routing.load_of`."""
        return load_of(self.num_waiting, self.num_running)

    async def ask(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> aiohttp.ClientResponse:
        """Send a request; return an answer with its head, which the caller closes.

        Raises:
            aiohttp.ClientError: the server cannot be reached, or broke the connection.
        """
        return await self.http.request(
            method,
            URL(self.url + path, encoded=True),
            headers=self.with_key(headers),
            data=body or None,
            allow_redirects=False,
        )

    def with_key(self, headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return the headers of a request with the key for this server."""
        if self.api_key is None:
            return headers
        others = [header for header in headers if header[0].lower() not in KEY_HEADERS]
        return [*others, ("authorization", f"Bearer {self.api_key}")]

    def may_have(self, model: str) -> bool:
        """Return True if it may have a model of a name that another server does not have."""
        if model in self.lacking:
            return False
        return self.adapters is None or model in self.adapters

    @asynccontextmanager
    async def guard(self) -> AsyncIterator[None]:
        """Return a context of waiting for this server; `give_up` ends the wait.

        Raises:
            TimeoutError: `give_up` ended the wait.
        """
        async with asyncio.timeout(None) as timeout:
            self._guards.add(timeout)
            try:
                yield
            finally:
                self._guards.discard(timeout)

    def give_up(self) -> None:
        """End all guarded waiting for it."""
        now = asyncio.get_running_loop().time()
        for guard in list(self._guards):
            guard.reschedule(now)


class Hold:
    """Place of a request at a server.

    Args:
        upstream: the server.
        weight: its load until its answer begins, 1 for a short prompt.
    """

    def __init__(self, upstream: Upstream, weight: int) -> None:
        self.upstream = upstream
        self._weight = weight
        self._begun = False
        upstream.num_waiting += weight
        upstream.num_requests += 1

    def begin(self) -> None:
        """Record that the answer begins."""
        if not self._begun:
            self._begun = True
            self.upstream.num_waiting -= self._weight
            self.upstream.num_running += 1

    def end(self) -> None:
        """Record that the request has ended."""
        self.begin()
        self.upstream.num_running -= 1
        self.upstream.num_requests -= 1


class Pool:
    """Interchangeable servers.

    Args:
        interval: seconds between two probes of a server.
        timeout: timeout of a probe in seconds.
        lists_adapters: True to ask the servers for their LoRA adapters.
    """

    def __init__(self, interval: float, timeout: float, *, lists_adapters: bool = False) -> None:
        self.upstreams: list[Upstream] = []
        self.num_pieces = self.num_known = 0
        """Numbers of pieces of placed prompts, and of those that the server likely had cached."""
        self._media = Homes[Upstream]()
        """Servers that have received media with a uuid last, for each API key."""
        self._interval = interval
        self._timeout = timeout
        self._lists_adapters = lists_adapters
        self._numbers: dict[Upstream, int] = {}
        self._next_number = 0
        self._last = -1
        self._prefixes = PrefixMap(_MOST_REMEMBERED)
        self._placed = PrefixMap(_MOST_ADAPTERS)
        """Adapters that are likely in memory, each as a chain of one piece."""
        self._changed = asyncio.Event()
        self._probing: dict[Upstream, asyncio.Task[None]] = {}

    def add(self, upstream: Upstream) -> None:
        """Add a server, which receives requests once a probe finds it ready."""
        self._numbers[upstream] = self._next_number
        self._next_number += 1
        self.upstreams.append(upstream)
        self._probing[upstream] = asyncio.create_task(self._probe_always(upstream))
        self._share()

    async def remove(self, upstream: Upstream) -> None:
        """Remove a server."""
        self.upstreams.remove(upstream)
        self._forget(upstream)
        del self._numbers[upstream]
        task = self._probing.pop(upstream)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        upstream.ready = False
        upstream.give_up()
        await upstream.http.close()
        self._share()

    def _share(self) -> None:
        """Divide the capacity for remembered pieces among the servers."""
        self._prefixes.capacity = _MOST_REMEMBERED // max(1, len(self.upstreams))

    async def close(self) -> None:
        """End the probes."""
        for upstream in list(self.upstreams):
            await self.remove(upstream)

    # Choice

    def choose(
        self,
        pieces: Sequence[bytes],
        tried: Mapping[Upstream, int],
        only: Upstream | None = None,
        model: str | None = None,
    ) -> Upstream | None:
        """Choose the server for a request: the least busy one, or one with its prefix or adapter.

        A server that lists the adapter, and one that probably has it in memory, may each be busier
        than others by two waiting requests. Equal servers take turns.

        Args:
            pieces: chained hashes of the prompt's pieces.
            tried: servers that failed the request, with their epochs at that time; they are
                omitted.
            only: the only server that can answer; None: each can.
            model: name of the model, or of an adapter; None: the request names none.

        Returns:
            None if no server can be tried.
        """
        usable = self.choosable(tried, only)
        usable = [u for u in usable if model not in u.lacking] or usable
        if not usable:
            return None
        least = min(u.load for u in usable)
        known = {u: self._prefixes.num_cached(self._numbers[u], pieces) for u in usable}
        adapter = []
        if model is not None and any(model in (u.adapters or ()) for u in usable):
            adapter.append(model.encode(errors="replace"))

        def key(upstream: Upstream) -> tuple[float, bool, int]:
            number = self._numbers[upstream]
            against = score(upstream.load, least, known[upstream], len(pieces))
            if adapter:
                against -= ADAPTER_ALLOWANCE * (model in (upstream.adapters or ()))
                against -= ADAPTER_ALLOWANCE * self._placed.num_cached(number, adapter)
            return against, number <= self._last, number

        chosen = min(usable, key=key)
        self._last = self._numbers[chosen]
        self._prefixes.add(self._last, pieces)
        self._placed.add(self._last, adapter)
        self.num_pieces += len(pieces)
        self.num_known += known[chosen]
        return chosen

    def note_media(self, api_key: str | None, media: NamedMedia, upstream: Upstream) -> None:
        """Record that a server has the media of a request that have uuids.

        Args:
            api_key: the client's key, if the router has keys.
            media: the media.
            upstream: the server.
        """
        for name in (*media.recalled, *media.sent):
            self._media.note(api_key, name, upstream)

    def find_media(self, api_key: str | None, media: NamedMedia) -> Upstream | None:
        """Return the only server that can answer a request with uuids without contents.

        That is the server that has received the contents last: another one may have older contents
        of the same uuid. The arguments are those of `note_media`.

        Returns:
            None if the request recalls nothing.

        Raises:
            RequestError: no ready server is known to have all contents.
        """
        homes = {self._media.find(api_key, name) for name in media.recalled}
        if not homes:
            return None
        if len(self.upstreams) == 1 and homes <= {None, self.upstreams[0]}:
            return self.upstreams[0]  # it knows better
        home = homes.pop()
        if homes or home is None or not self.choosable(only=home):
            raise unknown_media()
        return home

    def note_lack(self, upstream: Upstream, model: str, only: Upstream | None = None) -> bool:
        """Record that a server does not have a model; return True if another one may have it.

        Args:
            upstream: the server.
            model: name of the model.
            only: see `choose`.
        """
        if not self._lists_adapters or len(model) > MAX_ADAPTER_NAME:
            return False
        if len(upstream.lacking) < _MOST_LACKING:
            upstream.lacking.add(model)
        others = (u for u in self.choosable(only=only) if u is not upstream)
        return any(u.may_have(model) for u in others)

    @contextmanager
    def hold(self, upstream: Upstream, weight: int) -> Iterator[Hold]:
        """Count a request at a server while it is answered there."""
        hold = Hold(upstream, weight)
        try:
            yield hold
        finally:
            hold.end()

    async def wait_ready(
        self, tried: Mapping[Upstream, int], timeout: float, only: Upstream | None = None
    ) -> bool:
        """Wait until a server can be tried; return False after `timeout` seconds without one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not self.choosable(tried, only):
                    self._changed.clear()
                    await self._changed.wait()
                return True
        return False

    def choosable(
        self, tried: Mapping[Upstream, int] = MappingProxyType({}), only: Upstream | None = None
    ) -> list[Upstream]:
        """Return the servers that can be tried; see `choose`."""
        usable = [u for u in self.upstreams if u.ready and tried.get(u) != u.epoch]
        return [u for u in usable if (not u.leaving if only is None else u is only)]

    # Health

    def suspect(self, upstream: Upstream) -> None:
        """Stop sending requests to a server after a failed connection, until it answers a probe."""
        self._note(upstream, False, "a connection to it failed")
        upstream.suspected.set()

    def restarted(self, upstream: Upstream) -> None:
        """Record that another process replaces a server, with an empty cache."""
        self._forget(upstream)
        upstream.silent = 0
        self._note(upstream, False, "its process has ended")
        upstream.give_up()
        upstream.suspected.set()

    def _forget(self, upstream: Upstream) -> None:
        """Record that a server has nothing cached, and no adapters in memory."""
        self._prefixes.forget(self._numbers[upstream])
        self._placed.forget(self._numbers[upstream])
        upstream.adapters, upstream.list_at = None, 0.0
        upstream.lacking.clear()

    def _note(self, upstream: Upstream, ready: bool, reason: str) -> None:
        if ready and not upstream.ready:
            upstream.epoch += 1
            logger.info("server ready", extra={"server": upstream.name})
        elif upstream.ready and not ready:
            logger.warning("server lost", extra={"server": upstream.name, "reason": reason})
        upstream.ready = ready
        self._changed.set()

    async def _probe_always(self, upstream: Upstream) -> None:
        while True:
            upstream.suspected.clear()
            try:
                async with asyncio.timeout(self._timeout):
                    reason = await self._probe(upstream)
                upstream.silent = 0
            except TimeoutError:
                reason = f"it does not answer within {self._timeout:g} s"
                upstream.silent += 1
                if upstream.silent >= _SILENT_PROBES:
                    upstream.give_up()
            except Exception as error:  # after any error, the server is probed again
                reason = reason_of(error)
                upstream.silent = 0
            begin = time.monotonic()
            if self._lists_adapters and reason is None and begin >= upstream.list_at:
                upstream.adapters = await self._list_adapters(upstream)
                upstream.lacking.clear()
                end = time.monotonic()
                upstream.list_at = end + _LIST_REST * (end - begin)
            self._note(upstream, reason is None, reason or "")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval):
                    await upstream.suspected.wait()
                    await asyncio.sleep(min(0.05, self._interval))

    async def _list_adapters(self, upstream: Upstream) -> frozenset[str] | None:
        """Return the names of a server's adapters; None: it does not tell them."""
        try:
            async with asyncio.timeout(self._timeout):
                response = await upstream.ask("GET", "/v1/models", [], b"")
                try:
                    if response.status != 200:
                        return None
                    page = bytearray()
                    while chunk := await response.content.readany():
                        page += chunk
                        if len(page) > _MOST_LISTED:
                            return None
                finally:
                    response.close()
            cards = msgspec.json.decode(page, type=_Cards).data
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError, ValueError):  # also the timeout
            return None
        return frozenset(card.id for card in cards if card.parent is not None)

    async def _probe(self, upstream: Upstream) -> str | None:
        """Probe a server; return why it accepts no requests, or None if it does."""
        status = 0
        for path in ("/ready", "/health"):  # other servers have no /ready
            response = await upstream.ask("GET", path, [], b"")
            response.close()
            status = response.status
            if status == 200:
                return None
            if status not in (404, 405):
                break
        return f"its probe answered {status}"
