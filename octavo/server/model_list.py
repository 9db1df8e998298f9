"""Served models and their tokenizer: GET /v1/models and /tokenizer_info."""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import NotFoundError
from octavo.server import answers
from octavo.server.errors import RouteError, show
from octavo.server.state import ServerState, state_of


async def list_models(request: Request) -> Response:
    """List the names under which the model is served."""
    state = state_of(request)
    return answers.respond(
        answers.ModelList(object="list", data=[_model_card(state, n) for n in state.model_names])
    )


async def get_model(request: Request) -> Response:
    """Return one of the served names."""
    state = state_of(request)
    name = request.path_params["model"]
    if name not in state.model_names:
        raise NotFoundError(
            f"The model {show(name)} does not exist here; this server has "
            f"{', '.join(state.model_names)}.",
            "model",
        )
    return answers.respond(_model_card(state, name))


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
    }
