"""Reading of media that a request names by URL: `data:`, `http:`, `https:` and `file:`.

A server that fetches what strangers name is a tool for them to reach its own network. So:

- The server connects only to hosts of `allowed_media_domains`, at addresses of the public internet.
  The check is made on the addresses that are connected to, since this module resolves the host of
  each connection itself. A name server that answers differently each time gains nothing.
- Each redirect is a new request, with all checks.
- Only files below `allowed_local_media_path` are read, after symbolic links have been resolved.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from octavo.errors import RequestError, UnsupportedError
from octavo.system.offload import offload

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.abc import AbstractResolver

Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]
"""Function that returns the addresses of a host and port."""

MAX_NBYTES = 2**25
"""Maximum bytes of one file."""
MAX_SECONDS = 10.0
"""Maximum time of one fetch, redirects included."""
MAX_REDIRECTS = 5
_MAX_URL_CHARS = 8192
_MAX_HOST_CHARS = 253  # of names in DNS
# Before the comma of a data: URL.
_MAX_HEAD_CHARS = 256
_ODD = re.compile(r"^\s|\s$|[\x00-\x1f\x7f\\]")
_PIECE = 2**16
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# IPv4 as seen from a network with IPv6 only.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Networks that Python's `is_global` counts as public, in some of its versions: protocol
# assignments, relays of 6to4, the host of a machine in Azure, documentation, and site-local
# addresses.
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "3fff::/20", "fec0::/10"),
    )
)


def is_public(address: str) -> bool:
    """Return True if an IP address belongs to the public internet.

    It is False for private, shared, loopback, link-local (which has the metadata services of
    clouds), reserved and multicast addresses, also inside of IPv6 addresses that stand for them.
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        tunneled = (found.sixtofour, *(found.teredo or ()))
        if any(one is not None and not is_public(str(one)) for one in tunneled):
            return False
    if found.is_multicast or found.is_reserved or any(found in network for network in _NOT_PUBLIC):
        return False
    return found.is_global


