"""Listening, signals and an orderly end of `octavo router` and of other proxies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import msgspec
import uvloop

from octavo.config import ServerConfig
from octavo.router.app import build_app
from octavo.router.config import RouterConfig
from octavo.router.proxy_state import ProxyState
from octavo.router.state import RouterState
from octavo.server.app import App
from octavo.server.auth import with_all_keys
from octavo.server.listen import (
    address_of,
    allow_files,
    bind,
    bind_unix,
    client_address,
    is_any_address,
    tls_context,
)
from octavo.server.run import log_host_check, prepare_process
from octavo.server.serve import serve_app
from octavo.system.logs import setup_logging

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=ProxyState)


def run_router(config: ServerConfig, router: RouterConfig, flags: Mapping[str, list[str]]) -> int:
    """Route until a signal ends it; return the exit status.

    Args:
        config: the settings that it shares with servers: address, keys, limits.
        router: its own settings.
        flags: words for `octavo serve`, for each kind of server that it starts itself.

    Raises:
        OctavoError: the address is unusable, or no server can be started.
    """
    # It has no endpoints that need the permission.
    config = msgspec.structs.replace(config, enable_admin=False)
    return run_proxy(config, lambda config: RouterState(config, router, flags), build_app)


def run_proxy(
    config: ServerConfig, make_state: Callable[[ServerConfig], S], build: Callable[[S], App]
) -> int:
    """Serve an application that passes requests on, until a signal ends it; return the exit status.

    Args:
        config: settings of the HTTP server.
        make_state: makes the state from the settings with all keys.
        build: makes the application.

    Raises:
        OctavoError: the address is unusable, or the state has failed.
    """
    config = msgspec.structs.replace(config, disable_fastapi_docs=True)  # it has none
    setup_logging(config.log_level, config.log_format)
    prepare_process()
    tls_context(config)  # reject a bad certificate at once
    allow_files()
    config, sources = with_all_keys(config)
    if not sources and config.uds is None and is_any_address(config.host):
        logger.warning(
            "anyone who can reach this machine can use the server; --host 127.0.0.1 restricts it "
            "to this machine, --api-key requires a key"
        )
    log_host_check(config)
    with ExitStack() as stack:
        if config.uds is None:
            listener = bind(config.host, config.port)
        else:
            listener = bind_unix(config.uds)
            stack.callback(Path(config.uds).unlink, missing_ok=True)
        stack.enter_context(listener)
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        logger.info("listening on %s", address_of(config, listener))
        if config.uds is None:
            logger.info("chat: octavo chat --url %s/v1", client_address(config, listener))

        async def serve() -> int:
            state = make_state(config)
            try:
                status = await serve_app(state, build(state), listener)
            finally:
                await state.close()
            if state.failure is not None:
                raise state.failure
            return status

        return runner.run(serve())
