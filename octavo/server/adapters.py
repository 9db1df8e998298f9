"""Routes that change the adapters: POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.server import answers
from octavo.server.admin import check_admin
from octavo.server.body import read_model
from octavo.server.errors import RouteError
from octavo.server.model_list import adapter_card
from octavo.server.schema import LoadAdapterBody, UnloadAdapterBody
from octavo.server.state import ServerState, state_of

NO_CHANGES = (
    "Adapters cannot be loaded or unloaded; start the server with --enable-lora and "
    "--lora-root DIR, --lora-hub-repos or --lora-resolvers."
)
"""Message of the error for a server whose adapters do not change."""


async def load_lora_adapter(request: Request) -> Response:
    """Check an adapter and offer it as a model; 404 if the settings allow no changes."""
    state = _check(request)
    body = await read_model(request, LoadAdapterBody, state.config.max_request_bytes)
    body.check()
    await state.get_engine()
    adapter = await state.adapters.load(
        body.lora_name,
        body.lora_path,
        draft_path=body.draft_path,
        model_name=body.base_model_name,
        load_inplace=body.load_inplace,
    )
    return answers.respond(adapter_card(state, adapter))


async def unload_lora_adapter(request: Request) -> Response:
    """Stop offering an adapter; its unfinished requests continue."""
    state = _check(request)
    body = await read_model(request, UnloadAdapterBody, state.config.max_request_bytes)
    state.adapters.unload(body.lora_name)
    return answers.respond(answers.AdapterUnloaded(id=body.lora_name, object="model", deleted=True))


def _check(request: Request) -> ServerState:
    """Return the state of a server whose adapters the client may change.

    Raises:
        AdminError: the request has no admin key, and --enable-admin is off.
        RouteError: adapters cannot be changed.
    """
    check_admin(request)
    state = state_of(request)
    lora = state.engine_config.lora
    if not lora.can_change:
        raise RouteError(404, NO_CHANGES)
    return state
