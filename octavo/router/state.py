"""What all requests of one router share: its servers, and the client that asks them."""

from __future__ import annotations

import asyncio

import httpx
from starlette.requests import Request

from octavo.config import RouterConfig, ServerConfig
from octavo.errors import QueueFullError
from octavo.router.autoscale import Autoscaler
from octavo.router.metrics import RouterMetrics
from octavo.router.own_servers import OwnServers
from octavo.router.pool import Pool, Upstream
from octavo.server.http_state import HttpState

# Seconds in which a server has to accept a connection.
_CONNECT_TIMEOUT = 5.0


class RouterState(HttpState):
    """One router.

    Args:
        config: the settings that it shares with servers: address, keys, limits.
        router: its own.
        server_flags: words for `octavo serve`, for the servers that it starts itself.
        api_keys: accepted keys, the environment's included.
    """

    def __init__(
        self,
        config: ServerConfig,
        router: RouterConfig,
        server_flags: list[str],
        api_keys: list[str] | None = None,
    ) -> None:
        super().__init__(config, api_keys)
        self.router = router
        self.http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,
        )
        health = router.health_check_interval, router.health_check_timeout
        self.answering = Pool(self.http, *health)
        splits = bool(router.prefill_servers or router.prefill)
        self.prefilling = Pool(self.http, *health) if splits else None
        self.pools = [self.answering, *([self.prefilling] if self.prefilling is not None else [])]
        self.metrics = RouterMetrics(self)
        self.prompt_tokens = self.completion_tokens = 0
        """Of all answers so far, as their servers say."""
        self._server_flags = server_flags
        self._own: list[OwnServers] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begins to look at servers, and starts its own."""
        router = self.router
        for url in router.servers + router.decode_servers:
            self.answering.add(Upstream(url, url.rstrip("/")))
        if self.prefilling is not None:
            for url in router.prefill_servers:
                self.prefilling.add(Upstream(url, url.rstrip("/")))
        for role, pool, count in (
            ("replica", self.answering, router.replicas),
            ("decode", self.answering, router.decode),
            ("prefill", self.prefilling, router.prefill),
        ):
            if count and pool is not None:
                self._own.append(OwnServers(pool, role, router.model, self._server_flags))
                self._own[-1].scale(count)
        if router.max_replicas is not None and self._own:
            scaler = Autoscaler(self, self._own)
            self._tasks.append(asyncio.create_task(scaler.run()))

    async def close(self) -> None:
        """Ends its servers and all that it does."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pool in self.pools:
            await pool.close()
        await asyncio.gather(*(own.close() for own in self._own))
        await self.http.aclose()

    @property
    def num_restarts(self) -> int:
        """How often one of its own servers was started again."""
        return sum(own.num_restarts for own in self._own)

    @property
    def ready(self) -> bool:
        """Whether a request would be answered."""
        return self.answering.choosable()

    def check_room(self) -> None:
        """Refuses a request where too many are in flight.

        Raises:
            QueueFullError: it may be sent again later.
        """
        limit = self.config.max_num_queued_reqs
        if limit and self.num_active > limit:
            raise QueueFullError(
                f"The router already has {limit} unfinished requests, its limit "
                "(--max-num-queued-reqs); try again later.",
                1,
            )

    def note_usage(self, usage: tuple[int, int]) -> None:
        """Counts the tokens of an answer, of its prompt and of its text."""
        self.prompt_tokens += usage[0]
        self.completion_tokens += usage[1]
        self.metrics.tokens.labels("prompt").inc(usage[0])
        self.metrics.tokens.labels("completion").inc(usage[1])


def router_of(request: Request) -> RouterState:
    """The router that a request came to."""
    state = request.app.state.octavo
    assert isinstance(state, RouterState)
    return state
