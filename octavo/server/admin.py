"""Routes of the operator: settings, caches, sleep, pause, scaling and profiles."""

from __future__ import annotations

import os
import platform
import re
from typing import TYPE_CHECKING, Any, get_args

from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.config import HIDDEN, config_fields
from octavo.errors import RequestError
from octavo.messages import PauseMode
from octavo.server import admin_answers, answers
from octavo.server.body import check_media_type, read_model
from octavo.server.errors import AdminError, RouteError, show
from octavo.server.http_state import http_state_of
from octavo.server.middleware import context_of
from octavo.server.schema import ScaleBody
from octavo.server.state import state_of

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD")
"""Part of the name of an environment variable that is never shown."""


async def server_info(request: Request) -> Response:
    """Return settings, environment and machine, for the operator."""
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
    return answers.respond(
        answers.ServerInfo(
            vllm_config=settings if form == "json" else str(config),
            vllm_env={
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith(("OCTAVO_", "VLLM_")) and not _SECRET.search(name)
            },
            system_env={
                "octavo_version": __version__,
                "python_version": platform.python_version(),
                "os": platform.platform(),
                "machine": platform.machine(),
            },
        )
    )


async def reset_prefix_cache(request: Request) -> Response:
    """Clear the prefix cache; `success` is false while requests hold blocks.

    With `reset_running_requests=true` these start over and hold none. With `reset_external=true`
    the store of a KV connector is cleared too, unless other engines share it.
    """
    check_admin(request)
    restart, external = (
        _flag(request, name) for name in ("reset_running_requests", "reset_external")
    )
    engine = await state_of(request).get_engine()
    return answers.respond(
        admin_answers.CacheReset(success=await engine.reset_prefix_cache(restart, external))
    )


async def reset_encoder_cache(request: Request) -> Response:
    """Forget what encoders have computed; `success` is false while requests use some of it."""
    check_admin(request)
    engine = await state_of(request).get_engine()
    return answers.respond(admin_answers.CacheReset(success=await engine.reset_encoder_cache()))


async def reset_mm_cache(request: Request) -> Response:
    """Forget the media that this front end and the engines keep, with their uuids."""
    check_admin(request)
    await (await state_of(request).get_engine()).reset_mm_cache()
    return answers.respond(admin_answers.CacheReset(success=True))


def _flag(request: Request, name: str, default: str = "false") -> bool:
    """Return the value of a query parameter that is true or false.

    Raises:
        RequestError: it is neither.
    """
    value = request.query_params.get(name, default)
    if value not in ("true", "false"):
        raise RequestError(f"{name}={show(value)} is not allowed; it is true or false.", name)
    return value == "true"


async def sleep(request: Request) -> Response:
    """Put the engine to sleep; new requests wait. 404 without --enable-sleep-mode.

    `level` 0 only pauses it. 1 (the default) frees the memory of weights and KV cache. 2 also
    reads the checkpoint's current weights when the engine wakes up.

    `mode` is for running requests: abort (the default) ends them with finish_reason "abort", wait
    finishes them first, keep continues them later.
    """
    check_admin(request)
    engine = await _sleeping_engine(request)
    level = request.query_params.get("level", "1")
    if level not in ("0", "1", "2"):
        raise RequestError(f"level={show(level)} is not allowed; it is 0, 1 or 2.", "level")
    await engine.sleep(int(level), _pause_mode(request))
    return answers.respond(admin_answers.FellAsleep(status="sleeping", level=int(level)))


async def wake_up(request: Request) -> Response:
    """Wake the engine up; with `tags` (weights, kv_cache) only these parts of it."""
    check_admin(request)
    engine = await _sleeping_engine(request)
    tags = request.query_params.getlist("tags") or None
    awake = await engine.wake_up(tags)
    return answers.respond(admin_answers.WokeUp(status="awake" if awake else "sleeping", tags=tags))


async def is_sleeping(request: Request) -> Response:
    """Return true if the engine sleeps, at any level."""
    _check_operator(request)
    return answers.respond(
        admin_answers.IsSleeping(is_sleeping=await (await _sleeping_engine(request)).is_sleeping())
    )


