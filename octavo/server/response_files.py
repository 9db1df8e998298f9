"""Pictures of the Responses API that are files of POST /v1/files."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Sequence
from typing import Protocol

from starlette.requests import Request

from octavo.errors import NotFoundError, RequestError, UnsupportedError
from octavo.media.fetch import MAX_NBYTES
from octavo.server.auth import tenant_of
from octavo.server.errors import show
from octavo.server.file_store import FileStore, StorageError
from octavo.server.middleware import context_of
from octavo.server.response_items import Item
from octavo.server.state import state_of


class StoredFiles(Protocol):
    """Files of a server, which its batches share."""

    async def open(self) -> None:
        """Read the stored files; only once.

        Raises:
            RequestError: this server has no files.
        """

    @property
    def files(self) -> FileStore:
        """The files, after `open`."""


async def with_files(request: Request, items: Sequence[Item]) -> list[Item]:
    """Return items with the contents of the files that their pictures name, as data: URLs.

    The contents count as the request's body.

    Raises:
        NotFoundError: the client's key has no such file.
        RequestError: the files are too large, or the server keeps no files.
        UnsupportedError: the request is of a batch that no server runs.
    """
    names = {part["file_id"] for item in items for part in _pictures(item)}
    if not names:
        return list(items)
    state, context = state_of(request), context_of(request)
    batches: StoredFiles | None = request.app.state.batches
    if batches is None:
        raise UnsupportedError(
            "input has a picture with a file_id, and `octavo run-batch` keeps no files; send "
            "image_url, with data:.",
            "input",
        )
    await batches.open()
    store = batches.files
    owner = tenant_of(context.api_key)
    urls, total = {}, 0
    for name in sorted(names):
        try:
            nbytes = store.find(owner, name, "input").bytes
        except NotFoundError as error:  # a server of several models has no routes of files
            raise NotFoundError(
                f"There is no file {show(name)} of this API key; send the picture as image_url, "
                "with data:.",
                "input",
                error.code,
            ) from None
        total += nbytes
        if nbytes > MAX_NBYTES or total > state.max_chat_bytes:
            raise RequestError(
                f"The files of the pictures have more than {min(MAX_NBYTES, state.max_chat_bytes)} "
                "bytes (--max-media-request-bytes); send smaller ones.",
                "input",
                "request_too_large",
            )
        context.body_bytes += nbytes
        state.body_bytes += nbytes
        state.check_bodies(total)
        urls[name] = await asyncio.to_thread(_read, store, name)
    return [_filled(item, urls) for item in items]


def _read(store: FileStore, name: str) -> str:
    try:
        data = store.path(name).read_bytes()
    except OSError as error:
        raise StorageError(error) from None
    return "data:;base64," + base64.b64encode(data).decode()


def _pictures(item: Item) -> Iterator[Item]:
    for field in ("content", "output"):
        parts = item.get(field)
        if isinstance(parts, list):
            yield from (part for part in parts if isinstance(part, dict) and part.get("file_id"))


def _filled(item: Item, urls: dict[str, str]) -> Item:
    if next(_pictures(item), None) is None:
        return item
    field = "content" if isinstance(item.get("content"), list) else "output"
    parts = [
        {"type": "input_image", "detail": part["detail"], "image_url": urls[part["file_id"]]}
        if part.get("file_id")
        else part
        for part in item[field]
    ]
    return {**item, field: parts}
