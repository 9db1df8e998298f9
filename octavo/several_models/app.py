"""Web application of a server of several models: lists, loading, and forwarding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute

from octavo import __version__
from octavo.errors import RequestError
from octavo.observability.metrics import CONTENT_TYPE
from octavo.router.app import (
    explain_request,
    health,
    job_of,
    list_requests,
    load,
    sound_job_of,
    version,
    view,
)
from octavo.router.job import POOLING, SOUNDS, Job
from octavo.router.proxy import ProxyResponse
from octavo.server import answers
from octavo.server.adapter_table import ServedAdapter
from octavo.server.admin import check_admin
from octavo.server.app import OLLAMA_PROBE, PAGE_FILES, App, add_layers
from octavo.server.auth import tenant_of
from octavo.server.body import check_body, parse_json, read_body
from octavo.server.errors import AdminError, RouteError, show
from octavo.server.middleware import context_of
from octavo.server.ollama_models import ollama_version
from octavo.server.schema import LoadAdapterBody, UnloadAdapterBody
from octavo.server.sockets import needs_websocket
from octavo.server.ui import or_page
from octavo.several_models.metrics import join_metrics
from octavo.several_models.ollama import is_unload, list_running, list_tags, unloaded_answer
from octavo.several_models.realtime import realtime
from octavo.several_models.routing import (
    Asked,
    asked_of_form,
    check_background,
    choose_model,
    limit,
    read_asked,
    read_keep_alive,
)
from octavo.several_models.state import ModelsState, OneModel, models_of
from octavo.system.offload import offload

# Maximum seconds in which a model's server returns its metrics.
_METRICS_SECONDS = 2.0


def build_app(state: ModelsState) -> App:
    """Make the application; its lifespan starts to load models."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        state.start()
        yield

    routes = (*_ROUTES, PAGE_FILES) if state.config.ui else _ROUTES
    app = App(routes, lifespan, state.config.root_path)
    app.router.routes.append(WebSocketRoute("/v1/realtime", realtime))
    add_layers(app, state)
    return app


async def index(request: Request) -> Response:
    """Describe the server and its models."""
    state = models_of(request)
    models = [_card(state, model, model.names[0]) for model in state.models]
    return _json({"name": "octavo", "version": __version__, "models": models})


async def ready(request: Request) -> Response:
    """Return 200 if requests would be answered, after the load of their model if necessary."""
    state = models_of(request)
    if state.draining:
        reason = "draining"
    elif not state.ready:
        reason = "loading" if state.usable else "no model can be loaded"
    else:
        return _json({"status": "ready"})
    return _json({"status": "not ready", "reason": reason}, 503, {"Retry-After": "1"})


async def metrics(request: Request) -> Response:
    """Return Prometheus metrics of this process and of the loaded models."""
    state = models_of(request)
    found = await asyncio.gather(*(_metrics_of(model) for model in state.models))
    pages = {"": state.metrics.render().decode()} | {
        model.names[0]: page
        for model, page in zip(state.models, found, strict=True)
        if page is not None
    }
    return Response(join_metrics(pages, state.models), media_type=CONTENT_TYPE)


async def _metrics_of(model: OneModel) -> str | None:
    """Return the metrics of a model's server; None: it does not show them now."""
    upstream = next((upstream for upstream in model.pool.upstreams if upstream.ready), None)
    if upstream is None:
        return None
    try:
        async with asyncio.timeout(_METRICS_SECONDS):
            response = await upstream.ask("GET", "/metrics", [], b"")
            try:
                page = await response.read()
            finally:
                response.close()
    except (aiohttp.ClientError, OSError):  # also the timeout
        return None
    return page.decode(errors="replace") if response.status == 200 else None


# Models


async def list_models(request: Request) -> Response:
    """List the names of all models and their adapters, with the state of each."""
    state = models_of(request)
    data = []
    for model in state.models:
        data += [_card(state, model, name) for name in model.names]
        data += [_card(state, model, it.name, it) for it in model.adapters or ()]
    return _json({"object": "list", "data": data})


async def get_model(request: Request) -> Response:
    """Return one of the names."""
    state, name = models_of(request), request.path_params["model"]
    model = state.find(name)
    adapter = None if name in model.names else model.find_adapter(name)
    return _json(_card(state, model, name, adapter))


async def load_model(request: Request) -> Response:
    """Begin to load a model."""
    state, model = await _named_model(request)
    state.set.load(model)
    return _json({"success": True})


async def unload_model(request: Request) -> Response:
    """Unload a model after its running requests."""
    state, model = await _named_model(request)
    state.set.unload(model)
    return _json({"success": True})


async def _named_model(request: Request) -> tuple[ModelsState, OneModel]:
    """Return the model that the body of a client who may load models names."""
    state, context = models_of(request), context_of(request)
    if len(state.api_keys) > 1 and not context.is_admin:
        raise AdminError(request.url.path, has_key=state.api_keys.has_admin)
    body = parse_json(await read_body(request, state.config.max_request_bytes))
    name = body.get("model")
    if not isinstance(name, str):
        shown = "missing; it is required" if name is None else f"{show(name)}; give a name"
        raise RequestError(f"model is {shown}.", "model")
    return state, state.find(name)


