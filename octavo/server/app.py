"""The web application: its addresses, and the small ones of them."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pkgutil
import platform
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from octavo import __version__
from octavo.config import HIDDEN, config_fields
from octavo.errors import ConfigError, NotFoundError, RequestError
from octavo.messages import PauseMode
from octavo.observability.metrics import CONTENT_TYPE
from octavo.server.body import check_media_type, read_model
from octavo.server.chat import create_batch_chat_completion, create_chat_completion
from octavo.server.completions import create_completion
from octavo.server.docs import HEADERS, docs_page
from octavo.server.errors import AdminError, RouteError, on_http_exception, show
from octavo.server.generate import create_token_generation
from octavo.server.http_state import HttpState
from octavo.server.invocations import create_invocation
from octavo.server.middleware import RequestMiddleware, context_of
from octavo.server.openapi import OPERATIONS, document
from octavo.server.resume_routes import get_stream, resumable
from octavo.server.schema import ScaleBody
from octavo.server.state import ServerState, state_of
from octavo.server.tokenize import detokenize, tokenize

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM


_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD")
"""In names of environment variables that are shown to nobody."""


def build_app(state: ServerState) -> FastAPI:
    """Makes the application; its lifespan starts the engine, which `state.close` ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.start()
        # Made once; it takes a tenth of a second, in which streams would stand still.
        described = asyncio.create_task(asyncio.to_thread(app.openapi))
        yield
        await described

    documented = not state.config.disable_fastapi_docs
    app = FastAPI(
        openapi_url="/openapi.json" if documented else None,
        docs_url=None,
        title="Octavo",
        version=__version__,
        description="OpenAI-compatible inference server.",
        lifespan=lifespan,
        redirect_slashes=False,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        exception_handlers={HTTPException: on_http_exception},
    )
    if documented:
        app.add_route("/docs", docs, include_in_schema=False)
    get, post = ["GET"], ["POST"]
    for path, endpoint, methods in (
        ("/", index, get),
        ("/health", health, get),
        ("/ping", health, get),
        ("/ping", health, post),
        ("/ready", ready, get),
        ("/load", load, get),
        ("/version", version, get),
        ("/metrics", metrics, get),
        ("/v1/models", list_models, get),
        ("/v1/models/{model:path}", get_model, get),
        ("/v1/completions", resumable(create_completion), post),
        ("/v1/chat/completions", resumable(create_chat_completion), post),
        ("/v1/chat/completions/batch", create_batch_chat_completion, post),
        ("/inference/v1/generate", resumable(create_token_generation), post),
        ("/invocations", resumable(create_invocation), post),
        ("/v1/streams/{stream_id:path}", get_stream, get),
        ("/tokenize", tokenize, post),
        ("/detokenize", detokenize, post),
        ("/tokenizer_info", tokenizer_info, get),
        ("/server_info", server_info, get),
        ("/reset_prefix_cache", reset_prefix_cache, post),
        ("/sleep", sleep, post),
        ("/wake_up", wake_up, post),
        ("/is_sleeping", is_sleeping, get),
        ("/pause", pause, post),
        ("/resume", resume, post),
        ("/is_paused", is_paused, get),
        ("/scale_elastic_ep", scale_elastic_ep, post),
        ("/is_scaling_elastic_ep", is_scaling_elastic_ep, post),
        ("/start_profile", start_profile, post),
        ("/stop_profile", stop_profile, post),
    ):
        app.add_api_route(
            path,
            endpoint,
            methods=methods,
            response_class=Response,
            responses=OPERATIONS[path].responses(),
            openapi_extra=OPERATIONS[path].extra(path),
        )
    document(app)
    add_layers(app, state)
    return app


def add_layers(app: FastAPI, state: HttpState) -> None:
    """Puts around an application what the settings ask for: keys, CORS, the operator's middleware.

    Raises:
        ConfigError: see `add_middleware`.
    """
    app.state.octavo = state
    app.root_path = state.config.root_path
    # Middleware added later lies further out: CORS answers preflights before keys are asked for.
    app.add_middleware(RequestMiddleware, state=state)
    if state.config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "X-Octavo-Ignored-Fields", "Retry-After"],
        )
    if state.config.middleware:
        add_middleware(app, state.config.middleware)


