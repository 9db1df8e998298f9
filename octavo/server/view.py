"""Route of the live view of the engines; see `view_hub.py`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.config import ServerConfig
from octavo.server.errors import RouteError
from octavo.server.generation import EventStream
from octavo.server.middleware import context_of
from octavo.server.state import state_of


def check_view(config: ServerConfig) -> None:
    """Raise `RouteError` if the view is off."""
    if not config.ui:
        raise RouteError(404, "The engine view is off; start the server without --no-ui.")


async def get_view(request: Request) -> Response:
    """Stream the live view of the engines as server-sent events.

    With several API keys, only the requests of the sent key have ids and sizes; an admin key sees
    all.
    """
    state, context = state_of(request), context_of(request)
    check_view(state.config)
    engine = await state.get_engine()
    sees_all = context.is_admin or len(state.api_keys) < 2
    events = state.view.watch(engine, state.tenant(context.api_key), sees_all=sees_all)
    return EventStream(state, events, None, last=b"")