def _card(
    state: ModelsState, model: OneModel, name: str, adapter: ServedAdapter | None = None
) -> dict[str, Any]:
    planned, shown = model.share.planned, model.shown_state
    status: dict[str, Any] = {"value": "unloaded" if shown == "failed" else shown}
    if model.error is not None:
        status["failed"] = True
    return {
        "id": name,
        "object": "model",
        "created": state.created if adapter is None else adapter.created,
        "owned_by": "octavo",
        "root": model.share.served.path if adapter is None else adapter.path,
        "parent": None if adapter is None else adapter.parent,
        "max_model_len": None if planned is None else planned.max_model_len,
        "permission": [],
        "input_modalities": None if planned is None else planned.input_modalities,
        "state": shown,
        "error": None if model.error is None else str(model.error),
        "status": status,  # as llama.cpp shows it
    }


# Adapters


async def load_lora_adapter(request: Request) -> Response:
    """Let the server of a model check an adapter; it is offered as a model afterwards."""
    check_admin(request)
    state, job = models_of(request), await job_of(request)
    body, _ = check_body(job.body, LoadAdapterBody, strict=False)
    body.check()
    model = state.model_for_adapter(body.lora_name, body.base_model_name)
    turn = state.loading(body.lora_name, model)
    return ProxyResponse(state, job, model.pool, turn=turn)


async def unload_lora_adapter(request: Request) -> Response:
    """Stop offering an adapter; its unfinished requests continue."""
    check_admin(request)
    state, job = models_of(request), await job_of(request)
    body, _ = check_body(job.body, UnloadAdapterBody, strict=False)
    state.unload_adapter(body.lora_name)
    return answers.respond(answers.AdapterUnloaded(id=body.lora_name, object="model", deleted=True))


# Requests for models


async def proxy(request: Request) -> Response:
    """Pass a request on to the server of its model, and the answer back."""
    state = models_of(request)
    job = await job_of(request)
    asked = await offload(len(job.body) // 8, read_asked, job.body)
    keep_alive = None
    if job.path.startswith("/api/"):
        keep_alive = read_keep_alive(asked.keep_alive)
    model = await _choose(request, job, asked)
    check_background(state, job)
    if keep_alive == 0 and is_unload(job):
        state.set.unload(model)
        return _json(unloaded_answer(job))
    return ProxyResponse(state, job, model.pool, turn=state.set.use(model, keep_alive))


async def sounds(request: Request) -> Response:
    """Pass a form with a sound on to the server of its model, and the answer back."""
    state = models_of(request)
    job, fields = await sound_job_of(request)
    model = await _choose(request, job, asked_of_form(job.model, fields))
    return ProxyResponse(state, job, model.pool, turn=state.set.use(model, None))


async def _choose(request: Request, job: Job, asked: Asked) -> OneModel:
    """Return the model of a request."""
    state = models_of(request)

    async def resolve(name: str) -> OneModel:
        context = context_of(request)
        tenant = tenant_of(context.api_key) if len(state.api_keys) > 1 else None
        work = state.find_or_resolve(name, tenant)
        deadline = limit(context.arrival, asked.deadline_ms, context.deadline_ms)
        first_token = limit(context.arrival, asked.max_ttft_ms, context.max_ttft_ms)
        return await state.run_search(request.receive, work, deadline, first_token)

    return await choose_model(state, job, asked, resolve)


async def streams(request: Request) -> Response:
    """Reject: streams cannot be resumed."""
    raise RouteError(
        404,
        "A server of several models does not support resuming a stream; send the request again.",
    )


async def not_here(request: Request) -> Response:
    """Reject what belongs to the server of one model."""
    raise RouteError(
        404,
        f"{request.url.path} is not available with several models; start a server with one of them "
        "for it.",
    )


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


_ROUTES = (
    ("/", or_page(index), "GET"),
    ("/health", health, "GET"),
    ("/ping", health, "GET"),
    ("/ping", health, "POST"),
    ("/ready", ready, "GET"),
    ("/load", load, "GET"),
    ("/version", version, "GET"),
    ("/metrics", metrics, "GET"),
    ("/v1/engine/view", view, "GET"),
    ("/v1/requests", list_requests, "GET"),
    ("/v1/requests/{request_id:path}/explain", explain_request, "GET"),
    ("/v1/streams/{stream_id:path}", streams, "GET"),
    *(
        (f"/v1/{kind}{rest}", not_here, method)
        for kind in ("files", "batches")
        for rest in ("", "/{rest:path}")
        for method in ("GET", "POST", "DELETE")
    ),
    ("/models", list_models, "GET"),
    ("/models/load", load_model, "POST"),
    ("/models/unload", unload_model, "POST"),
    ("/v1/load_lora_adapter", load_lora_adapter, "POST"),
    ("/v1/unload_lora_adapter", unload_lora_adapter, "POST"),
    ("/v1/models", list_models, "GET"),
    ("/v1/models/{model:path}", get_model, "GET"),
    *((path, sounds, "POST") for path in SOUNDS),
    ("/v1/realtime", needs_websocket, "GET"),
    ("/v1/{rest:path}", proxy, "GET"),
    ("/v1/{rest:path}", proxy, "POST"),
    ("/v1/{rest:path}", proxy, "DELETE"),
    *((path, proxy, "POST") for path in POOLING if not path.startswith("/v1/")),
    ("/info", proxy, "GET"),
    ("/invocations", proxy, "POST"),
    ("/inference/v1/generate", proxy, "POST"),
    ("/api/chat", proxy, "POST"),
    ("/api/generate", proxy, "POST"),
    ("/api/show", proxy, "POST"),
    ("/api/tags", list_tags, "GET"),
    ("/api/ps", list_running, "GET"),
    ("/api/version", ollama_version, "GET"),
    OLLAMA_PROBE,
    ("/tokenize", proxy, "POST"),
    ("/detokenize", proxy, "POST"),
)