def add_middleware(app: FastAPI, paths: list[str]) -> None:
    """Puts the operator's middleware around an application, each around the one before it.

    Raises:
        ConfigError: one cannot be imported or made, or is neither a class nor a coroutine function.
    """
    for path in paths:
        try:
            found: Any = pkgutil.resolve_name(path)
        except Exception as error:  # whatever the module does when it is imported
            raise ConfigError(
                f"middleware={path!r} cannot be imported: {error!r}. Write it as "
                "package.module.name, and make sure that the package is on PYTHONPATH."
            ) from error
        is_class = inspect.isclass(found)
        if is_class:
            app.add_middleware(found)
        elif inspect.iscoroutinefunction(found):
            app.add_middleware(BaseHTTPMiddleware, dispatch=found)
        else:
            raise ConfigError(
                f"middleware={path!r} is neither an ASGI middleware class nor an async function "
                "(request, call_next)."
            )
    try:
        app.middleware_stack = app.build_middleware_stack()  # else the first request would fail
    except Exception as error:
        raise ConfigError(f"middleware={paths} cannot be used: {error!r}.") from error


async def docs(request: Request) -> Response:
    """The description at /openapi.json for people."""
    return HTMLResponse(docs_page(request.app.openapi()), headers=HEADERS)


async def index(request: Request) -> Response:
    """What this server is and where it can be asked."""
    state = state_of(request)
    return _json(
        {
            "name": "octavo",
            "version": __version__,
            "models": state.model_names,
            "endpoints": [
                f"{method} {route.path}"
                for route in request.app.routes
                for method in sorted(route.methods - {"HEAD"})
            ],
        }
    )


async def health(request: Request) -> Response:
    """200 while the server makes progress (loading a model is progress), 503 with the reason."""
    state = state_of(request)
    ok, reason = True, "starting"
    if state.failure is not None:
        ok, reason = False, str(state.failure)
    elif state.engine is not None:
        found = state.engine.health()
        ok, reason = found.ok, found.reason
    return _json({"status": "ok" if ok else "unhealthy", "reason": reason}, 200 if ok else 503)


async def ready(request: Request) -> Response:
    """200 if requests will be served at once; 503 while loading, asleep, draining or unhealthy."""
    state = state_of(request)
    if state.draining:
        reason = "draining"
    elif state.engine is not None and state.engine.asleep:
        reason = "asleep"
    elif state.failure is not None:
        reason = str(state.failure)
    elif state.engine is None:
        reason = "loading the model"
    elif not state.engine.ready:
        reason = state.engine.health().reason
    else:
        return _json({"status": "ready"})
    return _json({"status": "not ready", "reason": reason}, 503, {"Retry-After": "1"})


async def load(request: Request) -> Response:
    """How many requests are being answered, probes not counted."""
    return _json({"server_load": state_of(request).num_active})


async def version(request: Request) -> Response:
    """The version of Octavo."""
    return _json({"version": __version__})


async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    engine = state_of(request).engine
    page = b"" if engine is None else await engine.render_metrics()
    return Response(page, media_type=CONTENT_TYPE)


async def list_models(request: Request) -> Response:
    """The names under which the model is served."""
    state = state_of(request)
    return _json({"object": "list", "data": [_model_card(state, n) for n in state.model_names]})


async def get_model(request: Request) -> Response:
    """One of the served names."""
    state = state_of(request)
    name = request.path_params["model"]
    if name not in state.model_names:
        raise NotFoundError(
            f"The model {show(name)} does not exist here; this server has "
            f"{', '.join(state.model_names)}.",
            "model",
        )
    return _json(_model_card(state, name))


