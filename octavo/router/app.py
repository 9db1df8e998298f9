"""Web application of the router: its own endpoints, and those that are passed on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from octavo import __version__
from octavo.observability.metrics import CONTENT_TYPE
from octavo.router import explain
from octavo.router.form import read_sound_job
from octavo.router.job import POOLING, SOUNDS, Job, read_job
from octavo.router.pool import KEY_HEADERS
from octavo.router.proxy import ProxyResponse
from octavo.router.proxy_state import proxy_state_of
from octavo.router.realtime import SocketProxy
from octavo.router.state import RouterState, router_of
from octavo.server.app import OLLAMA_PROBE, PAGE_FILES, App, add_layers
from octavo.server.body import read_body
from octavo.server.errors import RouteError
from octavo.server.generation import EventStream
from octavo.server.middleware import context_of
from octavo.server.sockets import as_request, needs_websocket
from octavo.server.ui import or_page
from octavo.server.upload import MAX_SOUND_BYTES, MemoryFile, check_origin, receive_form
from octavo.server.view import check_view
from octavo.system.offload import offload

# Begins of the paths of bodies that may hold pictures and sounds.
_CHATS = (
    *("/v1/chat/", "/v1/responses", "/v1/messages", "/tokenize", "/invocations"),
    *("/api/chat", "/api/generate"),
)
# Headers of a single connection, or rewritten ones.
_NOT_PASSED_ON = frozenset(
    [
        "connection",
        "keep-alive",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "expect",
        "host",
        "content-length",
        "accept-encoding",
        "x-request-id",
        "cookie",
        "x-forwarded-for",
    ]
)


def build_app(state: RouterState) -> App:
    """Make the application; its lifespan starts the router's servers."""

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
    """Describe the router and its servers."""
    state = router_of(request)
    return _json(
        {
            "name": "octavo router",
            "version": __version__,
            "servers": [
                {"name": u.name, "ready": u.ready, "requests": u.num_requests}
                for pool in state.pools
                for u in pool.upstreams
            ],
        }
    )


async def health(request: Request) -> Response:
    """Return 200: the router is alive; /ready reports on its servers."""
    return _json({"status": "ok", "reason": "ok"})


async def ready(request: Request) -> Response:
    """Return 200 if a server accepts requests."""
    state = router_of(request)
    if state.draining:
        reason = "draining"
    elif not state.ready:
        reason = "no server is ready"
    else:
        return _json({"status": "ready"})
    return _json({"status": "not ready", "reason": reason}, 503, {"Retry-After": "1"})


async def load(request: Request) -> Response:
    """Return the number of requests in flight, without probes."""
    return _json({"server_load": proxy_state_of(request).num_active})


async def version(request: Request) -> Response:
    """Return the version of Octavo."""
    return _json({"version": __version__})


async def metrics(request: Request) -> Response:
    """Return Prometheus metrics of the router."""
    return Response(proxy_state_of(request).metrics.render(), media_type=CONTENT_TYPE)


async def streams(request: Request) -> Response:
    """Reject: a stream belongs to one server, and the router does not know which."""
    raise RouteError(404, "A router does not support resuming a stream; send the request again.")


async def batches(request: Request) -> Response:
    """Reject: files and batches belong to one server, and the router does not know which."""
    raise RouteError(
        404, "A router does not pass on files and batches; send them to one of its servers."
    )


async def adapters(request: Request) -> Response:
    """Reject: an operator changes the adapters of each server."""
    raise RouteError(
        404,
        "A router does not change adapters: send the request to each of its servers, or start them "
        "with --lora-modules or --lora-resolvers.",
    )


async def view(request: Request) -> Response:
    """Stream the engine views of all servers as one."""
    state, context = proxy_state_of(request), context_of(request)
    check_view(state.config)
    keys = [(name, value) for name, value in request.headers.items() if name in KEY_HEADERS]
    return EventStream(state, state.view.watch(keys, context.api_key), None, last=b"")


