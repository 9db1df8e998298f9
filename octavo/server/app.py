"""Web application: its routes and layers."""

from __future__ import annotations

import asyncio
import inspect
import pkgutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from octavo.errors import ConfigError, OctavoError
from octavo.server import (
    adapters,
    admin,
    batches,
    conversations,
    files,
    health,
    model_list,
    responses,
    tei,
)
from octavo.server.anthropic import count_tokens, create_message
from octavo.server.audio import create_transcription, create_translation
from octavo.server.batch_runner import BatchRunner
from octavo.server.chat import create_batch_chat_completion, create_chat_completion
from octavo.server.classify import create_classification
from octavo.server.cohere import create_cohere_embed, create_old_cohere_embed
from octavo.server.completions import create_completion
from octavo.server.docs import HEADERS, docs_page
from octavo.server.embeddings import create_embeddings, create_pooling
from octavo.server.errors import on_http_exception
from octavo.server.explain import explain_request, list_requests
from octavo.server.generate import create_token_generation
from octavo.server.http_state import HttpState
from octavo.server.invocations import create_invocation
from octavo.server.middleware import RequestMiddleware
from octavo.server.ollama import create_ollama_chat, create_ollama_generation
from octavo.server.ollama_embed import create_ollama_embed, create_ollama_embeddings
from octavo.server.ollama_models import (
    list_running,
    list_tags,
    ollama_version,
    running,
    show_model,
)
from octavo.server.realtime import realtime
from octavo.server.render import render_chat, render_completion
from octavo.server.rerank import create_rerank, create_score
from octavo.server.resume_routes import get_stream, resumable
from octavo.server.sockets import needs_websocket
from octavo.server.state import ServerState
from octavo.server.tokenize import detokenize, tokenize
from octavo.server.ui import get_file, or_page
from octavo.server.view import get_view

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


@cache
def description() -> dict[str, Any]:
    """Return the content of /openapi.json; the first call imports FastAPI to make it."""
    from octavo.server.openapi import describe_routes

    return describe_routes(ROUTES)


async def openapi(request: Request) -> Response:
    """Return the OpenAPI description."""
    described = await asyncio.to_thread(description)
    if root := request.scope.get("root_path"):
        described = {**described, "servers": [{"url": root}]}
    return JSONResponse(described)


async def docs(request: Request) -> Response:
    """Return the description at /openapi.json as a page."""
    return HTMLResponse(docs_page(await asyncio.to_thread(description)), headers=HEADERS)