async def tokenizer_info(request: Request) -> Response:
    """The tokenizer's configuration; 404 without --enable-tokenizer-info-endpoint."""
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
    # Its integers may have more than 64 bits: model_max_length often stands for infinity.
    return Response(json.dumps(config), media_type="application/json")


async def server_info(request: Request) -> Response:
    """Settings, environment and machine, for the operator."""
    _check_operator(request)
    form = request.query_params.get("config_format", "text")
    if form not in ("text", "json"):
        raise RequestError(
            f"config_format={show(form)} is not allowed; use text or json.", "config_format"
        )
    config = state_of(request).engine_config
    settings: dict[str, dict[str, object]] = {}
    for field in config_fields():
        value = HIDDEN if field.secret else getattr(getattr(config, field.section), field.name)
        settings.setdefault(field.section, {})[field.name] = value
    return _json(
        {
            "vllm_config": settings if form == "json" else str(config),
            "vllm_env": {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith(("OCTAVO_", "VLLM_")) and not _SECRET.search(name)
            },
            "system_env": {
                "octavo_version": __version__,
                "python_version": platform.python_version(),
                "os": platform.platform(),
                "machine": platform.machine(),
            },
        }
    )


async def reset_prefix_cache(request: Request) -> Response:
    """Forgets all cached prefixes; `success` is false while requests hold blocks.

    With `reset_running_requests=true` these start over, and hold none. With `reset_external=true`
    what a KV connector keeps is forgotten as well, unless other engines share it.
    """
    _check_admin(request)
    restart, external = (
        _flag(request, name) for name in ("reset_running_requests", "reset_external")
    )
    engine = await state_of(request).get_engine()
    return _json({"success": await engine.reset_prefix_cache(restart, external)})


def _flag(request: Request, name: str, default: str = "false") -> bool:
    """A query parameter that is true or false.

    Raises:
        RequestError: it is neither.
    """
    value = request.query_params.get(name, default)
    if value not in ("true", "false"):
        raise RequestError(f"{name}={show(value)} is not allowed; it is true or false.", name)
    return value == "true"


async def sleep(request: Request) -> Response:
    """Puts the engine to sleep; requests that come wait. 404 without --enable-sleep-mode.

    `level` 0 only pauses it, 1 (the default) gives the memory of weights and KV cache back, 2 also
    takes the weights anew when it wakes up. `mode` says what becomes of requests: abort (the
    default) ends them with finish_reason "abort", wait finishes them first, keep lets them go on
    later.
    """
    _check_admin(request)
    engine = await _sleeping_engine(request)
    level = request.query_params.get("level", "1")
    if level not in ("0", "1", "2"):
        raise RequestError(f"level={show(level)} is not allowed; it is 0, 1 or 2.", "level")
    await engine.sleep(int(level), _pause_mode(request))
    return _json({"status": "sleeping", "level": int(level)})


async def wake_up(request: Request) -> Response:
    """Wakes the engine up; with `tags` (weights, kv_cache) only these parts of it."""
    _check_admin(request)
    engine = await _sleeping_engine(request)
    tags = request.query_params.getlist("tags") or None
    awake = await engine.wake_up(tags)
    return _json({"status": "awake" if awake else "sleeping", "tags": tags})


async def is_sleeping(request: Request) -> Response:
    """Whether the engine sleeps, at any level."""
    _check_operator(request)
    return _json({"is_sleeping": await (await _sleeping_engine(request)).is_sleeping()})


async def pause(request: Request) -> Response:
    """Computes nothing more until `/resume`, and keeps all memory; requests that come wait.

    `mode` says what becomes of requests: abort (the default) ends them with finish_reason "abort",
    wait finishes them first, keep lets them go on later. With `clear_cache=false` cached prefixes
    are kept.
    """
    _check_admin(request)
    mode = _pause_mode(request)
    clear = _flag(request, "clear_cache", "true")
    engine = await _ready_engine(request)
    await engine.pause_generation(mode=mode, clear_cache=clear)
    return _json({"status": "paused"})