async def resolve(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host, as the system resolves it.

    Raises:
        OSError: it has none.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class MediaFetcher:
    """Reader of media by URL.

    Args:
        allowed_media_domains: hosts to which the server may connect; empty: none.
        allowed_local_media_path: folder of readable files; empty: none.
        resolver: returns the addresses of a host and port.
        is_allowed: tells whether an address may be connected to.
    """

    def __init__(
        self,
        allowed_media_domains: Sequence[str] = (),
        allowed_local_media_path: str = "",
        *,
        resolver: Resolve = resolve,
        is_allowed: Callable[[str], bool] = is_public,
    ) -> None:
        self._domains = {domain.lower().rstrip(".") for domain in allowed_media_domains}
        folder = allowed_local_media_path
        self._folder = Path(folder).expanduser().resolve() if folder else None
        self._resolver, self._is_allowed = resolver, is_allowed

    async def fetch(self, url: str, param: str) -> bytes:
        """Return the bytes that a URL names.

        Args:
            url: `data:` with base64, `http:`, `https:`, or `file:`.
            param: field of the request, for errors.

        Raises:
            RequestError: the URL is wrong or not allowed, or its file cannot be had within the
                limits. The message names its host, never the whole URL, which may have secrets.
        """
        if url[:5].lower() == "data:":
            return await offload(len(url) // 1000, read_data_url, url, param)
        parts = _split(url, param)
        if parts.scheme == "file":
            return await offload(10_000, self._read_file, parts, param)
        try:
            async with asyncio.timeout(MAX_SECONDS):
                return await self._fetch(url, parts, param)
        except TimeoutError:
            raise RequestError(
                f"{param}: {parts.hostname} did not send the file within {MAX_SECONDS:g} s.", param
            ) from None

    async def _fetch(self, url: str, parts: SplitResult, param: str) -> bytes:
        import aiohttp  # most servers fetch nothing

        for _ in range(MAX_REDIRECTS + 1):
            host = self._check_host(parts, param)
            try:
                async with (
                    self._open() as client,
                    client.get(url, allow_redirects=False) as response,
                ):
                    if response.status in _REDIRECTS and "Location" in response.headers:
                        url = _redirected(url, response.headers["Location"], host, param)
                    elif response.status == 200:
                        return await _read(response, host, param)
                    else:
                        raise RequestError(
                            f"{param}: {host} answers with the HTTP status {response.status}.",
                            param,
                        )
            except _ForbiddenAddressError as error:
                raise _forbidden(host, error.address, param) from None
            except (aiohttp.ClientError, OSError) as error:
                raise RequestError(
                    f"{param}: {host} cannot be reached ({_reason(error)}).", param
                ) from None
            parts = _split(url, param)
            if parts.scheme not in ("http", "https"):
                raise RequestError(
                    f"{param}: {host} redirects to a URL of the kind {parts.scheme}:, which is not "
                    "followed.",
                    param,
                )
        raise RequestError(f"{param}: {host} redirects more than {MAX_REDIRECTS} times.", param)

    def _check_host(self, parts: SplitResult, param: str) -> str:
        """Return the host of a URL if the server may connect to it."""
        host = (parts.hostname or "").lower().rstrip(".")
        if not host or parts.username is not None or parts.password is not None:
            raise RequestError(
                f"{param}: the URL has no host, or has a user name before it; leave that out.",
                param,
            )
        # aiohttp asks no resolver for addresses, and older versions of it for no number either,
        # which the system reads as an address: 127.1, 2130706433.
        if _is_number(host) and not self._is_allowed(host):
            raise _forbidden(host, host, param)
        if host not in self._domains:
            if len(host) > _MAX_HOST_CHARS:
                raise RequestError(
                    f"{param}: the host of the URL has more than {_MAX_HOST_CHARS} characters.",
                    param,
                )
            raise RequestError(
                f"{param}: the host {host} is not allowed; start the server with "
                f"--allowed-media-domains {host}, or send the file as a data: URL.",
                param,
            )
        return host

    def _open(self) -> aiohttp.ClientSession:
        """Return a client for one request, which resolves and checks its own connection."""
        import aiohttp

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=_make_resolver(self._resolver, self._is_allowed)
            ),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,  # a proxy would resolve names itself
        )

    def _read_file(self, parts: SplitResult, param: str) -> bytes:
        if self._folder is None:
            raise RequestError(
                f"{param}: files of the server are not allowed; start it with "
                "--allowed-local-media-path FOLDER, or send the file as a data: URL.",
                param,
            )
        if parts.netloc not in ("", "localhost"):
            raise RequestError(
                f"{param}: a file: URL has no host; {parts.hostname} is not this machine.", param
            )
        try:
            path = Path(unquote(parts.path)).resolve()
            if not path.is_relative_to(self._folder):
                raise RequestError(
                    f"{param}: the file is not below the folder of --allowed-local-media-path.",
                    param,
                )
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise RequestError(f"{param}: the path is no file.", param)
                data = file.read(MAX_NBYTES + 1)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle
            if isinstance(error, RequestError):
                raise
            raise RequestError(
                f"{param}: the file cannot be read ({_reason(error)}).", param
            ) from None
        if len(data) > MAX_NBYTES:
            raise _too_large("the file", param)
        return data


def read_data_url(url: str, param: str) -> bytes:
    """Return the bytes of a `data:` URL with base64. The type in it does not count.

    Raises:
        RequestError: it is malformed, or has more than `MAX_NBYTES`.
    """
    head, comma, _ = url[:_MAX_HEAD_CHARS].partition(",")
    if not comma or "base64" not in head.lower().split(";")[1:]:
        raise RequestError(
            f"{param}: the data: URL is malformed; it is data:image/png;base64,... .", param
        )
    return read_base64(url[len(head) + 1 :], param)


