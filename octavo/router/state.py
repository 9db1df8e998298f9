"""State shared by all requests of one router: its servers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.requests import Request

from octavo.config import ServerConfig
from octavo.router.autoscale import autoscale
from octavo.router.config import RouterConfig
from octavo.router.managed_servers import LocalStarter, ManagedServers, Starter
from octavo.router.pool import Pool, Upstream
from octavo.router.proxy_state import ProxyState
from octavo.system.socket_folder import SocketFolder


class RouterState(ProxyState):
    """State of one router.

    Args:
        config: the settings that it shares with servers: address, keys, limits.
        router: its own settings.
        flags: words for `octavo serve`, for each kind of server that it starts itself.
    """

    def __init__(
        self,
        config: ServerConfig,
        router: RouterConfig,
        flags: Mapping[str, list[str]],
    ) -> None:
        health = router.health_check_interval, router.health_check_timeout
        self.answering = Pool(*health, lists_adapters=True)
        splits = bool(router.prefill_servers or router.prefill)
        self.prefilling = Pool(*health, lists_adapters=True) if splits else None
        pools = [self.answering, *([] if self.prefilling is None else [self.prefilling])]
        super().__init__(config, router, pools)
        self._flags = flags
        self._own: list[ManagedServers] = []
        self._folder = SocketFolder("octavo-router-")
        self._scaling: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to probe servers, and start the router's own."""
        router = self.router
        for role, urls in (
            ("decode", router.servers + router.decode_servers),
            ("prefill", router.prefill_servers),
        ):
            for url in urls:
                upstream = Upstream(url, url.rstrip("/"), api_key=router.server_api_key)
                self._pool_of(role).add(upstream)
        counts = {"replica": router.replicas, "decode": router.decode, "prefill": router.prefill}
        for role, count in counts.items():
            if count:
                own = ManagedServers(
                    self._pool_of(role),
                    role,
                    self._starter(self._flags[role]),
                    self.config.shutdown_timeout,
                    self.fail,
                )
                self._own.append(own)
                own.scale(count)
        least, most = router.min_replicas, router.max_replicas
        if least is not None and most is not None:
            scaling = autoscale(self._own, least, most, router.target_load)
            self._scaling = asyncio.create_task(scaling)

    def _starter(self, flags: list[str]) -> Starter:
        if self.router.backend == "local":
            return LocalStarter(flags, self._folder.path)
        from octavo.router.ray_server import RayStarter

        return RayStarter(flags)

    def _pool_of(self, role: str) -> Pool:
        if role != "prefill":
            return self.answering
        assert self.prefilling is not None
        return self.prefilling

    async def close(self) -> None:
        """End its servers and its tasks."""
        if self._scaling is not None:
            self._scaling.cancel()
            await asyncio.gather(self._scaling, return_exceptions=True)
        await asyncio.gather(*(own.close() for own in self._own))
        for pool in self.pools:
            await pool.close()
        self._folder.close()

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the servers that it started."""
        return sum(own.num_restarts for own in self._own)

    @property
    def ready(self) -> bool:
        """True if a request would be answered."""
        return bool(self.answering.choosable())


def router_of(request: Request) -> RouterState:
    """Return the router that received a request."""
    state = request.app.state.octavo
    assert isinstance(state, RouterState)
    return state
