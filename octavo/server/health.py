"""State of the server: health, load, version and metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo import __version__
from octavo.observability.metrics import CONTENT_TYPE
from octavo.server import answers
from octavo.server.state import state_of


async def index(request: Request) -> Response:
    """Return the name, version, models and routes of this server."""
    state = state_of(request)
    return answers.respond(
        answers.Index(
            name="octavo",
            version=__version__,
            models=state.model_names,
            endpoints=[
                f"{method} {route.path}"
                for route in request.app.routes
                if isinstance(route, Route)
                for method in sorted((route.methods or set()) - {"HEAD"})
            ],
        )
    )


async def health(request: Request) -> Response:
    """Return 200 while the server makes progress (also while it loads), else 503 and the reason."""
    state = state_of(request)
    ok, reason = True, "starting"
    if state.failure is not None:
        ok, reason = False, str(state.failure)
    elif state.engine is not None:
        found = state.engine.health()
        ok, reason = found.ok, found.reason
    return answers.respond(
        answers.Health(status="ok" if ok else "unhealthy", reason=reason), 200 if ok else 503
    )


async def ready(request: Request) -> Response:
    """Return 200 if requests start at once; 503 while loading, asleep, draining or unhealthy."""
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
        return answers.respond(answers.Readiness(status="ready"))
    return answers.respond(
        answers.Readiness(status="not ready", reason=reason), 503, {"Retry-After": "1"}
    )


async def load(request: Request) -> Response:
    """Return the number of requests in progress, without probes."""
    return answers.respond(answers.Load(server_load=state_of(request).num_active))


async def version(request: Request) -> Response:
    """Return the version of Octavo."""
    return answers.respond(answers.Version(version=__version__))


async def metrics(request: Request) -> Response:
    """Return Prometheus metrics."""
    engine = state_of(request).engine
    page = b"" if engine is None else await engine.render_metrics()
    return Response(page, media_type=CONTENT_TYPE)
