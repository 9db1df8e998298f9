"""Pages of a list: the parameters limit, order and after of a request."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from starlette.requests import Request

from octavo.errors import RequestError
from octavo.server.errors import show

T = TypeVar("T")


def page_of(
    request: Request, items: Sequence[T], id_of: Callable[[T], str], default: int, most: int
) -> tuple[Sequence[T], bool]:
    """Return the items that a request lists, and True if more follow.

    Args:
        request: has the parameters order (desc, asc), after (an id) and limit.
        items: all items, the oldest first.
        id_of: returns the id of an item.
        default: limit if the request has none.
        most: largest limit.

    Raises:
        RequestError: a parameter is wrong.
    """
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("desc", "asc"):
        raise RequestError(f"order={show(order)} is not allowed; use desc or asc.", "order")
    limit = query.get("limit", str(default))
    if not re.fullmatch(r"[0-9]{1,9}", limit) or not 1 <= int(limit) <= most:
        raise RequestError(f"limit={show(limit)} is not allowed; give 1 to {most}.", "limit")
    if order == "desc":
        items = items[::-1]
    begin, after = 0, query.get("after")
    if after is not None:
        begin = 1 + next((i for i, item in enumerate(items) if id_of(item) == after), -1)
        if begin == 0:
            raise RequestError(f"after={show(after)} is not the id of an item here.", "after")
    end = begin + int(limit)
    return items[begin:end], end < len(items)
