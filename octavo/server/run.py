"""`octavo serve`: listening, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import uvicorn
import uvloop
from fastapi import FastAPI

from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig, ServerConfig
from octavo.engine.checks import check_recording, check_settings
from octavo.errors import ConfigError, OctavoError, reason_of
from octavo.fleet.core_launcher import CoreProcess
from octavo.fleet.start import EngineProcesses
from octavo.frontend.async_llm import AsyncLLM
from octavo.models.hub import resolve_model
from octavo.models.registry import read_spec
from octavo.models.spec import divide_layers
from octavo.observability.recording import RecordSettings
from octavo.plan.memory_plan import resolve_dtype, resolve_max_model_len
from octavo.plan.setup import resolve_kv_cache_dtype
from octavo.platforms.registry import get_platform
from octavo.server.api_servers import check_api_servers, serve_by_api_servers
from octavo.server.app import build_app
from octavo.server.auth import AllowedHosts, with_all_keys
from octavo.server.http_state import HttpState
from octavo.server.protocol import KEEP_ALIVE_TIMEOUT, make_protocol
from octavo.server.state import ServerState
from octavo.system.device import SWITCH_INTERVAL
from octavo.system.distributed import Rank
from octavo.system.logs import setup_logging
from octavo.text.chat_template import RESERVED_VARIABLES, read_override

logger = logging.getLogger(__name__)

# Time that uvicorn waits for connections without unanswered requests.
_CLOSE_TIMEOUT = 5
_DRAIN_POLL = 0.02
_BACKLOG = 2048
END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_server(
    config: ServerConfig, engine_config: EngineConfig, process: CoreProcess | None
) -> int:
    """Serve until a signal ends it; return the exit status.

    Args:
        config: settings of the server.
        engine_config: settings of the engine.
        process: first process of the engine, not started yet; None: it is created.

    Raises:
        OctavoError: the address cannot be used, or the engine failed (with the root cause).
    """
    setup_logging(config.log_level, config.log_format)
    config, sources = with_all_keys(config)
    prepare_process()
    tls_context(config)  # reject a bad certificate at once
    check_api_servers(config, engine_config)
    if reserved := RESERVED_VARIABLES & config.default_chat_template_kwargs.keys():
        raise ConfigError(
            f"default_chat_template_kwargs has {min(reserved)!r}, which the server itself sets; "
            "leave it out."
        )
    _check_model(config, engine_config)
    allow_files()
    if sources:
        logger.info("requests need an API key", extra={"keys_from": ", ".join(sources)})
    elif config.uds is None and is_any_address(config.host):
        logger.warning(
            "anyone who can reach this machine can use the server; --host 127.0.0.1 restricts it "
            "to this machine, --api-key requires a key"
        )
    log_host_check(config)
    with (
        bind(config.host, config.port) if config.uds is None else bind_unix(config.uds) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        name = engine_config.model.served_model_name or [engine_config.model.model]
        logger.info("loading %s, listening on %s", name[0], address_of(config, listener))
        try:
            if config.api_server_count > 1:
                return runner.run(serve_by_api_servers(config, engine_config, listener))
            state = ServerState(
                config, engine_config, lambda: start_engine(config, engine_config, process)
            )
            gc.freeze()  # modules stay: collections need not scan them while answers stream
            return runner.run(serve(state, listener))
        finally:
            if config.uds is not None:
                Path(config.uds).unlink(missing_ok=True)


class _UvicornServer(uvicorn.Server):
    """Server of uvicorn without signal handlers: its own cannot drain."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]  # a generator
        """Capture no signals."""
        return nullcontext()


