"""Who may ask: API keys and Host headers; whose cached blocks and tokens a request shares."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterable

from octavo.config import ServerConfig
from octavo.errors import ConfigError
from octavo.server.errors import AuthenticationError, HostError, show

# Probes, scrapers and a browser that reads the documentation carry no key.
OPEN_PATHS = frozenset(
    ["/health", "/ping", "/ready", "/load", "/version", "/metrics", "/docs", "/openapi.json"]
)


class ApiKeys:
    """The accepted API keys; with none, everybody may ask.

    Raises:
        ConfigError: a key is empty, as an unset shell variable would make it.
    """

    def __init__(self, keys: list[str]) -> None:
        if not all(key.strip() for key in keys):
            raise ConfigError("api_key is empty, which anyone could guess; give a real key.")
        self._digests = [(hashlib.sha256(key.encode()).digest(), key) for key in keys]

    def __len__(self) -> int:
        """How many there are; a key that was given twice is one."""
        return len({digest for digest, _ in self._digests})

    def check(self, authorization: bytes | None) -> str | None:
        """Returns the key that an Authorization header carries; None if no keys are in use.

        Takes the same time for every wrong key: digests are compared, all of them, in constant
        time.

        Raises:
            AuthenticationError: the header is missing, malformed, or carries an unknown key.
        """
        if not self._digests:
            return None
        if authorization is None:
            raise AuthenticationError(
                "No API key was sent; send one in the header `Authorization: Bearer KEY`."
            )
        scheme, _, given = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            raise AuthenticationError(
                "The Authorization header is not of the form `Authorization: Bearer KEY`."
            )
        digest = hashlib.sha256(given.strip()).digest()
        found: str | None = None
        for known, key in self._digests:
            if hmac.compare_digest(known, digest):
                found = key
        if found is None:
            raise AuthenticationError("The API key is not one that this server accepts.")
        return found


class AllowedHosts:
    """The names in the Host header that are answered.

    A web page can have its own name point at the visitor's machine ("DNS rebinding") and would then
    read what a server there answers; the Host header still holds the page's name. Where
    `allowed_hosts` is not set, a server on a loopback address therefore answers to the names of
    that address only, any other one to all.
    """

    def __init__(self, config: ServerConfig) -> None:
        names = config.allowed_hosts
        # No web page reaches a Unix socket.
        if not names and config.uds is None and _is_loopback(config.host):
            names = ["localhost", "127.0.0.1", "::1", config.host]
        self._names = frozenset(_bare_host(name) for name in names)
        self._all = not names or "*" in names

    def check(self, hosts: Iterable[str]) -> None:
        """Checks the Host headers of a request; browsers always send one.

        Raises:
            HostError: one is not allowed.
        """
        if self._all:
            return
        for host in hosts:
            if _bare_host(host) not in self._names:
                raise HostError(
                    f"This server does not answer to the host {show(host)}; if it should, start it "
                    "with --allowed-hosts and that name, or * for all."
                )


def _is_loopback(host: str) -> bool:
    """Whether a server on this address can be reached from its own machine only."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # whoever listens there will say so
        return False
    return all(ipaddress.ip_address(address[4][0]).is_loopback for address in found)


def _bare_host(host: str) -> str:
    """A host without port, brackets, capitals and a last dot."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, _ = host.partition(":")
    # Several colons: an IPv6 address without brackets, as --allowed-hosts and --host take it.
    return host if ":" in host[len(name) + 1 :] else (name if colon else host).rstrip(".")


def tenant_of(api_key: str | None) -> str | None:
    """Whose share a request takes, of tokens and of room; it does not betray the key."""
    if api_key is None:
        return None
    return hmac.new(api_key.encode(), b"tenant", hashlib.sha256).hexdigest()


def private_salt(api_key: str | None, cache_salt: str | None) -> str | None:
    """The scope in which a request may share cached prefixes.

    Where keys are in use, each key is a scope of its own (whatever salt the client adds), so that
    no client can find out from timings what another one asked.
    """
    if api_key is None:
        return cache_salt
    salt = b"" if cache_salt is None else b"+" + cache_salt.encode()
    return hmac.new(api_key.encode(), salt, hashlib.sha256).hexdigest()
