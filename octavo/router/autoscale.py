"""Number of a router's own servers: as needed for the load, between two limits.

Prefill servers have prompts in flight and decode servers streams, so each kind follows its own part
of the traffic: longer prompts start prefill servers, longer answers decode servers.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Sequence

from octavo.router.managed_servers import ManagedServers
from octavo.router.pool import Pool

logger = logging.getLogger(__name__)

# Interval of load samples in seconds.
_INTERVAL = 1.0
# Windows of samples: the mean over the first starts a server, the maximum over the second ends one.
# Starting one late costs waiting, ending one early its cache.
_UP_LOOKS = 3
_DOWN_LOOKS = 60
# Load of a unit of a prompt's weight (`Job.weight`: 8 KiB), relative to a stream.
_PROMPT_LOAD = 8


def load_of_pool(pool: Pool, role: str) -> int:
    """Return the number of requests in flight; for prefill servers the load of waiting prompts."""
    if role == "prefill":
        return sum(_PROMPT_LOAD * upstream.num_waiting for upstream in pool.upstreams)
    return sum(upstream.num_requests for upstream in pool.upstreams)


class Scale:
    """Desired number of servers of a kind.

    Args:
        least: minimum number of servers.
        most: maximum number of servers.
        target: load for each of them.
    """

    def __init__(self, least: int, most: int, target: int) -> None:
        self._least = least
        self._most = most
        self._target = target
        self._loads: deque[int] = deque(maxlen=_DOWN_LOOKS)

    def look(self, load: int, count: int) -> int:
        """Return the desired number of servers, after a sample of the load of `count` of them."""
        self._loads.append(load)
        recent = list(self._loads)[-_UP_LOOKS:]
        if len(recent) == _UP_LOOKS:
            needed = self._servers_for(sum(recent) / _UP_LOOKS)
            if needed > count:
                self._loads.clear()
                return needed
        if len(self._loads) == _DOWN_LOOKS and self._servers_for(max(self._loads)) < count:
            self._loads.clear()
            return count - 1
        return count

    def _servers_for(self, load: float) -> int:
        return min(self._most, max(self._least, math.ceil(load / self._target)))


async def autoscale(owns: Sequence[ManagedServers], least: int, most: int, target: int) -> None:
    """Start and end servers with the load, forever.

    Args:
        owns: servers of each kind.
        least: minimum number of a kind.
        most: maximum number of a kind.
        target: load for each server.
    """
    scales = [Scale(least, most, target) for _ in owns]
    while True:
        await asyncio.sleep(_INTERVAL)
        for own, scale in zip(owns, scales, strict=True):
            count = len(own.staying)
            load = load_of_pool(own.pool, own.role)
            wanted = scale.look(load, count)
            if wanted != count:
                logger.info(
                    "servers follow the load",
                    extra={"kind": own.role, "load": load, "from": count, "to": wanted},
                )
                own.scale(wanted)
