"""Web page at /, and its files under /ui/.

The page is static: it holds no data, and everything that it shows comes from the API with the
visitor's key. So the page itself needs no key.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import NotFoundError
from octavo.server.errors import show
from octavo.server.http_state import http_state_of

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

PREFIX = "/ui/"
_FOLDER = Path(__file__).parent / "static"
_STYLE_LINK = b'<link rel="stylesheet" href="ui/style.css">'
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'sha256-%s'; "
    "connect-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Browsers keep the files and ask whether they changed.
    "Cache-Control": "no-cache",
    "Vary": "Accept",
}
"""Headers of the page and its files: the browser runs scripts of this server only, and none that
are part of a text. The only styles are those with the hash of style.css."""


class StaticFile(NamedTuple):
    """A file of the page."""

    content: bytes
    media_type: str
    etag: str


@cache
def static_files() -> Mapping[str, StaticFile]:
    """Return the files of the page by name; the first call reads them.

    The styles are a part of the page, since it is not painted without them.
    """
    contents = {path.name: path.read_bytes() for path in sorted(_FOLDER.iterdir())}
    style = b"<style>%b</style>" % contents.pop("style.css")
    contents["index.html"] = contents["index.html"].replace(_STYLE_LINK, style)
    found = {}
    for name, content in contents.items():
        etag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
        found[name] = StaticFile(content, _TYPES[Path(name).suffix], etag)
    return found


@cache
def headers() -> Mapping[str, str]:
    """Return the headers of the page and its files."""
    digest = hashlib.sha256((_FOLDER / "style.css").read_bytes()).digest()
    policy = _HEADERS["Content-Security-Policy"] % base64.b64encode(digest).decode()
    return {**_HEADERS, "Content-Security-Policy": policy}


def is_page(method: str, path: str, accept: str | None) -> bool:
    """Return True if a request asks for the page or one of its files.

    A browser that opens an address accepts HTML, unlike programs and Ollama's clients.

    Args:
        method: the method.
        path: the path without the one at the proxy.
        accept: the header Accept.
    """
    if method != "GET":
        return False
    return path.startswith(PREFIX) or (path == "/" and "text/html" in (accept or ""))


def or_page(endpoint: Endpoint) -> Endpoint:
    """Make an endpoint return the page to browsers."""

    @functools.wraps(endpoint)
    async def answer(request: Request) -> Response:
        is_on = http_state_of(request).config.ui
        if is_on and is_page(request.method, "/", request.headers.get("accept")):
            return _respond(request, static_files()["index.html"])
        response = await endpoint(request)
        response.headers["Vary"] = "Accept"
        return response

    return answer


async def get_file(request: Request) -> Response:
    """Return a file of the page."""
    name = request.path_params["name"]
    file = static_files().get(name)
    if file is None:
        raise NotFoundError(f"The page has no file {show(name)}.", "name")
    return _respond(request, file)


def _respond(request: Request, file: StaticFile) -> Response:
    sent = {**headers(), "ETag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=sent)
    return Response(file.content, headers=sent, media_type=file.media_type)