def prepare_process() -> None:
    """Prepare a process that serves HTTP."""
    # Threads do the work that would block the event loop, which must not wait long for its turn.
    sys.setswitchinterval(SWITCH_INTERVAL)
    # Those threads tokenize; the library's threads would use the model's cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


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
        announces: True if it logs the server's address and statistics; one of several front
            ends does.

    Raises:
        OctavoError: the engine failed; the message has the root cause.
    """

    def on_ready() -> None:
        if announces:
            _log_ready(state, listener)
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
    app: FastAPI,
    listener: socket.socket,
    hear: Callable[[Callable[[int], None]], None] = hear_signals,
) -> int:
    """Serve an application until a signal, or `state.on_failure`, ends it; return the status."""
    config = state.config
    server = _UvicornServer(
        uvicorn.Config(
            app,
            http=make_protocol(config.max_connections_per_client, tls_context(config)),  # type: ignore[arg-type]  # a factory
            timeout_keep_alive=KEEP_ALIVE_TIMEOUT,
            ws="none",
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


def address_of(config: ServerConfig, listener: socket.socket) -> str:
    """Return the address at which a server listens: a URL, or its Unix socket."""
    if config.uds is not None:
        return f"the Unix socket {config.uds}"
    return _url(config, listener, listener.getsockname()[0])


def client_address(config: ServerConfig, listener: socket.socket) -> str:
    """Return the URL for clients on this machine, of a server that listens on a port."""
    host = listener.getsockname()[0]
    return _url(config, listener, "localhost" if is_any_address(host) else host)


def _url(config: ServerConfig, listener: socket.socket, host: str) -> str:
    scheme = "https" if config.ssl_certfile else "http"
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{listener.getsockname()[1]}"


def log_host_check(config: ServerConfig) -> None:
    """Log if requests to all names are answered."""
    if config.uds is None and AllowedHosts(config).all_names:
        logger.info(
            "the Host header is not checked: a web page that has its own name point at this "
            "machine could reach the server through a visitor's browser; --allowed-hosts NAME "
            "answers to that name only"
        )


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


async def start_engine(
    config: ServerConfig, engine_config: EngineConfig, process: CoreProcess | None = None
) -> AsyncLLM:
    """Start the engine of a server, in `process` if given; return while the model still loads."""
    record = None
    if config.record is not None:
        record = RecordSettings(config.record, config.record_prompts, config.record_max_bytes)
    processes = EngineProcesses(
        progress_timeout=config.progress_timeout,
        max_engine_restarts=config.max_engine_restarts,
        warm_spare=config.warm_spare,
        process=process,
        request_memory=config.request_memory_bytes,
        log_level=config.log_level,
        log_format=config.log_format,
        record=record,
    )
    return await AsyncLLM.start(engine_config, processes, metrics_prefix=config.metrics_prefix)


def allow_files() -> None:
    """Raise the limit of open files to the system's maximum: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bind(host: str, port: int) -> socket.socket:
    """Listen on an address before the model loads, so that a used port is found at once."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            f"host={host!r} is not an address of this machine: {reason_of(error)}."
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)  # connections wait from here on, none is rejected
    except OSError as error:
        listener.close()
        raise OctavoError(
            f"Cannot listen on {host}, port {port}: {error.strerror}. Choose another --port or "
            "--host."
        ) from None
    return listener


def bind_unix(path: str) -> socket.socket:
    """Listen on a Unix socket; replace a socket that a killed server has left."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(path) == errno.ECONNREFUSED:
                    Path(path).unlink()
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OctavoError(
            f"Cannot listen on the Unix socket {path}: {error.strerror or error}. Choose another "
            "--uds."
        ) from None
    return listener


def is_any_address(host: str) -> bool:
    """Return True if a server at this host listens on all addresses of the machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def _check_model(config: ServerConfig, engine_config: EngineConfig) -> None:
    """Check settings, model and machine before the server announces itself.

    For a model on the hub only the description is fetched; its weights are fetched while the server
    listens.

    Raises:
        ConfigError, ModelError, HubError: template or model are missing, the model is not
            supported or shorter than max_model_len, or the machine lacks the device or cores.
    """
    device = engine_config.device
    engine_config.parallel.check(headless=False)
    check_settings(engine_config, get_platform(device.device))
    check_recording(engine_config, config.record)
    if config.chat_template is not None:
        read_override(config.chat_template)
    name, load = engine_config.model, engine_config.load
    folder = resolve_model(
        name.model,
        revision=name.revision,
        download_dir=load.download_dir,
        load_format="dummy",
    )
    spec = read_spec(open_checkpoint(folder, load.load_format), name)
    resolve_kv_cache_dtype(engine_config, resolve_dtype(engine_config, spec))
    resolve_max_model_len(engine_config, spec)
    spec.split(Rank.of(0, device))
    divide_layers(spec, device.pipeline_parallel_size, device.pipeline_layers)
    if name.tokenizer is not None:
        resolve_model(name.tokenizer, download_dir=load.download_dir, load_format="dummy")


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS context of a server; None: it has no TLS.

    Raises:
        ConfigError: key and certificate cannot be used, or one of them is missing.
    """
    if (config.ssl_keyfile is None) != (config.ssl_certfile is None):
        raise ConfigError("ssl_keyfile and ssl_certfile go together; give both or neither.")
    for name in ("ssl_keyfile", "ssl_certfile"):
        path = getattr(config, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{name}={path!r} is not a file.")
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:
        raise ConfigError(
            f"ssl_certfile={config.ssl_certfile!r} and ssl_keyfile={config.ssl_keyfile!r} "
            f"cannot be used: {reason_of(error)}."
        ) from None
    return context
