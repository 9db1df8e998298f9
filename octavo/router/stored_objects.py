"""Stored responses and conversations that the requests of a router's clients name.

An object stays at the server that made it. The router remembers the servers of the latest objects
(`Homes`); for another object it asks all servers.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

import msgspec

from octavo.errors import NotFoundError, RequestError
from octavo.server.errors import show
from octavo.server.response_items import MAX_REFERENCED, owner_of, too_many_owners

CREATING = frozenset(["/v1/responses", "/v1/conversations"])
"""Paths of requests whose answer is a new object."""
NOT_FOUND_CODES = frozenset(["previous_response_not_found", "item_not_found", "not_found"])
"""Codes of errors about an object that the server does not have."""
_PATH = re.compile(r"/v1/(?:responses|conversations)/(?!input_tokens$)([^/]+)")


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
