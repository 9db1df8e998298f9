"""Sockets that a server listens on, their addresses, and TLS."""

from __future__ import annotations

import errno
import ipaddress
import resource
import socket
import ssl
from pathlib import Path

from octavo.config import ServerConfig
from octavo.errors import ConfigError, OctavoError, reason_of

_BACKLOG = 2048


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
