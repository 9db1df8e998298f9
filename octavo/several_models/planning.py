"""Plans of the memory of models, made in processes of their own (`plan_process.py`).

So the front process imports no engine code, and a folder whose reading fails harms no other model.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import msgspec

from octavo.config import environment_without_keys
from octavo.errors import ConfigError, OctavoError
from octavo.several_models.shares import Needs

_SECONDS = 600.0
"""Time for a plan: the description of a model on the hub has to be downloaded."""


class PlanRequest(msgspec.Struct, frozen=True):
    """Model whose memory is to be planned."""

    name: str
    settings: dict[str, Any]
    """Settings of the engine, as `LLM` takes them."""
    limit: int
    """Bytes that it may use if it is alone."""
    request_memory: int
    """Bytes for the requests of its server."""


class PlannedModel(msgspec.Struct, frozen=True):
    """Model that has been read, but not loaded."""

    needs: Needs | None
    """Its memory; None: the device measures memory after loading."""
    device: str
    """Name of the device's platform."""
    num_engines: int
    """Number of engines of its server, which divide its KV cache."""
    items: dict[str, int]
    """Bytes by purpose, without the KV cache."""
    max_model_len: int
    abilities: list[str]
    """"generate", "transcribe", and tasks of poolers such as "embed" and "classify"."""
    input_modalities: list[str]
    """Kinds of its inputs: "text", "image", "audio", "video"."""
    details: dict[str, Any]
    """Ollama's `details`."""
    nbytes: int
    """Size of the weights."""


class PlanResult(msgspec.Struct, frozen=True):
    """Output of the process: one of the two."""

    planned: PlannedModel | None = None
    error: str | None = None
    is_setting: bool = False
    """True if a setting is wrong."""


async def plan_model(request: PlanRequest) -> PlannedModel:
    """Plan the memory of a model in another process.

    Raises:
        OctavoError: the model cannot be used; the message says why.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "octavo.several_models.plan_process", str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment_without_keys(),
        start_new_session=True,  # a Ctrl-C in the terminal is for the front
    )
    try:
        async with asyncio.timeout(_SECONDS):
            out, _ = await process.communicate(msgspec.json.encode(request))
    except TimeoutError:
        raise OctavoError(f"{request.name} was not read within {_SECONDS:g} s.") from None
    finally:
        if process.returncode is None:
            process.kill()
    try:
        result = msgspec.json.decode(out, type=PlanResult)
    except msgspec.MsgspecError:
        raise OctavoError(
            f"The process that reads {request.name} ended with status {process.returncode}; see "
            "above why."
        ) from None
    if result.planned is None:
        raise (ConfigError if result.is_setting else OctavoError)(str(result.error))
    return result.planned
