"""State of a process that passes requests on: a router, or the front of several models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.requests import Request

from octavo.config import ServerConfig
from octavo.errors import OctavoError, QueueFullError
from octavo.router.config import RouterConfig
from octavo.router.homes import Homes
from octavo.router.metrics import RouterMetrics
from octavo.router.pool import Pool, Upstream
from octavo.router.view import RouterView
from octavo.server.http_state import HttpState
from octavo.server.realtime_shares import SessionPlaces


class ProxyState(HttpState, ABC):
    """State that all requests to pass on share.

    Args:
        config: the settings that it shares with servers: address, keys, limits.
        router: settings of its servers: health checks, key.
        pools: the servers; more may be added later.
    """

    def __init__(self, config: ServerConfig, router: RouterConfig, pools: Sequence[Pool]) -> None:
        super().__init__(config)
        self.router = router
        self.pools = pools
        self.stored = Homes[Upstream]()
        several_keys = len(self.api_keys) > 1
        self.view = RouterView(pools, self.stored, router, several_keys=several_keys)
        self.metrics = RouterMetrics(pools, lambda: self.num_restarts)
        self.failure: OctavoError | None = None
        """Error that ends the process."""
        self.sessions = SessionPlaces()
        self._num_admitted = 0

    def begin_drain(self) -> None:
        """Reject new requests, and end streams without an end."""
        super().begin_drain()
        self.view.stop()

    def fail(self, error: OctavoError) -> None:
        """End the process with an error."""
        self.failure = error
        self.on_failure()

    @property
    def shares_key(self) -> bool:
        """True if servers cannot tell the clients' keys apart, because all requests have one."""
        return self.router.server_api_key is not None and bool(self.config.api_key)

    @abstractmethod
    async def close(self) -> None:
        """End its servers and its tasks."""

    @property
    @abstractmethod
    def num_restarts(self) -> int:
        """Number of restarts of the servers that it started."""

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold a place for a request from the arrival of its body until the end of its answer.

        Raises:
            QueueFullError: no place is free; the request may be sent again later.
        """
        limit = self.config.max_num_queued_reqs
        if limit and self._num_admitted >= limit:
            raise QueueFullError(
                f"The server already has {limit} unfinished requests, its limit "
                "(--max-num-queued-reqs); try again later.",
                1,
            )
        self._num_admitted += 1
        try:
            yield
        finally:
            self._num_admitted -= 1


def proxy_state_of(request: Request) -> ProxyState:
    """Return the state of the process that received a request to pass on."""
    state = request.app.state.octavo
    assert isinstance(state, ProxyState)
    return state
