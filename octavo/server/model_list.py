"""Served models and their tokenizer: GET /v1/models and /tokenizer_info."""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import Response

from octavo.server import answers
from octavo.server.abilities import input_modalities
from octavo.server.adapter_table import ServedAdapter
from octavo.server.errors import RouteError
from octavo.server.state import ServerState, state_of


async def list_models(request: Request) -> Response:
    """List the names under which the model is served, and its adapters."""
    state = state_of(request)
    cards = [_model_card(state, name) for name in state.model_names]
    cards += [adapter_card(state, adapter) for adapter in state.adapters]
    return answers.respond(answers.ModelList(object="list", data=cards))


async def get_model(request: Request) -> Response:
    """Return one of the served names, or an adapter."""
    state = state_of(request)
    name = request.path_params["model"]
    adapter = state.find_adapter(name)
    card = _model_card(state, name) if adapter is None else adapter_card(state, adapter)
    return answers.respond(card)


async def tokenizer_info(request: Request) -> Response:
    """Return the tokenizer's configuration; 404 without --enable-tokenizer-info-endpoint."""
    state = state_of(request)
    if not state.config.enable_tokenizer_info_endpoint:
        raise RouteError(
            404, "/tokenizer_info is off; start the server with --enable-tokenizer-info-endpoint."
        )
    tokenizer = state.tokenizer(await state.get_engine(), "tokenizer_info")
    template = await state.chat_template(tokenizer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokenizer.config,
        **tokenizer.special_tokens,
        "chat_template": template.source,
    }
    # Its integers may have more than 64 bits: model_max_length is often a substitute for infinity.
    return Response(json.dumps(config), media_type="application/json")


def adapter_card(state: ServerState, adapter: ServedAdapter) -> answers.ModelCard:
    """Return the description of an adapter, as vLLM makes it."""
    return {
        **_model_card(state, adapter.name),
        "created": adapter.created,
        "root": adapter.path,
        "parent": adapter.parent,
    }


def _model_card(state: ServerState, name: str) -> answers.ModelCard:
    engine = state.engine
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "octavo",
        "root": state.engine_config.model.model,
        "parent": None,
        # The memory decides it in the end, so it is not known while the model loads.
        "max_model_len": engine.max_model_len if engine is not None and engine.ready else None,
        "permission": [],
        "input_modalities": (
            None if engine is None else input_modalities(engine.spec, state.engine_config.model)
        ),
    }
