"""Access control by API keys and Host headers; scopes of the prefix cache and of fairness."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import socket
import stat
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from octavo.config import (
    ADMIN_KEY_VARIABLE,
    ServerConfig,
    admin_keys_from_environment,
    api_keys_from_environment,
)
from octavo.errors import ConfigError
from octavo.server.errors import AuthenticationError, HostError, show

logger = logging.getLogger(__name__)

_NUM_FLOWS = 64
# Probes, scrapers and a browser that reads the documentation send no key.
OPEN_PATHS = frozenset(
    ["/health", "/ping", "/ready", "/load", "/version", "/metrics", "/docs", "/openapi.json"]
)


def with_all_keys(config: ServerConfig) -> tuple[ServerConfig, list[str]]:
    """Add the keys of the environment and of the key file to the settings.

    Returns:
        The settings, and the sources of its API keys.

    Raises:
        ConfigError: the file cannot be read or has no key, or the operator is not identifiable.
    """
    found = {"--api-key": config.api_key}
    if config.api_key_file is not None:
        found["--api-key-file"] = _read_keys(config.api_key_file)
    found |= {name: [key] for name, key in api_keys_from_environment().items()}
    keys = [key for group in found.values() for key in group]
    admin_keys = config.admin_key + admin_keys_from_environment()
    if set(keys) & set(admin_keys):
        raise ConfigError(
            f"A key of admin_key (or {ADMIN_KEY_VARIABLE}) is an API key as well, so that every"
            " client with that key could administer the server; give another one."
        )
    if config.enable_admin and admin_keys:
        raise ConfigError(
            f"enable_admin lets every client administer the server, admin_key (or"
            f" {ADMIN_KEY_VARIABLE}) only the operator; give one of them."
        )
    if config.enable_admin and len(set(keys)) > 1:
        raise ConfigError(
            "enable_admin would let each of several API keys administer the server for all others;"
            f" give admin_key (or {ADMIN_KEY_VARIABLE}) instead."
        )
    full = msgspec.structs.replace(config, api_key=keys, admin_key=admin_keys, api_key_file=None)
    return full, [source for source, group in found.items() if group]


def _read_keys(path: str) -> list[str]:
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
        mode = file.stat().st_mode
    except OSError as error:
        raise ConfigError(f"api_key_file={path!r} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"api_key_file={path!r} is not UTF-8 text.") from None
    if mode & stat.S_IRWXO:
        logger.warning("%s can be read by all users; restrict it by `chmod 600`", path)
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise ConfigError(f"api_key_file={path!r} has no key; write one on each line.")
    return keys


class ApiKeys:
    """Set of accepted keys; without API keys, all clients may use the API.

    Args:
        keys: API keys.
        admin_keys: keys of the operator, which are API keys as well.

    Raises:
        ConfigError: a key is empty, as from an unset shell variable.
    """

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        for name, given in (("api_key", keys), ("admin_key", admin_keys)):
            if not all(key.strip() for key in given):
                raise ConfigError(f"{name} is empty, which anyone could guess; give a real key.")
        self.has_admin = bool(admin_keys)
        """True if the operator has a key."""
        self._open = not keys
        self._digests = [
            (hashlib.sha256(key.encode()).digest(), key, is_admin)
            for given, is_admin in ((keys, False), (admin_keys, True))
            for key in given
        ]

    def __len__(self) -> int:
        """Return the number of different keys."""
        return len({digest for digest, _, _ in self._digests})

    def check(self, authorization: bytes | None) -> tuple[str | None, bool]:
        """Check an Authorization header.

        Every wrong key takes the same time: all digests are compared in constant time.

        Returns:
            The known key in the header, or None if it has none and needs none; and True if the key
            is the operator's.

        Raises:
            AuthenticationError: the header is missing, malformed, or has an unknown key.
        """
        try:
            return self._find(authorization)
        except AuthenticationError:
            if self._open:
                return None, False
            raise

    def _find(self, authorization: bytes | None) -> tuple[str, bool]:
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
        found: tuple[str, bool] | None = None
        for known, key, is_admin in self._digests:
            if hmac.compare_digest(known, digest):
                found = key, is_admin
        if found is None:
            raise AuthenticationError("The API key is not one that this server accepts.")
        return found


class AllowedHosts:
    """Set of the names in the Host header that the server answers.

    A web page can point its name at the visitor's machine ("DNS rebinding") and would then read the
    answers of a server there; but the Host header still has the page's name. So without
    `allowed_hosts`, a server on a loopback address answers only to the names of that address. A
    server that listens on a name answers to that name and its addresses. A server on another
    address answers to all names.
    """

    def __init__(self, config: ServerConfig) -> None:
        names = config.allowed_hosts
        if not names and config.uds is None:  # no web page reaches a Unix socket
            names = _own_names(config.host)
        self._names = frozenset(_bare_host(name) for name in names)
        self.all_names = not names or "*" in names
        """True if all names are answered."""

    def check(self, hosts: Iterable[str]) -> None:
        """Check the Host headers of a request; browsers always send one.

        Raises:
            HostError: a host is not allowed.
        """
        if self.all_names:
            return
        for host in hosts:
            if _bare_host(host) not in self._names:
                raise HostError(
                    f"This server does not answer to the host {show(host)}; if it should, start it "
                    "with --allowed-hosts and that name, or * for all."
                )


def _own_names(host: str) -> list[str]:
    """Return the names of a server that listens on a host; an empty list if they are unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # listening fails later, with the reason
        return []
    addresses = [str(address[4][0]) for address in found]
    if all(ipaddress.ip_address(address).is_loopback for address in addresses):
        return ["localhost", "127.0.0.1", "::1", host]
    return [] if host in addresses else [host, *addresses]


def _bare_host(host: str) -> str:
    """Return a host without port, brackets, capitals and trailing dot."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, _ = host.partition(":")
    # Several colons: an IPv6 address without brackets, which --allowed-hosts and --host accept.
    return host if ":" in host[len(name) + 1 :] else (name if colon else host).rstrip(".")


def tenant_of(api_key: str | None) -> str | None:
    """Return the tenant of an API key, which owns tokens and memory; it does not reveal the key."""
    if api_key is None:
        return None
    return hmac.new(api_key.encode(), b"tenant", hashlib.sha256).hexdigest()


def flow_of(address: str | None) -> int | None:
    """Return the class of a client's address; classes share tokens fairly if there are no tenants.

    The number of classes is small (McKenney, "Stochastic Fairness Queueing", 1990), so that many
    addresses cannot slow the scheduler down.
    """
    return None if address is None else zlib.crc32(address.encode()) % _NUM_FLOWS


def private_salt(api_key: str | None, cache_salt: str | None) -> str | None:
    """Return the scope in which a request may share cached prefixes.

    With API keys, each key has a separate scope (whatever salt the client adds), so that no client
    can learn another one's prompts from timings.
    """
    if api_key is None:
        return cache_salt
    salt = b"" if cache_salt is None else b"+" + cache_salt.encode()
    return hmac.new(api_key.encode(), salt, hashlib.sha256).hexdigest()