def read_base64(text: str, param: str) -> bytes:
    """Return the bytes of a text in base64.

    Raises:
        RequestError: it is malformed, or has more than `MAX_NBYTES`.
    """
    if len(text) > MAX_NBYTES // 3 * 4 + 4:
        raise _too_large("the file", param)
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{param}: the base64 is malformed ({error}).", param) from None
    if not data:
        raise RequestError(f"{param}: the file is empty; send one with content.", param)
    return data


class _ForbiddenAddressError(Exception):
    """Host with an address that may not be connected to."""

    def __init__(self, address: str) -> None:
        super().__init__(f"the address {address} is not public")
        self.address = address


def _make_resolver(resolver: Resolve, is_allowed: Callable[[str], bool]) -> AbstractResolver:
    """Return a resolver for aiohttp, which connects to its addresses without asking again."""
    from aiohttp.abc import AbstractResolver, ResolveResult

    class Resolver(AbstractResolver):
        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> list[ResolveResult]:
            addresses = await resolver(host, port)
            for address in addresses:
                if not is_allowed(address):
                    raise _ForbiddenAddressError(address)
            return [
                ResolveResult(
                    hostname=host,
                    host=address,
                    port=port,
                    family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                    proto=0,
                    flags=socket.AI_NUMERICHOST,
                )
                for address in addresses
            ]

        async def close(self) -> None:
            pass

    return Resolver()


async def _read(response: aiohttp.ClientResponse, host: str, param: str) -> bytes:
    """Return the body of an answer, which may be at most `MAX_NBYTES`."""
    encoding = response.headers.get("Content-Encoding", "identity").lower()
    if encoding != "identity":
        raise UnsupportedError(f"{param}: {host} sends the file compressed ({encoding}).", param)
    if (response.content_length or 0) > MAX_NBYTES:
        raise _too_large(f"the file of {host}", param)
    data = bytearray()
    async for piece in response.content.iter_chunked(_PIECE):
        data += piece
        if len(data) > MAX_NBYTES:
            raise _too_large(f"the file of {host}", param)
    if not data:
        raise RequestError(f"{param}: the file of {host} is empty.", param)
    return bytes(data)


def _redirected(url: str, location: str, host: str, param: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise RequestError(f"{param}: {host} redirects to a malformed URL.", param) from None


def _split(url: str, param: str) -> SplitResult:
    if len(url) > _MAX_URL_CHARS:
        raise RequestError(
            f"{param}: the URL has {len(url)} characters; at most {_MAX_URL_CHARS} are allowed.",
            param,
        )
    # Parsers of URLs leave these out, or read them differently.
    if _ODD.search(url):
        raise RequestError(
            f"{param}: the URL has white space at an end, a control character or a backslash; "
            "leave it out, or write it as % and two hexadecimal digits.",
            param,
        )
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (it raises)
    except ValueError:
        raise RequestError(f"{param}: the URL is malformed.", param) from None
    if parts.scheme not in ("http", "https", "file"):
        kind = (
            f"a URL of the kind {parts.scheme[:20]!r}" if parts.scheme else "a URL without a kind"
        )
        raise RequestError(
            f"{param}: {kind} is not supported; use https:, http: or file:, or send base64 as "
            "data:;base64,... .",
            param,
        )
    return parts


def _too_large(what: str, param: str) -> RequestError:
    return RequestError(f"{param}: {what} has more than {MAX_NBYTES} bytes, the limit.", param)


def _is_number(host: str) -> bool:
    """Return True if the system reads a host as an address without asking a name server."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.replace(".", "").isdigit()
    return True


def _forbidden(host: str, address: str, param: str) -> RequestError:
    what = f"{host} has the address {address}, which"
    if host == address:
        what = f"the address {address}"
    return RequestError(
        f"{param}: {what} is not public; Octavo fetches only from public hosts. Send the file as a "
        "data: URL.",
        param,
    )


def _reason(error: Exception) -> str:
    """Return an error as a short text, without names of files."""
    text = (isinstance(error, OSError) and error.strerror) or type(error).__name__
    return str(text)[:200]