DOCUMENTATION: tuple[tuple[str, Endpoint, str], ...] = (
    ("/openapi.json", openapi, "GET"),
    ("/docs", docs, "GET"),
)
OLLAMA_PROBE: tuple[str, Endpoint, str] = ("/", running, "HEAD")
PAGE_FILES: tuple[str, Endpoint, str] = ("/ui/{name}", get_file, "GET")
ROUTES: tuple[tuple[str, Endpoint, str], ...] = (
    ("/", or_page(health.index), "GET"),
    ("/health", health.health, "GET"),
    ("/ping", health.health, "GET"),
    ("/ping", health.health, "POST"),
    ("/ready", health.ready, "GET"),
    ("/load", health.load, "GET"),
    ("/version", health.version, "GET"),
    ("/metrics", health.metrics, "GET"),
    ("/v1/models", model_list.list_models, "GET"),
    ("/v1/models/{model:path}", model_list.get_model, "GET"),
    ("/v1/load_lora_adapter", adapters.load_lora_adapter, "POST"),
    ("/v1/unload_lora_adapter", adapters.unload_lora_adapter, "POST"),
    ("/v1/completions", resumable(create_completion), "POST"),
    ("/v1/chat/completions", resumable(create_chat_completion), "POST"),
    ("/v1/chat/completions/batch", create_batch_chat_completion, "POST"),
    ("/v1/completions/render", render_completion, "POST"),
    ("/v1/chat/completions/render", render_chat, "POST"),
    ("/v1/audio/transcriptions", create_transcription, "POST"),
    ("/v1/audio/translations", create_translation, "POST"),
    ("/v1/embeddings", create_embeddings, "POST"),
    ("/pooling", create_pooling, "POST"),
    ("/classify", create_classification, "POST"),
    ("/v1/classify", create_classification, "POST"),
    ("/score", create_score, "POST"),
    ("/v1/score", create_score, "POST"),
    ("/rerank", create_rerank, "POST"),
    ("/v1/rerank", create_rerank, "POST"),
    ("/v2/rerank", create_rerank, "POST"),
    ("/v1/embed", create_old_cohere_embed, "POST"),
    ("/v2/embed", create_cohere_embed, "POST"),
    ("/embed", tei.embed, "POST"),
    ("/embed_all", tei.embed_all, "POST"),
    ("/embed_sparse", tei.embed_sparse, "POST"),
    ("/predict", tei.predict, "POST"),
    ("/similarity", tei.similarity, "POST"),
    ("/info", tei.info, "GET"),
    ("/v1/messages", create_message, "POST"),
    ("/v1/messages/count_tokens", count_tokens, "POST"),
    ("/v1/responses", responses.create_response, "POST"),
    ("/v1/responses/input_tokens", responses.count_input_tokens, "POST"),
    ("/v1/responses/{response_id}", responses.get_response, "GET"),
    ("/v1/responses/{response_id}", responses.delete_response, "DELETE"),
    ("/v1/responses/{response_id}/cancel", responses.cancel_response, "POST"),
    ("/v1/responses/{response_id}/input_items", responses.list_input_items, "GET"),
    ("/v1/conversations", conversations.create_conversation, "POST"),
    ("/v1/conversations/{conversation_id}", conversations.get_conversation, "GET"),
    ("/v1/conversations/{conversation_id}", conversations.update_conversation, "POST"),
    ("/v1/conversations/{conversation_id}", conversations.delete_conversation, "DELETE"),
    ("/v1/conversations/{conversation_id}/items", conversations.list_items, "GET"),
    ("/v1/conversations/{conversation_id}/items", conversations.create_items, "POST"),
    ("/v1/conversations/{conversation_id}/items/{item_id}", conversations.get_item, "GET"),
    ("/v1/conversations/{conversation_id}/items/{item_id}", conversations.delete_item, "DELETE"),
    ("/api/chat", create_ollama_chat, "POST"),
    ("/api/generate", create_ollama_generation, "POST"),
    ("/api/embed", create_ollama_embed, "POST"),
    ("/api/embeddings", create_ollama_embeddings, "POST"),
    ("/api/tags", list_tags, "GET"),
    ("/api/ps", list_running, "GET"),
    ("/api/show", show_model, "POST"),
    ("/api/version", ollama_version, "GET"),
    ("/inference/v1/generate", resumable(create_token_generation), "POST"),
    ("/invocations", resumable(create_invocation), "POST"),
    ("/v1/requests", list_requests, "GET"),
    ("/v1/requests/{request_id:path}/explain", explain_request, "GET"),
    ("/v1/files", files.create_file, "POST"),
    ("/v1/files", files.list_files, "GET"),
    ("/v1/files/{file_id}", files.get_file, "GET"),
    ("/v1/files/{file_id}", files.delete_file, "DELETE"),
    ("/v1/files/{file_id}/content", files.get_file_content, "GET"),
    ("/v1/batches", batches.create_batch, "POST"),
    ("/v1/batches", batches.list_batches, "GET"),
    ("/v1/batches/{batch_id}", batches.get_batch, "GET"),
    ("/v1/batches/{batch_id}/cancel", batches.cancel_batch, "POST"),
    ("/v1/streams/{stream_id:path}", get_stream, "GET"),
    ("/v1/engine/view", get_view, "GET"),
    ("/tokenize", tokenize, "POST"),
    ("/detokenize", detokenize, "POST"),
    ("/tokenizer_info", model_list.tokenizer_info, "GET"),
    ("/server_info", admin.server_info, "GET"),
    ("/reset_prefix_cache", admin.reset_prefix_cache, "POST"),
    ("/reset_encoder_cache", admin.reset_encoder_cache, "POST"),
    ("/reset_mm_cache", admin.reset_mm_cache, "POST"),
    ("/sleep", admin.sleep, "POST"),
    ("/wake_up", admin.wake_up, "POST"),
    ("/is_sleeping", admin.is_sleeping, "GET"),
    ("/pause", admin.pause, "POST"),
    ("/resume", admin.resume, "POST"),
    ("/is_paused", admin.is_paused, "GET"),
    ("/scale_elastic_ep", admin.scale_elastic_ep, "POST"),
    ("/is_scaling_elastic_ep", admin.is_scaling_elastic_ep, "POST"),
    ("/start_profile", admin.start_profile, "POST"),
    ("/stop_profile", admin.stop_profile, "POST"),
)
"""Path, function and method of each route that the description has."""


class App(Starlette):
    """Application that may have a path of its own at a proxy.

    Args:
        routes: path, function and method of each route.
        lifespan: start and end of the application.
        root_path: the path at the proxy.
    """

    def __init__(
        self,
        routes: Iterable[tuple[str, Endpoint, str]],
        lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]],
        root_path: str,
    ) -> None:
        super().__init__(lifespan=lifespan, exception_handlers={HTTPException: on_http_exception})
        self.router.redirect_slashes = False
        for path, endpoint, method in routes:
            route = Route(path, endpoint, methods=[method])
            route.methods = {method}  # without HEAD, which Starlette adds to GET
            self.router.routes.append(route)
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection."""
        if self._root_path:
            scope["root_path"] = self._root_path
        await super().__call__(scope, receive, send)


def build_app(state: ServerState) -> App:
    """Create the application; its lifespan starts the engine, which `state.close` ends."""

    runner = BatchRunner(state)
    state.at_drain, state.at_close = runner.stop, runner.close

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        state.start()
        if state.state_dir is not None:
            try:
                await runner.open()
            except OctavoError as error:
                state.fail(error)
        yield

    documented = not state.config.disable_fastapi_docs
    routes = ((*DOCUMENTATION, *ROUTES) if documented else ROUTES) + (OLLAMA_PROBE,)
    if state.config.ui:
        routes += (PAGE_FILES,)
    routes += (("/v1/realtime", needs_websocket, "GET"),)
    app = App(routes, lifespan, state.config.root_path)
    app.router.routes.append(WebSocketRoute("/v1/realtime", realtime))
    app.state.batches = runner
    add_layers(app, state)
    return app


def add_layers(app: App, state: HttpState) -> None:
    """Add the layers of the settings to an application: keys, CORS, the operator's middleware.

    Raises:
        ConfigError: an error of `add_middleware`.
    """
    app.state.octavo = state
    # Middleware added later is called earlier: CORS answers preflights before keys are checked.
    app.add_middleware(RequestMiddleware, state=state)
    if state.config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[
                "X-Request-Id",
                "X-Octavo-Ignored-Fields",
                "X-Octavo-Stripped",
                "Retry-After",
            ],
        )
    if state.config.middleware:
        add_middleware(app, state.config.middleware)


def add_middleware(app: App, paths: list[str]) -> None:
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
