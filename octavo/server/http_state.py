"""What all that serves HTTP has: keys, hosts, bounds on bodies, and the way to a clean end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from octavo.config import ServerConfig
from octavo.errors import DeadlineError, QueueFullError
from octavo.server.auth import AllowedHosts, ApiKeys
from octavo.server.errors import ClientDisconnectError, UnavailableError

T = TypeVar("T")

# Bytes of all bodies being served, beyond which large ones are refused: a part of what the memory
# plan has for the server's process. Small ones always pass, their number is bounded.
_BODIES_NBYTES = 64 * 2**20
_SMALL_BODY = 64 * 2**10


class HttpState:
    """What all requests share, of a server or of a router.

    Args:
        config: the settings, with all keys (see `auth.with_all_keys`).
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.api_keys = ApiKeys(config.api_key, config.admin_key)
        self.allowed_hosts = AllowedHosts(config)
        self.on_failure: Callable[[], None] = lambda: None
        """Called when there is no more purpose in serving."""
        self.draining = False
        self.num_active = 0
        """HTTP requests being answered, probes not counted."""
        self.body_bytes = 0
        """Of these requests' bodies, as far as they have come."""
        self._work: set[asyncio.Future[Any]] = set()
        self._cut = False

    @property
    def drain_timeout(self) -> float:
        """Seconds that requests in flight get to finish at the end."""
        return self.config.shutdown_timeout

    def begin_drain(self) -> None:
        """From now on new requests are refused; those in flight go on."""
        self.draining = True

    def cut(self) -> None:
        """End all requests in flight with an error."""
        self._cut = True
        for work in self._work:
            work.cancel()

    def check_bodies(self, size: int) -> None:
        """Reject a body that has grown to `size` bytes if too much is in flight already.

        Raises:
            QueueFullError: it may be sent again later.
        """
        limit = max(_BODIES_NBYTES, self.config.max_request_bytes)
        if size > _SMALL_BODY and self.body_bytes > limit:
            raise QueueFullError(
                f"The requests being served already have {self.body_bytes} bytes of bodies, and "
                f"the limit is {limit}; try again later, or send less at once.",
                self._retry_after(1),
            )

    def _retry_after(self, places: int) -> int:
        """Seconds until there is room for `places` more answers, as far as that is known."""
        return 1

    async def run(
        self, receive: Receive, work: Coroutine[object, object, T], deadline: float | None
    ) -> T:
        """Does the work of one request as long as somebody waits for it.

        The body must have been read: what `receive` then brings is the client's going away.

        Raises:
            ClientDisconnectError: the client went away; the work was cancelled.
            DeadlineError: time was up; the work was cancelled.
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


def http_state_of(request: Request) -> HttpState:
    """What a request came to, a server or a router."""
    state = request.app.state.octavo
    assert isinstance(state, HttpState)
    return state


async def _disconnected(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass
