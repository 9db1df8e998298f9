"""State of an HTTP server: keys, hosts, bounds on bodies, and an orderly end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from octavo.config import ServerConfig
from octavo.errors import DeadlineError, FirstTokenError, QueueFullError
from octavo.server.auth import AllowedHosts, ApiKeys
from octavo.server.errors import ClientDisconnectError, UnavailableError

T = TypeVar("T")

# Bytes of all bodies being served, beyond which large ones are rejected: a part of the memory
# plan's share for the server process. Small ones always pass, as their number is bounded.
_BODIES_NBYTES = 64 * 2**20
_SMALL_BODY = 64 * 2**10


class HttpState:
    """State that all requests share, of a server or of a router.

    Args:
        config: the settings, with all keys (see `auth.with_all_keys`).
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.api_keys = ApiKeys(config.api_key, config.admin_key)
        self.allowed_hosts = AllowedHosts(config)
        self.on_failure: Callable[[], None] = lambda: None
        """Callback for a failure that makes serving pointless."""
        self.draining = False
        self.drain_began = asyncio.Event()
        """Set when the server begins to stop; streams without an end wait for it."""
        self.num_active = 0
        """Number of HTTP requests being answered, without probes."""
        self.body_bytes = 0
        """Number of received bytes of these requests' bodies."""
        self._work: set[asyncio.Future[Any]] = set()
        self._cut = False

    @property
    def drain_timeout(self) -> float:
        """Seconds in which requests in flight may finish at the end."""
        return self.config.shutdown_timeout

    def begin_drain(self) -> None:
        """Reject new requests from now on; requests in flight continue."""
        self.draining = True
        self.drain_began.set()

    def cut(self) -> None:
        """End all requests in flight with an error."""
        self._cut = True
        for work in self._work:
            work.cancel()

    @property
    def max_chat_bytes(self) -> int:
        """Maximum size of the body of a chat, which may hold pictures and sounds."""
        return max(self.config.max_request_bytes, self.config.max_media_request_bytes)

    def check_bodies(self, size: int) -> None:
        """Reject a body that has grown to `size` bytes if the bodies in flight exceed the limit.

        Raises:
            QueueFullError: the limit is exceeded; the client may send the body again later.
        """
        limit = max(_BODIES_NBYTES, self.max_chat_bytes)
        if size > _SMALL_BODY and self.body_bytes > limit:
            raise QueueFullError(
                f"The requests being served already have {self.body_bytes} bytes of bodies, and "
                f"the limit is {limit}; try again later, or send less at once.",
                self._retry_after(1),
            )

    def _retry_after(self, places: int) -> int:
        """Estimate the seconds until `places` more answers can be accepted."""
        return 1

    async def run(
        self, receive: Receive, work: Coroutine[object, object, T], deadline: float | None
    ) -> T:
        """Run the work of one request while its client waits.

        The body must have been read: further messages of `receive` mean that the client
        disconnects.

        Raises:
            ClientDisconnectError: the client disconnected; the work was cancelled.
            DeadlineError: the deadline passed; the work was cancelled.
            UnavailableError: the server stops; the work was cancelled.
        """
        task = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(_disconnected(receive))
        self._work.add(task)
        if self._cut:
            task.cancel()
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            await asyncio.wait(
                {task, watcher}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if task.done():
                if task.cancelled() and self._cut:
                    raise UnavailableError("The server stopped before the answer was complete.")
                return task.result()
            if watcher.done():
                raise ClientDisconnectError
            raise DeadlineError("The answer was not complete at the request's deadline.")
        finally:
            self._work.discard(task)
            task.cancel()
            watcher.cancel()
            await asyncio.gather(task, watcher, return_exceptions=True)

    async def run_search(
        self,
        receive: Receive,
        work: Coroutine[object, object, T],
        deadline: float | None,
        first_token: float | None,
    ) -> T:
        """Search for the adapter of a request while its client waits.

        Args:
            receive: see `run`.
            work: the search.
            deadline: limit of the request in seconds of `time.monotonic`; None: it has none.
            first_token: limit of its first token; None: it has none.

        Raises:
            ClientDisconnectError, DeadlineError, UnavailableError: see `run`.
            FirstTokenError: the limit of the first token passed.
        """
        if first_token is None or (deadline is not None and deadline <= first_token):
            return await self.run(receive, work, deadline)
        try:
            return await self.run(receive, work, first_token)
        except DeadlineError:
            raise FirstTokenError("The adapter was not found in time.") from None


def http_state_of(request: Request) -> HttpState:
    """Return the state of the server or router that received a request."""
    state = request.app.state.octavo
    assert isinstance(state, HttpState)
    return state


async def _disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
