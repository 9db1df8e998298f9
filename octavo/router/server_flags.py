"""Words for `octavo serve` that start a router's own servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.config import EngineConfig, ServerConfig, config_fields, section_fields
from octavo.config.arguments import setting_flags
from octavo.errors import ConfigError
from octavo.router.config import PASSED_ON, RouterConfig
from octavo.system.device import num_cpus

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
"""Roles of kinds of servers with the KV cache; other kinds compute whole requests."""

# Memory for prompts that wait until a decode server has fetched them; decode servers keep none.
_HANDED_NBYTES = 2**30
_KEPT_NBYTES = 64 * 2**20
HOST = "{host}"
"""Placeholder in the words for the address of a server's node, while that is unknown."""


def flags_of_kinds(
    router: RouterConfig,
    server: Mapping[str, object],
    engine: Mapping[str, Any],
    config: EngineConfig,
) -> dict[str, list[str]]:
    """Return the words for `octavo serve`, for each kind of server that a router starts itself.

    Args:
        router: settings of the router, which determine the kinds.
        server: settings of the server that were given for them.
        engine: settings of the engine that were given for them.
        config: the engine's complete settings.

    Raises:
        ConfigError: settings were given for servers, but the router starts none, or the settings
            are inconsistent.
    """
    if router.num_own == 0:
        if given := [*engine, *(name for name in server if name not in PASSED_ON)]:
            raise ConfigError(
                f"{given[0]} is for servers that the router starts, and it starts none; give "
                "--replicas N, or --prefill N with --decode N, too, or leave it out."
            )
        return {}
    events = config.cache.kv_events_config
    if router.most_own > 1 and events is not None and events.enable_kv_cache_events:
        raise ConfigError(
            "kv_events_config names one address, and the router starts several servers; leave it "
            "out, or start the servers yourself."
        )
    counts = {"replica": router.replicas, "decode": router.decode, "prefill": router.prefill}
    return {
        kind: server_flags(kind, server, engine, config, router)
        for kind, count in counts.items()
        if count
    }


def server_flags(
    role: str,
    server: Mapping[str, object],
    engine: Mapping[str, Any],
    config: EngineConfig,
    router: RouterConfig,
) -> list[str]:
    """Return the words for `octavo serve` that start one of several servers.

    On one machine, the servers share cores and memory equally, if the settings do not specify the
    threads.

    Args:
        role: prefill, decode or replica.
        server: settings of the server that were given.
        engine: settings of the engine that were given.
        config: the engine's complete settings.
        router: settings of the router: maximum number of servers, and their location.

    Raises:
        ConfigError: a setting is missing.
    """
    device, cache, most = config.device, config.cache, router.most_own
    shared, on_ray = dict(engine), router.backend == "ray"
    num_processes = config.parallel.data_parallel_size * (
        device.tensor_parallel_size * device.pipeline_parallel_size
    )
    if not on_ray:
        shared["gpu_memory_utilization"] = cache.gpu_memory_utilization / most
    elif device.num_threads is None or num_processes > 1:
        raise ConfigError(
            "backend='ray' needs num_threads: this number of CPUs of a node is reserved for each "
            "server, which has to be one process (tensor_parallel_size=1 and so on)."
        )
    if device.num_threads is None:
        shared["num_threads"] = max(1, num_cpus() // (most * num_processes))
    if role in ROLES:
        transfer: dict[str, Any] = {
            "kv_connector": "P2PConnector",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": _HANDED_NBYTES if role == "prefill" else _KEPT_NBYTES
            },
        }
        if on_ray:
            if config.parallel.cluster_key_file is None:
                raise ConfigError(
                    "Prefill and decode servers on several machines need cluster_key_file: the "
                    "same key at the same path on all of them."
                )
            transfer["kv_connector_extra_config"]["host"] = HOST
        if cache.kv_transfer_config is not None:
            transfer = msgspec.to_builtins(cache.kv_transfer_config)
        shared["kv_transfer_config"] = transfer | {"kv_role": ROLES[role]}
    fields = [*config_fields(EngineConfig), *section_fields(ServerConfig)]
    return setting_flags(shared | dict(server), fields)