async def pause(request: Request) -> Response:
    """Stop computing until `/resume`, and keep all memory; new requests wait.

    `mode` is for running requests: abort (the default) ends them with finish_reason "abort", wait
    finishes them first, keep continues them later. `clear_cache=false` keeps cached prefixes.
    """
    check_admin(request)
    mode = _pause_mode(request)
    clear = _flag(request, "clear_cache", "true")
    engine = await _ready_engine(request)
    await engine.pause_generation(mode=mode, clear_cache=clear)
    return answers.respond(admin_answers.Paused(status="paused"))


async def resume(request: Request) -> Response:
    """Continue after `/pause`."""
    check_admin(request)
    await (await _ready_engine(request)).resume_generation()
    return answers.respond(admin_answers.Resumed(status="resumed"))


async def is_paused(request: Request) -> Response:
    """Return true if the engine computes nothing until `/resume` or `/wake_up`."""
    _check_operator(request)
    return answers.respond(
        admin_answers.IsPaused(is_paused=await (await _ready_engine(request)).is_paused())
    )


def _pause_mode(request: Request) -> PauseMode:
    """Return the mode for running requests from the query.

    Raises:
        RequestError: the mode is unknown.
    """
    mode: Any = request.query_params.get("mode", "abort")
    if mode not in get_args(PauseMode):
        raise RequestError(f"mode={show(mode)} is not allowed; it is abort, wait or keep.", "mode")
    found: PauseMode = mode
    return found


async def scale_elastic_ep(request: Request) -> Response:
    """Change the number of engines while requests continue; answer when it is done.

    404 without --enable-elastic-ep.
    """
    engine = await _elastic_engine(request)
    body = await read_model(request, ScaleBody, state_of(request).config.max_request_bytes)
    size = body.new_data_parallel_size
    await engine.scale(size)
    return answers.respond(admin_answers.Scaled(message=f"Scaled to {size} data parallel engines"))


async def is_scaling_elastic_ep(request: Request) -> Response:
    """Return true while the number of engines changes."""
    return answers.respond(
        admin_answers.IsScaling(is_scaling_elastic_ep=(await _elastic_engine(request)).scaling)
    )


async def start_profile(request: Request) -> Response:
    """Start a profile of the engine; 404 without --profiler-dir."""
    await (await _profiled_engine(request)).start_profile()
    return answers.respond(admin_answers.ProfileStarted(status="recording"))


async def stop_profile(request: Request) -> Response:
    """End the profile; `path` is its file on the server."""
    return answers.respond(
        admin_answers.ProfileStopped(path=await (await _profiled_engine(request)).stop_profile())
    )


def _check_operator(request: Request) -> None:
    """Check that a request has an admin key, or that --enable-admin needs none.

    Raises:
        AdminError: the key is missing.
    """
    state = http_state_of(request)
    if not (context_of(request).is_admin or state.config.enable_admin):
        raise AdminError(request.url.path, has_key=state.api_keys.has_admin)


def check_admin(request: Request) -> None:
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
    check_admin(request)
    state = state_of(request)
    if state.engine_config.observability.profiler_dir is None:
        raise RouteError(404, "Profiles are off; start the server with --profiler-dir DIR.")
    return await state.get_engine()


async def _elastic_engine(request: Request) -> AsyncLLM:
    check_admin(request)
    state = state_of(request)
    if not state.engine_config.parallel.enable_elastic_ep:
        raise RouteError(
            404, "The number of engines is fixed; start the server with --enable-elastic-ep."
        )
    engine = await state.get_engine()
    await engine.wait_ready()
    return engine


async def _sleeping_engine(request: Request) -> AsyncLLM:
    """Return the engine once it is loaded, if it can sleep."""
    state = state_of(request)
    if not state.engine_config.model.enable_sleep_mode:
        raise RouteError(404, "Sleep mode is off; start the server with --enable-sleep-mode.")
    return await _ready_engine(request)


async def _ready_engine(request: Request) -> AsyncLLM:
    """Return the engine once it is loaded."""
    engine = await state_of(request).get_engine()
    await engine.wait_ready()
    return engine
