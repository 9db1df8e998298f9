"""GET /v1/requests and /v1/requests/ID/explain for all servers of a process that passes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.router.job import Job
from octavo.router.pool import Upstream
from octavo.router.proxy import Answer
from octavo.router.proxy_state import ProxyState, proxy_state_of
from octavo.server.errors import RouteError, UnavailableError
from octavo.server.middleware import context_of

# Maximum seconds in which a server answers; it simulates for a second at most.
_SECONDS = 10.0


def check_explain(request: Request) -> None:
    """Check that the client may see the requests of all servers.

    Raises:
        RouteError: there are several keys, which servers may not be able to tell apart.
    """
    state = proxy_state_of(request)
    if len(state.api_keys) > 1 and not context_of(request).is_admin:
        raise RouteError(
            404,
            "With several API keys, only an admin key sees requests here, since the servers may "
            "not tell the keys apart; ask the server of the request.",
        )


async def list_requests(state: ProxyState, job: Job) -> Response:
    """Return the recent requests of all servers, the newest first.

    Args:
        state: the process that passes requests on.
        job: the request for the list.

    Raises:
        UnavailableError: no server answered.
    """
    found = await _ask_all(state, job)
    lists = [msgspec.json.decode(answer.body)["data"] for answer in found if answer.status == 200]
    if not lists:
        return _pass_back(found[0])
    rows = sorted((row for rows in lists for row in rows), key=lambda row: -row["created"])
    body = msgspec.json.encode({"object": "list", "data": rows})
    return Response(body, media_type="application/json")


async def explain_request(state: ProxyState, job: Job) -> Response:
    """Return the explanation of a request by the server that knows it.

    For arguments and errors see `list_requests`.
    """
    found = await _ask_all(state, job)
    return _pass_back(min(found, key=lambda answer: answer.status != 200))


async def _ask_all(state: ProxyState, job: Job) -> Sequence[Answer]:
    """Return the answers of the servers that are ready: at least one."""
    upstreams = [u for pool in state.pools for u in pool.upstreams if u.ready]
    answers = await asyncio.gather(*(_ask(upstream, job) for upstream in upstreams))
    if found := [answer for answer in answers if answer is not None]:
        return found
    raise UnavailableError("No server answers now; try again later.")


async def _ask(upstream: Upstream, job: Job) -> Answer | None:
    try:
        async with asyncio.timeout(_SECONDS):
            response = await upstream.ask(job.method, job.path, job.headers, b"")
            try:
                return Answer(response.status, [], await response.read())
            finally:
                response.close()
    except (aiohttp.ClientError, OSError):  # also the timeout
        return None


def _pass_back(answer: Answer) -> Response:
    return Response(answer.body, answer.status, media_type="application/json")
