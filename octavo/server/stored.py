"""Stored responses and conversations, in the form in which `ObjectStore` keeps them."""

from __future__ import annotations

import uuid
import zlib
from operator import itemgetter
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import NotFoundError, RequestError
from octavo.server import answers, response_answers
from octavo.server.errors import show
from octavo.server.middleware import context_of
from octavo.server.object_store import OBJECT_ID, ObjectStore
from octavo.server.pages import page_of
from octavo.server.response_items import Item
from octavo.server.state import ServerState, state_of
from octavo.system.offload import offload

_PAGE = 20
_MAX_PAGE = 100
# Microseconds that packing or unpacking may take, which is too long for the event loop.
_LONG = 5_000


class StoredResponse(msgspec.Struct):
    """Response, and what it was made from."""

    response: dict[str, Any]
    """Response as the API returns it."""
    items: list[Item]
    """All input items, those of earlier responses included."""
    events: str | None = None
    """Events of a background response."""


class StoredConversation(msgspec.Struct):
    """Conversation, with its items."""

    created_at: int
    metadata: dict[str, str]
    items: list[Item]
    num_created: int = 0
    """Number of items that clients have ever added, without those of responses."""


Stored = TypeVar("Stored", StoredResponse, StoredConversation)


def new_id(prefix: str) -> str:
    """Return an id that no client can guess."""
    return f"{prefix}_{uuid.uuid4().hex}"


def has_store(state: ServerState) -> bool:
    """Return True if a server can store objects; several front ends cannot share them."""
    return state.config.api_server_count == 1


def store_of(state: ServerState, what: str, param: str | None = None) -> ObjectStore:
    """Return the store of a server.

    Args:
        state: the server.
        what: the part of the request that needs the store.
        param: its field.

    Raises:
        RequestError: the server cannot store objects.
    """
    if not has_store(state):
        raise RequestError(
            f"{what} needs stored objects, and this server's "
            f"{state.config.api_server_count} front ends (--api-server-count) share none; send the "
            "whole input with each request, or start the server with one front end.",
            param,
            "no_store",
        )
    return state.objects


def items_nbytes(items: list[Item]) -> int:
    """Return the bytes of items as JSON; references may repeat one, which is encoded once."""
    sizes: dict[int, int] = {}
    for item in items:
        if id(item) not in sizes:
            sizes[id(item)] = len(msgspec.json.encode(item)) + 1
    return sum(sizes[id(item)] for item in items)


async def save(
    store: ObjectStore, api_key: str | None, name: str, stored: StoredResponse | StoredConversation
) -> None:
    """Store an object."""

    def pack() -> bytes:
        return zlib.compress(msgspec.json.encode(stored), 1)

    await store.put(api_key, name, await offload(_LONG, pack))


async def load_for(request: Request, name: str, kind: type[Stored]) -> Stored | None:
    """Return an object; None: the request's key has no object of this name.

    Until the request ends, the bytes of the object count among those of bodies: a short request
    may name long objects.

    Raises:
        QueueFullError: the bodies in flight exceed their limit.
    """
    state, context = state_of(request), context_of(request)
    found = await _load(state.objects, context.api_key, name, kind)
    if found is None:
        return None
    stored, nbytes = found
    context.body_bytes += nbytes
    state.body_bytes += nbytes
    state.check_bodies(nbytes)
    return stored


async def load(
    store: ObjectStore, api_key: str | None, name: str, kind: type[Stored]
) -> Stored | None:
    """Return an object; None: the key has no object of this name."""
    found = await _load(store, api_key, name, kind)
    return None if found is None else found[0]


async def _load(
    store: ObjectStore, api_key: str | None, name: str, kind: type[Stored]
) -> tuple[Stored, int] | None:
    """Return an object and its bytes as JSON."""
    if not OBJECT_ID.fullmatch(name) or name.partition("_")[0] != _PREFIXES[kind]:
        return None
    packed = await store.get(api_key, name)
    if packed is None:
        return None

    def unpack() -> tuple[Stored, int]:
        data = zlib.decompress(packed)
        return msgspec.json.decode(data, type=kind), len(data)

    return await offload(_LONG, unpack)


_PREFIXES: dict[type[Any], str] = {StoredResponse: "resp", StoredConversation: "conv"}


def not_found(kind: str, name: str) -> NotFoundError:
    """Return the error for an object that is not stored."""
    return NotFoundError(
        f"{kind} with id {show(name)} not found: it was never stored for this API key, was "
        "deleted, or its memory was needed.",
        None,
        "not_found",
    )


def item_list(request: Request, items: list[Item]) -> Response:
    """Return the page of a list of items that a request names by limit, order and after.

    Raises:
        RequestError: a parameter is not allowed.
    """
    page, more = page_of(request, items, itemgetter("id"), _PAGE, _MAX_PAGE)
    return answers.respond(
        response_answers.ItemList(
            object="list",
            data=list(page),
            first_id=page[0]["id"] if page else "",
            last_id=page[-1]["id"] if page else "",
            has_more=more,
        )
    )
