"""Answers of the API: what all have in common, and the answers of the small routes.

The server builds and encodes them, and `/openapi.json` describes them. Those of a group of routes
are in a module of their own, such as `generation_answers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NotRequired

import msgspec
from pydantic import ConfigDict, with_config
from starlette.responses import Response
from typing_extensions import TypedDict


def _add_defaults(schema: dict[str, Any]) -> None:
    """Add the default null to the optional fields of a schema."""
    for name in schema["properties"].keys() - schema.get("required", ()):
        schema["properties"][name]["default"] = None


@with_config(ConfigDict(extra="forbid", strict=True, json_schema_extra=_add_defaults))
class Answer(TypedDict):
    """Base of the answers; it forbids other fields."""


class ErrorDetail(Answer):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    """Field of the request that is wrong."""
    code: str | None


class ErrorAnswer(Answer):
    """Body of every error."""

    error: ErrorDetail


class Index(Answer):
    """GET /."""

    name: str
    version: str
    models: list[str]
    endpoints: list[str]


class Version(Answer):
    """GET /version."""

    version: str


class Health(Answer):
    """GET /health."""

    status: Literal["ok", "unhealthy"]
    reason: str


class Readiness(Answer):
    """GET /ready."""

    status: Literal["ready", "not ready"]
    reason: NotRequired[str | None]


class Load(Answer):
    """GET /load."""

    server_load: int


class ServerInfo(Answer):
    """GET /server_info."""

    vllm_config: str | dict[str, dict[str, Any]]
    """The engine's settings by section; as text, only the changed ones."""
    vllm_env: dict[str, str]
    system_env: dict[str, str]


@with_config(ConfigDict(extra="allow", strict=True))
class TokenizerInfo(TypedDict):
    """GET /tokenizer_info: contents of tokenizer_config.json."""

    tokenizer_class: str
    chat_template: str | None


class ModelCard(Answer):
    """One served name, or an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    """Of an adapter: the name of its model."""
    max_model_len: int | None
    permission: list[str]
    input_modalities: list[str] | None
    """Kinds of its inputs: "text", "image", "audio"; null while they are unknown."""


class AdapterUnloaded(Answer):
    """POST /v1/unload_lora_adapter."""

    id: str
    object: Literal["model"]
    deleted: bool


class ModelList(Answer):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Answer):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


@with_config(ConfigDict(extra="allow", strict=True))
class ViewEvent(TypedDict, total=False):
    """Event of GET /v1/engine/view; docs/engine_view.md describes the fields of each kind."""

    time: float
    """Time of the event, in seconds since 1970."""


class Deleted(Answer):
    """Deleted object."""

    id: str
    object: Literal["response", "conversation.deleted"]
    deleted: Literal[True]


class Text(Answer):
    """POST /detokenize."""

    prompt: str


class RenderedPlace(Answer):
    """Tokens of a rendered prompt that stand for a picture, or a part of a sound."""

    offset: int
    length: int


class RenderedFeatures(Answer):
    """Pictures and sounds of a rendered prompt."""

    mm_hashes: dict[str, list[str]]
    """Identifiers of the contents, by modality."""
    mm_placeholders: dict[str, list[RenderedPlace]]


class RenderedPrompt(Answer):
    """POST /v1/chat/completions/render: a body for POST /inference/v1/generate."""

    request_id: str
    model: str
    prompt_text: str | None
    """Prompt as text; null: the client sent token ids."""
    token_ids: list[int]
    sampling_params: dict[str, Any]
    """Parameters, without those that have the default of that route."""
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: dict[str, Any] | None
    features: NotRequired[RenderedFeatures | None]
    """Pictures and sounds, if there are some. POST /inference/v1/generate refuses them; send the
    chat."""


def respond(
    answer: Mapping[str, object], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return an answer as a response."""
    return Response(msgspec.json.encode(answer), status, headers, "application/json")
