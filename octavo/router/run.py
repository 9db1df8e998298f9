"""`octavo router`: listening, signals, and a clean end."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from octavo.config import RouterConfig, ServerConfig, api_keys_from_environment
from octavo.errors import ConfigError
from octavo.logs import setup_logging
from octavo.router.app import build_app
from octavo.router.state import RouterState
from octavo.server.run import (
    allow_files,
    bind,
    bind_unix,
    check_tls,
    is_any_address,
    prepare_process,
    serve_app,
    tell_address,
)

logger = logging.getLogger(__name__)


def run_router(config: ServerConfig, router: RouterConfig, server_flags: list[str]) -> int:
    """Routes until a signal ends it; returns the exit status.

    Args:
        config: the settings that it shares with servers: address, keys, limits.
        router: its own.
        server_flags: words for `octavo serve`, for the servers that it starts itself.

    Raises:
        OctavoError: settings contradict each other, or the address cannot be used.
    """
    setup_logging(config.log_level, config.log_format)
    check_router(router, server_flags)
    prepare_process()
    check_tls(config)
    allow_files()
    keys = config.api_key + list(api_keys_from_environment().values())
    if not keys and config.uds is None and is_any_address(config.host):
        logger.warning(
            "anyone who can reach this machine can use the router; --host 127.0.0.1 restricts it "
            "to this machine, --api-key requires a key"
        )
    with ExitStack() as stack:
        if config.uds is None:
            listener = bind(config.host, config.port)
        else:
            listener = bind_unix(config.uds)
            stack.callback(Path(config.uds).unlink, missing_ok=True)
        stack.enter_context(listener)
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        tell_address(config, listener)

        async def serve() -> int:
            state = RouterState(config, router, server_flags, keys)
            try:
                return await serve_app(state, build_app(state), listener)
            finally:
                await state.close()

        return runner.run(serve())


def check_router(router: RouterConfig, server_flags: list[str]) -> None:
    """Finds settings that contradict each other.

    Raises:
        ConfigError: naming them.
    """
    plain = bool(router.servers or router.replicas)
    split = {
        "prefill": bool(router.prefill_servers or router.prefill),
        "decode": bool(router.decode_servers or router.decode),
    }
    own = router.replicas or router.prefill or router.decode
    if plain and any(split.values()):
        raise ConfigError(
            "servers and replicas do all of a request, prefill and decode servers share it: give "
            "--servers or --replicas, or else --prefill(-servers) with --decode(-servers)."
        )
    if not plain and not any(split.values()):
        raise ConfigError(
            "There is no server: give --servers URL ..., or --replicas N to start some."
        )
    if not plain and not all(split.values()):
        missing = "decode" if split["prefill"] else "prefill"
        raise ConfigError(
            f"There is no {missing} server: give --{missing}-servers URL ... or --{missing} N."
        )
    if (server_flags or router.model is not None) and not own:
        raise ConfigError(
            "model and flags for servers are for those that the router starts: give --replicas N, "
            "or --prefill N with --decode N, too."
        )
    for url in router.servers + router.prefill_servers + router.decode_servers:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(
                f"{url!r} is not the address of a server; give one such as http://host:8000."
            )
        if parts.path.rstrip("/"):
            raise ConfigError(f"{url!r} has a path; give the server's address without /v1.")
    urls = [u.rstrip("/") for u in router.servers + router.prefill_servers + router.decode_servers]
    if len(set(urls)) < len(urls):
        raise ConfigError("A server is named twice; name each once.")
    if (router.min_replicas is None) != (router.max_replicas is None):
        raise ConfigError("min_replicas and max_replicas go together; give both or neither.")
    if router.min_replicas is not None and router.max_replicas is not None:
        if not own:
            raise ConfigError("min_replicas and max_replicas are for servers that --replicas N starts.")
        counts = [count for count in (router.replicas, router.prefill, router.decode) if count]
        if not all(router.min_replicas <= count <= router.max_replicas for count in counts):
            raise ConfigError(
                f"The router starts with {', '.join(map(str, counts))} servers, which is not "
                f"between min_replicas={router.min_replicas} and "
                f"max_replicas={router.max_replicas}."
            )
