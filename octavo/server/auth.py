"""API keys: who may ask, and whose prefix-cache blocks a request may share."""

from __future__ import annotations

import hashlib
import hmac

from octavo.errors import ConfigError
from octavo.server.errors import AuthenticationError

# Probes, scrapers and a browser that reads the documentation carry no key.
OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics", "/docs", "/openapi.json"})


class ApiKeys:
    """The accepted API keys; with none, everybody may ask.

    Raises:
        ConfigError: a key is empty, as an unset shell variable would make it.
    """

    def __init__(self, keys: list[str]) -> None:
        if not all(key.strip() for key in keys):
            raise ConfigError("api_key is empty: everybody could guess it. Give a real key.")
        self._digests = [(hashlib.sha256(key.encode()).digest(), key) for key in keys]

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
                "No API key was given; send it in the header `Authorization: Bearer KEY`."
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


def private_salt(api_key: str | None, cache_salt: str | None) -> str | None:
    """The scope in which a request may share cached prefixes.

    Where keys are in use, each key is a scope of its own (whatever salt the client adds), so that
    no client can find out from timings what another one asked.
    """
    if api_key is None:
        return cache_salt
    salt = b"" if cache_salt is None else b"+" + cache_salt.encode()
    return hmac.new(api_key.encode(), salt, hashlib.sha256).hexdigest()