async def list_requests(request: Request) -> Response:
    """Return the recent requests of all servers."""
    explain.check_explain(request)
    return await explain.list_requests(proxy_state_of(request), await job_of(request))


async def explain_request(request: Request) -> Response:
    """Explain a recent request of any server."""
    explain.check_explain(request)
    return await explain.explain_request(proxy_state_of(request), await job_of(request))


async def proxy(request: Request) -> Response:
    """Pass a request on, and the answer back."""
    state = router_of(request)
    return ProxyResponse(state, await job_of(request), state.answering, state.prefilling)


async def sounds(request: Request) -> Response:
    """Pass a form with a sound on, and the answer back."""
    state = router_of(request)
    job, _ = await sound_job_of(request)
    return ProxyResponse(state, job, state.answering)


async def realtime(websocket: WebSocket) -> None:
    """Pass a session of a stream of sound on to a server."""
    request = as_request(websocket, websocket.scope["octavo"])
    check_origin(request)
    state = router_of(request)
    proxy = SocketProxy(websocket, state, head_of(request)[1])
    num_servers = max(1, len(state.answering.upstreams))
    with state.admit(), state.sessions.hold(proxy.sender, num_servers):
        await proxy.serve(state.answering, websocket.query_params.get("model"))


async def sound_job_of(request: Request) -> tuple[Job, dict[str, bytes]]:
    """Read a form with a sound to pass on; for errors see `receive_form`.

    Returns:
        The job, and the fields of the form besides the file.
    """
    check_origin(request)
    sound = MemoryFile(request, MAX_SOUND_BYTES)
    filename, fields = await receive_form(request, sound)
    path, headers = head_of(request)
    query = request.url.query
    job = await offload(
        len(sound.data) // 1000,
        read_sound_job,
        f"{path}?{query}" if query else path,
        headers,
        fields,
        filename,
        bytes(sound.data),
        context_of(request).api_key,
    )
    return job, fields


async def job_of(request: Request) -> Job:
    """Read a request to pass on; for errors see `read_body` and `read_job`."""
    state, context = proxy_state_of(request), context_of(request)
    path, headers = head_of(request)
    body = b""
    if request.method == "POST":
        limit = state.config.max_request_bytes
        if path.startswith(_CHATS):  # the server knows whether it reads media
            limit = state.max_chat_bytes
        body = await read_body(request, limit)
    return await offload(
        len(body) // 8,
        read_job,
        request.method,
        path,
        request.url.query,
        headers,
        body,
        context.api_key,
    )


def head_of(request: Request) -> tuple[str, list[tuple[str, str]]]:
    """Return the path without the query, and the headers, of a request to pass on."""
    state, context = proxy_state_of(request), context_of(request)
    headers = [
        (name, value) for name, value in request.headers.items() if name not in _NOT_PASSED_ON
    ]
    headers += [("accept-encoding", "identity"), ("x-request-id", context.request_id)]
    if context.address is not None:  # servers share tokens fairly among addresses
        headers.append(("x-forwarded-for", context.address))
    # Still percent-encoded; a proxy may have prepended its own path.
    path = request.scope.get("raw_path", request.scope["path"].encode()).decode("latin-1")
    return path.removeprefix(state.config.root_path), headers


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
        (f"/v1/{kind}{rest}", batches, method)
        for kind in ("files", "batches")
        for rest in ("", "/{rest:path}")
        for method in ("GET", "POST", "DELETE")
    ),
    ("/v1/load_lora_adapter", adapters, "POST"),
    ("/v1/unload_lora_adapter", adapters, "POST"),
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
    ("/api/tags", proxy, "GET"),
    ("/api/ps", proxy, "GET"),
    ("/api/version", proxy, "GET"),
    OLLAMA_PROBE,
    ("/tokenize", proxy, "POST"),
    ("/detokenize", proxy, "POST"),
)