async def resume(request: Request) -> Response:
    """Goes on after `/pause`."""
    _check_admin(request)
    await (await _ready_engine(request)).resume_generation()
    return _json({"status": "resumed"})


async def is_paused(request: Request) -> Response:
    """Whether nothing is computed until `/resume`, or `/wake_up`."""
    _check_operator(request)
    return _json({"is_paused": await (await _ready_engine(request)).is_paused()})


def _pause_mode(request: Request) -> PauseMode:
    """What the query says of unfinished requests.

    Raises:
        RequestError: it is unknown.
    """
    mode: Any = request.query_params.get("mode", "abort")
    if mode not in get_args(PauseMode):
        raise RequestError(f"mode={show(mode)} is not allowed; it is abort, wait or keep.", "mode")
    found: PauseMode = mode
    return found


async def scale_elastic_ep(request: Request) -> Response:
    """Changes the number of engines, while requests go on; answers when it is done.

    404 without --enable-elastic-ep.
    """
    engine = await _scalable_engine(request)
    body = await read_model(request, ScaleBody, state_of(request).config.max_request_bytes)
    size = body.new_data_parallel_size
    await engine.scale(size)
    return _json({"message": f"Scaled to {size} data parallel engines"})


async def is_scaling_elastic_ep(request: Request) -> Response:
    """Whether the number of engines is being changed."""
    return _json({"is_scaling_elastic_ep": (await _scalable_engine(request)).scaling})


async def start_profile(request: Request) -> Response:
    """Begins a profile of the engine; 404 without --profiler-dir."""
    await (await _profiled_engine(request)).start_profile()
    return _json({"status": "recording"})


async def stop_profile(request: Request) -> Response:
    """Ends the profile; `path` is its file on the server."""
    return _json({"path": await (await _profiled_engine(request)).stop_profile()})


def _check_operator(request: Request) -> None:
    """Checks that a request has an admin key, or that --enable-admin lets everybody in.

    Raises:
        AdminError: neither is so.
    """
    state = state_of(request)
    if not (context_of(request).is_admin or state.config.enable_admin):
        raise AdminError(request.url.path, has_key=state.api_keys.has_admin)


def _check_admin(request: Request) -> None:
    """Check the same of a POST, and that no web page of another site sent it.

    A page can send neither a key nor a JSON type to another site unasked, and a browser adds
    `Origin` to each POST. Without any of the three, a request without a body is from a program.

    Raises:
        AdminError: the request has no admin key, and --enable-admin is off.
        MediaTypeError: the request could be from a web page.
    """
    _check_operator(request)
    headers = request.headers
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    is_programs = not has_body and not {"content-type", "origin"} & set(headers)
    if context_of(request).api_key is None and not is_programs:
        check_media_type(request)


async def _profiled_engine(request: Request) -> AsyncLLM:
    _check_admin(request)
    state = state_of(request)
    if state.engine_config.observability.profiler_dir is None:
        raise RouteError(404, "Profiles are off; start the server with --profiler-dir DIR.")
    return await state.get_engine()


async def _scalable_engine(request: Request) -> AsyncLLM:
    _check_admin(request)
    state = state_of(request)
    if not state.engine_config.parallel.enable_elastic_ep:
        raise RouteError(
            404, "The number of engines is fixed; start the server with --enable-elastic-ep."
        )
    engine = await state.get_engine()
    await engine.wait_ready()
    return engine


async def _sleeping_engine(request: Request) -> AsyncLLM:
    """The engine once it is loaded, if it can sleep."""
    state = state_of(request)
    if not state.engine_config.model.enable_sleep_mode:
        raise RouteError(404, "Sleep mode is off; start the server with --enable-sleep-mode.")
    return await _ready_engine(request)


async def _ready_engine(request: Request) -> AsyncLLM:
    """The engine once it is loaded."""
    engine = await state_of(request).get_engine()
    await engine.wait_ready()
    return engine


def _model_card(state: ServerState, name: str) -> dict[str, object]:
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


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")
