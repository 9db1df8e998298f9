"""State of the engines, in words for users."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.fleet.core_client import WatchedClient


@dataclass(frozen=True)
class Health:
    """State of the engine; not `ok` if it makes no progress, for `reason`."""

    ok: bool
    reason: str


def engine_health(client: WatchedClient, num_engines: int, config: EngineConfig) -> Health:
    """Return the state of engines that have not ended for good.

    Args:
        client: their client.
        num_engines: their number.
        config: their settings.
    """
    if not client.ready.done():
        reason = "loading the model"
        if missing := client.missing:
            engines = ", ".join(map(str, missing))
            reason = f"waiting for a node (octavo serve --headless) for engine {engines}"
        return Health(True, reason)
    if num_engines > 1 and (down := client.down):
        engines = ", ".join(f"engine {number} {why}" for number, why in down.items())
        they = "wait for it" if config.divides_experts else "serve"
        return Health(True, f"{engines}; the others {they}" if client.up else engines)
    if not client.up:
        parallel = config.parallel
        number = f"engine {parallel.first_engine}" if parallel.numbered else "the engine"
        return Health(True, f"starting {number} again")
    return Health(True, "ok")
