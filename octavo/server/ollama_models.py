"""Ollama's descriptions of the served model: GET /api/tags, /api/ps, /api/version, POST /api/show.

The listed names are those of /v1/models, so that a client may use both APIs with the same name.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Literal
from weakref import WeakKeyDictionary

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import NotFoundError, RequestError
from octavo.server import answers
from octavo.server.abilities import answers_texts
from octavo.server.body import read_model
from octavo.server.description import ModelDescription, describe_model
from octavo.server.errors import show
from octavo.server.ollama_answers import (
    OllamaModel,
    OllamaRunning,
    OllamaRunningModel,
    OllamaShown,
    OllamaTags,
    OllamaVersion,
)
from octavo.server.ollama_schema import LATEST, ShowBody
from octavo.server.state import ServerState, state_of
from octavo.system.offload import offload

VERSION = "0.14.2"
"""Version of Ollama that clients see.

Clients for chats and code are known to demand 0.6.4 (VS Code's Copilot) to 0.14.2. Those that
demand 0.34 and more need routes that this server does not have."""
_FOREVER_SECONDS = 100 * 365 * 86400


async def running(request: Request) -> Response:
    """Return 200; Ollama's command looks for a server in this way."""
    return Response()


async def ollama_version(request: Request) -> Response:
    """Return the version of Ollama whose API this server has."""
    return answers.respond(OllamaVersion(version=VERSION))


async def list_tags(request: Request) -> Response:
    """List the names under which the model is served."""
    state = state_of(request)
    model = await _described(state)
    return answers.respond(OllamaTags(models=[_tag(state, model, n) for n in state.model_names]))


async def list_running(request: Request) -> Response:
    """List the names of the model once it is loaded."""
    state = state_of(request)
    model, engine = await _described(state), await state.get_engine()
    expires, names = _date(state.created + _FOREVER_SECONDS), state.model_names
    found = [
        OllamaRunningModel(
            name=name,
            model=name,
            size=model.nbytes,
            digest=_digest(state, name),
            details=model.details,
            expires_at=expires,
            size_vram=model.gpu_nbytes,
            context_length=engine.max_model_len,
        )
        for name in (names if engine.ready else [])
    ]
    return answers.respond(OllamaRunning(models=found))


async def show_model(request: Request) -> Response:
    """Describe the model: its shape, chat template, parameters and capabilities."""
    state = state_of(request)
    body = await read_model(request, ShowBody, state.config.max_request_bytes)
    asked = body.model or body.name
    if not asked:
        raise RequestError("model is missing; it is required.", "model", "missing_parameter")
    name = served_name(state, asked)
    model, engine = await _described(state), await state.get_engine()
    capabilities: list[Literal["completion", "embedding", "vision", "tools", "thinking"]] = []
    if answers_texts(engine.spec):
        capabilities.append("completion")
    elif engine.spec.pooler("embed") is not None:
        capabilities.append("embedding")
    if engine.chat_media is not None and "image" in engine.chat_media.kinds:
        capabilities.append("vision")
    template = ""
    if engine.tokenizer is not None and answers_texts(engine.spec):
        template = (await state.chat_template(engine.tokenizer)).source or ""
        found = await state.answer_format(engine.tokenizer)
        if found is not None and found.calls is not None:
            capabilities.append("tools")
        if found is not None and found.thoughts is not None:
            capabilities.append("thinking")
    defaults = engine.spec.generation_config
    return answers.respond(
        OllamaShown(
            modelfile=f"FROM {name}\n",
            parameters="\n".join(f"{key:<30} {value}" for key, value in defaults.items()),
            template=template,
            details=model.details,
            model_info={
                **model.info,
                "general.basename": name,
                f"{model.details['family']}.context_length": engine.max_model_len,
            },
            capabilities=capabilities,
            modified_at=_date(state.created),
        )
    )


def served_name(state: ServerState, asked: str) -> str:
    """Return the served name that a client asks for, which may have the tag `:latest`.

    Raises:
        NotFoundError: the server does not have the model.
    """
    for name in (asked, asked.removesuffix(LATEST)):
        if name in state.model_names or state.adapters.find(name) is not None:
            return name
    raise NotFoundError(
        f"model {show(asked)} not found; this server has {', '.join(state.model_names)}.", "model"
    )


_models: WeakKeyDictionary[ServerState, ModelDescription] = WeakKeyDictionary()
"""Descriptions by server; each is made once."""


async def _described(state: ServerState) -> ModelDescription:
    if state not in _models:
        engine = await state.get_engine()
        spec = engine.spec
        _models[state] = await offload(100 * len(spec.layers), describe_model, engine.config, spec)
    return _models[state]


def _tag(state: ServerState, model: ModelDescription, name: str) -> OllamaModel:
    return OllamaModel(
        name=name,
        model=name,
        modified_at=_date(state.created),
        size=model.nbytes,
        digest=_digest(state, name),
        details=model.details,
    )


def _digest(state: ServerState, name: str) -> str:
    return hashlib.sha256(f"{state.system_fingerprint} {name}".encode()).hexdigest()


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
