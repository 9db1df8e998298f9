"""Ollama's lists of models, and the request that unloads a model."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.router.job import Job
from octavo.several_models.state import OneModel, models_of
from octavo.system import clock

_FOREVER_SECONDS = 100 * 365 * 86400


async def list_tags(request: Request) -> Response:
    """List the names of the models that could be read."""
    state = models_of(request)
    found = [
        {**_described(model, name), "modified_at": _date(state.created)}
        for model in state.models
        for name in model.names
        if model.share.planned is not None
    ]
    return _json({"models": found})


async def list_running(request: Request) -> Response:
    """List the names of the loaded models."""
    state = models_of(request)
    found = []
    for model in state.models:
        planned = model.share.planned
        if planned is None or model.shown_state != "loaded":
            continue
        seconds = _FOREVER_SECONDS
        if model.expires is not None:
            seconds = max(0, round(model.expires - time.monotonic()))
        more = {
            "expires_at": _date(int(clock.now()) + seconds),
            "size_vram": 0 if planned.needs is not None else planned.nbytes,
            "context_length": planned.max_model_len,
        }
        found += [{**_described(model, name), **more} for name in model.names]
    return _json({"models": found})


def is_unload(job: Job) -> bool:
    """Return True if a request with keep_alive=0 only unloads its model: it has no prompt."""
    path = job.path.partition("?")[0]
    if path == "/api/chat":
        return not job.fields.get("messages")
    return path == "/api/generate" and not job.fields.get("prompt")


def unloaded_answer(job: Job) -> dict[str, Any]:
    """Return the answer to a request that only unloads its model."""
    chats = job.path.startswith("/api/chat")
    part = {"message": {"role": "assistant", "content": ""}} if chats else {"response": ""}
    return {
        "model": job.fields.get("model"),
        "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
        **part,
        "done": True,
        "done_reason": "unload",
    }


def _described(model: OneModel, name: str) -> dict[str, Any]:
    planned = model.share.planned
    assert planned is not None
    identity = f"{model.share.served.path} {model.share.served.engine} {name}"
    return {
        "name": name,
        "model": name,
        "size": planned.nbytes,
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
        "details": planned.details,
    }


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
