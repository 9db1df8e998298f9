"""Serving of an application until a signal ends it, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import uvicorn
import uvloop

from octavo.config import EngineConfig, ServerConfig
from octavo.fleet.start import EngineProcesses
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.past import WhatIf
from octavo.server.adapter_table import AdapterTable, given_file
from octavo.server.app import App, build_app
from octavo.server.http_state import HttpState
from octavo.server.listen import address_of, client_address, tls_context
from octavo.server.protocol import KEEP_ALIVE_TIMEOUT, make_protocol
from octavo.server.sockets import MAX_MESSAGE_BYTES, socket_protocol
from octavo.server.state import ServerState
from octavo.system.garbage import exempt_present_objects
from octavo.system.notify import notify_ready

logger = logging.getLogger(__name__)

# Time that uvicorn waits for connections without unanswered requests.
_CLOSE_TIMEOUT = 5
_DRAIN_POLL = 0.02
END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve_engine(
    config: ServerConfig,
    engine_config: EngineConfig,
    processes: EngineProcesses,
    listener: socket.socket,
    what_if: WhatIf | None = None,
) -> int:
    """Start the engine in this front end, and serve; return the exit status.

    `what_if` simulates other settings.

    Raises:
        OctavoError: the engine failed; the message has the root cause.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        file = given_file()
        state = ServerState(
            config,
            engine_config,
            lambda: start_engine(config, engine_config, processes),
            None if file is None else AdapterTable(file),
        )
        state.what_if = what_if
        exempt_present_objects()  # modules stay
        return runner.run(serve(state, listener))


async def start_engine(
    config: ServerConfig, engine_config: EngineConfig, processes: EngineProcesses
) -> AsyncLLM:
    """Start the engine of a server; return while the model still loads."""
    return await AsyncLLM.start(engine_config, processes, metrics_prefix=config.metrics_prefix)


class _UvicornServer(uvicorn.Server):
    """Server of uvicorn without signal handlers: its own cannot drain."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]  # a generator
        """Capture no signals."""
        return nullcontext()


def hear_signals(on_signal: Callable[[int], None]) -> None:
    """Call `on_signal` in the running event loop for each signal that ends a server."""
    loop = asyncio.get_running_loop()
    for number in END_SIGNALS:
        loop.add_signal_handler(number, on_signal, number)


async def serve(
    state: ServerState,
    listener: socket.socket,
    hear: Callable[[Callable[[int], None]], None] = hear_signals,
    *,
    announces: bool = True,
) -> int:
    """Serve requests to a listening socket; return the exit status.

    Args:
        state: the server.
        listener: the socket.
        hear: registers a callback for each signal that ends the server.
        announces: True if it logs the server's address and statistics, and tells systemd that
            the server is ready; one of several front ends does.

    Raises:
        OctavoError: the engine failed; the message has the root cause.
    """

    def on_ready() -> None:
        if announces:
            _log_ready(state, listener)
            notify_ready()
            state.log_stats()
        else:
            logger.info("ready")

    state.on_ready = on_ready
    try:
        status = await serve_app(state, build_app(state), listener, hear)
    finally:
        await state.close()
    if state.failure is not None:
        raise state.failure
    return status


async def serve_app(
    state: HttpState,
    app: App,
    listener: socket.socket,
    hear: Callable[[Callable[[int], None]], None] = hear_signals,
) -> int:
    """Serve an application until a signal, or `state.on_failure`, ends it; return the status.

    Args:
        state: the server.
        app: the application.
        listener: the socket that it listens on.
        hear: begins to call a function with signals.
    """
    config = state.config
    server = _UvicornServer(
        uvicorn.Config(
            app,
            http=make_protocol(config.max_connections_per_client, tls_context(config)),  # type: ignore[arg-type]  # a factory
            timeout_keep_alive=KEEP_ALIVE_TIMEOUT,
            ws=socket_protocol(),
            ws_max_size=MAX_MESSAGE_BYTES,
            ws_per_message_deflate=False,
            log_config=None,
            log_level=config.uvicorn_log_level,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_CLOSE_TIMEOUT,
        )
    )
    shutdown = _Shutdown(state, server)
    hear(shutdown.on_signal)
    state.on_failure = shutdown.stop
    await server.serve(sockets=[listener])
    return shutdown.status


def _log_ready(state: ServerState, listener: socket.socket) -> None:
    """Log that the model is loaded, and how to use it."""
    config, name = state.config, state.model_names[0]
    if config.uds is not None:
        logger.info("ready: %s at %s", name, address_of(config, listener))
        return
    address = client_address(config, listener)
    documentation = "" if config.disable_fastapi_docs else f"documentation: {address}/docs; "
    logger.info("%schat: octavo chat --url %s/v1", documentation, address)
    logger.info("ready: %s at %s/v1", name, address)


class _Shutdown:
    """Shutdown of the server: the first signal drains it, the second one stops it at once."""

    def __init__(self, state: HttpState, server: uvicorn.Server) -> None:
        self.status = 0
        self._state = state
        self._server = server
        self._drain: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Close the listening socket and end the server."""
        self._server.should_exit = True

    def on_signal(self, number: int) -> None:
        """Handle SIGTERM and SIGINT."""
        if self._drain is None:
            self._state.begin_drain()
            logger.info("draining", extra={"in_flight": self._state.num_active})
            self._drain = asyncio.create_task(self._drain_then_stop())
        else:
            logger.warning("stopping at once", extra={"in_flight": self._state.num_active})
            self.status = 128 + number
            self._state.cut()
            self._server.force_exit = True
            self.stop()

    async def _drain_then_stop(self) -> None:
        try:
            async with asyncio.timeout(self._state.drain_timeout):
                while self._state.num_active:
                    await asyncio.sleep(_DRAIN_POLL)
        except TimeoutError:
            logger.warning(
                "requests were cut off when --shutdown-timeout ended",
                extra={"in_flight": self._state.num_active},
            )
            self._state.cut()
        self.stop()
