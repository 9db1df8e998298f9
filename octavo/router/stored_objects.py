"""Servers that store the responses and conversations of a router's clients.

An object stays at the server that made it. The router remembers the servers of the latest objects;
for another object it asks all servers.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any
from urllib.parse import unquote

import msgspec

from octavo.errors import NotFoundError, RequestError
from octavo.router.pool import Upstream
from octavo.server.errors import show
from octavo.server.response_items import MAX_REFERENCED, owner_of, too_many_owners

CREATING = frozenset(["/v1/responses", "/v1/conversations"])
"""Paths of requests whose answer is a new object."""
NOT_FOUND_CODES = frozenset(["previous_response_not_found", "item_not_found", "not_found"])
"""Codes of errors about an object that the server does not have."""
MAX_OBJECTS = 2**16
"""Maximum number of remembered objects: some 20 MB."""
_PATH = re.compile(r"/v1/(?:responses|conversations)/(?!input_tokens$)([^/]+)")


class StoredObjects:
    """Record of the servers of objects, for each API key.

    Beyond its bound, the oldest object of the key with most objects is dropped.
    """

    def __init__(self) -> None:
        self._homes: dict[str | None, OrderedDict[str, Upstream]] = {}
        self._size = 0

    def note(self, api_key: str | None, name: str, upstream: Upstream) -> None:
        """Remember the server of an object.

        Args:
            api_key: key of the client to which it belongs.
            name: id of the response or conversation.
            upstream: the server.
        """
        homes = self._homes.setdefault(api_key, OrderedDict())
        self._size += name not in homes
        homes[name] = upstream
        homes.move_to_end(name)
        if self._size > MAX_OBJECTS:
            max(self._homes.values(), key=len).popitem(last=False)
            self._size -= 1

    def find(self, api_key: str | None, name: str) -> Upstream | None:
        """Return the server of an object; None if it is unknown for this key."""
        homes = self._homes.get(api_key)
        return None if homes is None else homes.get(name)


def named_objects(path: str, fields: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the ids of the objects that a request names; of an item, the two that are possible.

    Args:
        path: path without the query; parts of it may be percent-encoded.
        fields: the body, or {}.

    Raises:
        RequestError: it refers to items of too many objects.
    """
    # As the server reads it.
    if (found := _PATH.match(unquote(path))) is not None:
        return [(found[1],)]
    names: list[object] = [fields.get("previous_response_id")]
    conversation = fields.get("conversation")
    names.append(conversation.get("id") if isinstance(conversation, dict) else conversation)
    given = [(name,) for name in names if isinstance(name, str)]
    items = fields.get("input")
    owners = dict.fromkeys(
        owner
        for item in (items if isinstance(items, list) else ())
        if isinstance(item, dict) and item.get("type") == "item_reference"
        if isinstance(item.get("id"), str) and (owner := owner_of(item["id"])) is not None
    )
    if len(owners) > MAX_REFERENCED:
        raise too_many_owners()
    return [*given, *((f"resp_{owner}", f"conv_{owner}") for owner in owners)]


def unknown_object(name: str, *, in_path: bool) -> RequestError:
    """Return the error for an object that is not known for the client's key.

    Args:
        name: id of the object.
        in_path: the path names it; otherwise a field of the body.
    """
    what = f"{show(name)} not found: it was never stored for this API key, or the router forgot it"
    if in_path:
        return NotFoundError(f"{what}.", None, "not_found")
    return RequestError(
        f"{what}; send the whole input instead.",
        "previous_response_id",
        "previous_response_not_found",
    )


def id_of(data: bytes) -> str | None:
    """Return the id of the object in an answer, or in the first event of a stream."""
    try:
        answer = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError):
        return None
    if isinstance(answer, dict) and isinstance(answer.get("response"), dict):
        answer = answer["response"]
    name = answer.get("id") if isinstance(answer, dict) else None
    return name if isinstance(name, str) else None
