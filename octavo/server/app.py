"""Web application: its routes and layers."""

from __future__ import annotations

import asyncio
import inspect
import pkgutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from octavo import __version__
from octavo.errors import ConfigError
from octavo.server import admin, health, model_list
from octavo.server.chat import create_batch_chat_completion, create_chat_completion
from octavo.server.completions import create_completion
from octavo.server.docs import HEADERS, docs_page
from octavo.server.errors import on_http_exception
from octavo.server.generate import create_token_generation
from octavo.server.http_state import HttpState
from octavo.server.invocations import create_invocation
from octavo.server.middleware import RequestMiddleware
from octavo.server.openapi import OPERATIONS, document
from octavo.server.resume_routes import get_stream, resumable
from octavo.server.state import ServerState
from octavo.server.tokenize import detokenize, tokenize


def build_app(state: ServerState) -> FastAPI:
    """Create the application; its lifespan starts the engine, which `state.close` ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.start()
        # Created once, on a thread: it takes a tenth of a second, which would delay streams.
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
        ("/", health.index, get),
        ("/health", health.health, get),
        ("/ping", health.health, get),
        ("/ping", health.health, post),
        ("/ready", health.ready, get),
        ("/load", health.load, get),
        ("/version", health.version, get),
        ("/metrics", health.metrics, get),
        ("/v1/models", model_list.list_models, get),
        ("/v1/models/{model:path}", model_list.get_model, get),
        ("/v1/completions", resumable(create_completion), post),
        ("/v1/chat/completions", resumable(create_chat_completion), post),
        ("/v1/chat/completions/batch", create_batch_chat_completion, post),
        ("/inference/v1/generate", resumable(create_token_generation), post),
        ("/invocations", resumable(create_invocation), post),
        ("/v1/streams/{stream_id:path}", get_stream, get),
        ("/tokenize", tokenize, post),
        ("/detokenize", detokenize, post),
        ("/tokenizer_info", model_list.tokenizer_info, get),
        ("/server_info", admin.server_info, get),
        ("/reset_prefix_cache", admin.reset_prefix_cache, post),
        ("/sleep", admin.sleep, post),
        ("/wake_up", admin.wake_up, post),
        ("/is_sleeping", admin.is_sleeping, get),
        ("/pause", admin.pause, post),
        ("/resume", admin.resume, post),
        ("/is_paused", admin.is_paused, get),
        ("/scale_elastic_ep", admin.scale_elastic_ep, post),
        ("/is_scaling_elastic_ep", admin.is_scaling_elastic_ep, post),
        ("/start_profile", admin.start_profile, post),
        ("/stop_profile", admin.stop_profile, post),
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
    """Add the layers of the settings to an application: keys, CORS, the operator's middleware.

    Raises:
        ConfigError: an error of `add_middleware`.
    """
    app.state.octavo = state
    app.root_path = state.config.root_path
    # Middleware added later is called earlier: CORS answers preflights before keys are checked.
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
    """Add the operator's middleware to an application; each layer wraps the previous one.

    Raises:
        ConfigError: a middleware cannot be imported or created, or is neither a class nor a
            coroutine function.
    """
    for path in paths:
        try:
            found: Any = pkgutil.resolve_name(path)
        except Exception as error:  # importing a module may raise anything
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
        app.middleware_stack = app.build_middleware_stack()  # else it fails at a request
    except Exception as error:
        raise ConfigError(f"middleware={paths} cannot be used: {error!r}.") from error


async def docs(request: Request) -> Response:
    """Return the description at /openapi.json as a page."""
    return HTMLResponse(docs_page(request.app.openapi()), headers=HEADERS)
