"""Content of `/openapi.json` for each route: bodies, path parameters, answers and errors.

FastAPI cannot derive them: `octavo.server.body` parses bodies, and handlers write answers directly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, get_args

from fastapi import FastAPI
from pydantic import BaseModel, RootModel, TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from starlette.responses import Response

from octavo import __version__
from octavo.server import (
    admin_answers,
    answers,
    anthropic_answers,
    audio_answers,
    explain_answers,
    file_answers,
    generation_answers,
    ollama_answers,
    pooling_answers,
    response_answers,
)
from octavo.server.anthropic_schema import CountTokensBody, MessagesBody
from octavo.server.audio_schema import AudioBody
from octavo.server.batches import CreateBatchBody
from octavo.server.field_docs import describe
from octavo.server.file_store import Purpose
from octavo.server.files import MAX_EXPIRY, MIN_EXPIRY
from octavo.server.ollama import MEDIA_TYPE
from octavo.server.ollama_schema import OllamaChatBody, OllamaGenerateBody, ShowBody
from octavo.server.pooling_schema import (
    ClassifyBody,
    CohereEmbedBody,
    EmbeddingsBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    SimilarityBody,
    TEIEmbedBody,
    TEIInputsBody,
    TEIPredictBody,
    TEIRerankBody,
)
from octavo.server.responses_schema import (
    ConversationBody,
    ConversationItemsBody,
    ConversationUpdateBody,
    InputTokensBody,
    ResponseBody,
)
from octavo.server.schema import (
    BatchChatBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    LoadAdapterBody,
    ScaleBody,
    TokenizeBody,
    UnloadAdapterBody,
)

_SCHEMA_REF = "#/components/schemas/{model}"
# Errors of all routes (not HTTP, Host header), of routes with a key (also draining), of bodies.
_ALWAYS = (400, 421, 500)
_GUARDED = (*_ALWAYS, 401, 503)
_WITH_BODY = (*_GUARDED, 404, 408, 413, 415, 429)
_ADMIN = (*_GUARDED, 403, 415)
_NAMED = (*_GUARDED, 404)
_FLAG = ("false", "true")
_PAGES = {"limit": ("20",), "order": ("desc", "asc")}
_TEXT = ()


class InvocationBody(RootModel[ChatBody | CompletionBody]):
    """Body of POST /invocations."""


class RenderedPrompts(RootModel[list[answers.RenderedPrompt]]):
    """POST /v1/completions/render."""


class InvocationAnswer(
    RootModel[generation_answers.ChatAnswer | generation_answers.CompletionAnswer]
):
    """POST /invocations."""


class InvocationChunk(RootModel[generation_answers.ChatChunk | generation_answers.CompletionChunk]):
    """Event of a stream of /invocations."""


class RerankInput(RootModel[RerankBody | TEIRerankBody]):
    """Body of POST /rerank."""


class RerankOutput(RootModel[pooling_answers.RerankAnswer | list[pooling_answers.TEIRank]]):
    """POST /rerank."""


class TranscriptionOutput(
    RootModel[audio_answers.Transcription | audio_answers.VerboseTranscription]
):
    """POST /v1/audio/transcriptions; text, srt and vtt are plain text."""


class TranscriptionEvent(
    RootModel[audio_answers.TranscriptionDelta | audio_answers.TranscriptionDone]
):
    """Event of a stream of /v1/audio/transcriptions."""


class CohereOutput(RootModel[pooling_answers.CohereVectors | pooling_answers.CohereVectorsByType]):
    """POST /v1/embed."""


class Vectors(RootModel[list[list[float]]]):
    """POST /embed."""


class TokenVectors(RootModel[list[list[list[float]]]]):
    """POST /embed_all."""


class SparseVectors(RootModel[list[list[pooling_answers.TEISparseEntry]]]):
    """POST /embed_sparse."""


class Predictions(
    RootModel[list[pooling_answers.TEIPrediction] | list[list[pooling_answers.TEIPrediction]]]
):
    """POST /predict; a list of lists for a list of lists."""


class Similarities(RootModel[list[float]]):
    """POST /similarity."""


@dataclass(frozen=True)
class Operation:
    """Documentation of one route."""

    answer: type[object] | None
    """Class of the answer; None: plain text, or only `chunk`."""
    errors: Sequence[int]
    body: type[BaseModel] | None = None
    chunk: type[object] | None = None
    """Class of the data of a stream's events; None if the route cannot stream."""
    error: type[object] = answers.ErrorAnswer
    """Class of the errors."""
    states: Sequence[int] = (200,)
    """Statuses of responses with `answer`."""
    query: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Query parameters and their values, the default first; one value: any integer >= 0; none: any
    text."""
    form: Mapping[str, Any] | None = None
    """Schema of a form."""

    def responses(self) -> dict[int | str, dict[str, Any]]:
        """Return the `responses` of FastAPI's route."""
        content: dict[str, Any] = {}
        if self.answer is None and self.chunk is None:
            content = {"text/plain": {"schema": {"type": "string"}}}
        elif self.answer is not None:
            content = {"application/json": {"schema": _ref(self.answer)}}
        if self.error is ollama_answers.OllamaError and self.chunk is not None:
            line = {"anyOf": [_ref(self.chunk), _ref(self.error)]}
            text = "Lines of JSON (x-event-schema), except with stream=false."
            schema = {"type": "string", "description": text, "x-event-schema": line}
            content[MEDIA_TYPE] = {"schema": schema}
        elif self.chunk is not None:
            content["text/event-stream"] = {
                "schema": {
                    "type": "string",
                    "description": "Server-sent events, with stream=true. The data of each is "
                    "JSON (x-event-schema); the last one is [DONE]. With --resume-grace each has "
                    "an id, which a later request passes in the header Last-Event-ID.",
                    "x-event-schema": {"anyOf": [_ref(self.chunk), _ref(self.error)]},
                }
            }
        error = {"application/json": {"schema": _ref(self.error)}}
        found: dict[int | str, dict[str, Any]] = {s: _response(s, content) for s in self.states}
        if self.answer is None and self.chunk is not None:
            found[204] = _response(204, {})
        return found | {s: _response(s, error) for s in sorted(self.errors)}

    def extra(self, path: str) -> dict[str, Any] | None:
        """Return the rest of the documentation, for the route's `openapi_extra`."""
        extra: dict[str, Any] = {}
        if self.body is not None:
            content = {"application/json": {"schema": _ref(self.body)}}
            extra["requestBody"] = {"required": True, "content": content}
        if self.form is not None:
            form = {"multipart/form-data": {"schema": self.form}}
            extra["requestBody"] = {"required": True, "content": form}
        for name in re.findall(r"{(\w+)", path):
            parameter = {"name": name, "in": "path", "required": True}
            extra.setdefault("parameters", []).append({**parameter, "schema": {"type": "string"}})
        for name, values in self.query.items():
            schema: dict[str, Any] = {"type": "string"}
            if len(values) > 1:
                schema |= {"enum": values, "default": values[0]}
            elif values:
                schema = {"type": "integer", "minimum": 0, "default": int(values[0])}
            extra.setdefault("parameters", []).append(
                {"name": name, "in": "query", "schema": schema}
            )
        return extra or None


UPLOAD: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": get_args(Purpose)},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": MIN_EXPIRY,
            "maximum": MAX_EXPIRY,
        },
    },
}


def _sound_form() -> dict[str, Any]:
    """Return the schema of the form of a sound file."""
    schema = AudioBody.model_json_schema()
    properties = {"file": {"type": "string", "format": "binary"}, **schema["properties"]}
    granularities = properties.pop("timestamp_granularities")
    del properties["explain"]
    properties["timestamp_granularities[]"] = granularities
    return {"type": "object", "required": ["file"], "properties": properties}


SOUND = _sound_form()

OPERATIONS: dict[str, Operation] = {
    "/": Operation(answers.Index, _GUARDED),
    "/health": Operation(answers.Health, _ALWAYS, states=(200, 503)),
    "/ping": Operation(answers.Health, _ALWAYS, states=(200, 503)),
    "/ready": Operation(answers.Readiness, _ALWAYS, states=(200, 503)),
    "/version": Operation(answers.Version, _ALWAYS),
    "/load": Operation(answers.Load, _ALWAYS),
    "/metrics": Operation(None, _ALWAYS),
    "/v1/models": Operation(answers.ModelList, _GUARDED),
    "/v1/models/{model:path}": Operation(answers.ModelCard, (*_GUARDED, 404)),
    "/v1/completions": Operation(
        generation_answers.CompletionAnswer,
        _WITH_BODY,
        CompletionBody,
        generation_answers.CompletionChunk,
    ),
    "/v1/chat/completions": Operation(
        generation_answers.ChatAnswer, _WITH_BODY, ChatBody, generation_answers.ChatChunk
    ),
    "/v1/chat/completions/batch": Operation(
        generation_answers.ChatAnswer, _WITH_BODY, BatchChatBody
    ),
    "/v1/completions/render": Operation(RenderedPrompts, _WITH_BODY, CompletionBody),
    "/v1/chat/completions/render": Operation(answers.RenderedPrompt, _WITH_BODY, ChatBody),
    "/v1/audio/transcriptions": Operation(
        TranscriptionOutput, (*_WITH_BODY, 403), chunk=TranscriptionEvent, form=SOUND
    ),
    "/v1/audio/translations": Operation(
        TranscriptionOutput, (*_WITH_BODY, 403), chunk=TranscriptionEvent, form=SOUND
    ),
    "/v1/embeddings": Operation(pooling_answers.EmbeddingsAnswer, _WITH_BODY, EmbeddingsBody),
    "/pooling": Operation(pooling_answers.PoolingAnswer, _WITH_BODY, PoolingBody),
    "/classify": Operation(pooling_answers.ClassifyAnswer, _WITH_BODY, ClassifyBody),
    "/v1/classify": Operation(pooling_answers.ClassifyAnswer, _WITH_BODY, ClassifyBody),
    "/score": Operation(pooling_answers.ScoreAnswer, _WITH_BODY, ScoreBody),
    "/v1/score": Operation(pooling_answers.ScoreAnswer, _WITH_BODY, ScoreBody),
    "/rerank": Operation(RerankOutput, _WITH_BODY, RerankInput),
    "/v1/rerank": Operation(RerankOutput, _WITH_BODY, RerankInput),
    "/v2/rerank": Operation(RerankOutput, _WITH_BODY, RerankInput),
    "/v1/embed": Operation(CohereOutput, _WITH_BODY, CohereEmbedBody),
    "/v2/embed": Operation(pooling_answers.CohereVectorsByType, _WITH_BODY, CohereEmbedBody),
    "/embed": Operation(Vectors, _WITH_BODY, TEIEmbedBody, error=pooling_answers.TEIError),
    "/embed_all": Operation(
        TokenVectors, _WITH_BODY, TEIInputsBody, error=pooling_answers.TEIError
    ),
    "/embed_sparse": Operation(
        SparseVectors, _WITH_BODY, TEIInputsBody, error=pooling_answers.TEIError
    ),
    "/predict": Operation(Predictions, _WITH_BODY, TEIPredictBody, error=pooling_answers.TEIError),
    "/similarity": Operation(
        Similarities, _WITH_BODY, SimilarityBody, error=pooling_answers.TEIError
    ),
    "/info": Operation(pooling_answers.TEIInfo, _GUARDED),
    "/v1/messages": Operation(
        anthropic_answers.AnthropicMessage,
        _WITH_BODY,
        MessagesBody,
        chunk=anthropic_answers.AnthropicEvent,
        error=anthropic_answers.AnthropicError,
    ),
    "/v1/messages/count_tokens": Operation(
        anthropic_answers.InputTokens,
        _WITH_BODY,
        CountTokensBody,
        error=anthropic_answers.AnthropicError,
    ),
    "/v1/responses": Operation(
        response_answers.ResponseObject, _WITH_BODY, ResponseBody, response_answers.ResponseEvent
    ),
    "/v1/responses/input_tokens": Operation(
        response_answers.ResponseInputTokens, _WITH_BODY, InputTokensBody
    ),
    "GET /v1/responses/{response_id}": Operation(
        response_answers.ResponseObject,
        _NAMED,
        chunk=response_answers.ResponseEvent,
        query={"stream": _FLAG, "starting_after": ("0",)},
    ),
    "DELETE /v1/responses/{response_id}": Operation(answers.Deleted, _NAMED),
    "/v1/responses/{response_id}/cancel": Operation(
        response_answers.ResponseObject, (*_NAMED, 415)
    ),
    "/v1/responses/{response_id}/input_items": Operation(
        response_answers.ItemList, _NAMED, query=_PAGES
    ),
    "/v1/conversations": Operation(response_answers.Conversation, _WITH_BODY, ConversationBody),
    "GET /v1/conversations/{conversation_id}": Operation(response_answers.Conversation, _NAMED),
    "POST /v1/conversations/{conversation_id}": Operation(
        response_answers.Conversation, _WITH_BODY, ConversationUpdateBody
    ),
    "DELETE /v1/conversations/{conversation_id}": Operation(answers.Deleted, _NAMED),
    "GET /v1/conversations/{conversation_id}/items": Operation(
        response_answers.ItemList, _NAMED, query=_PAGES
    ),
    "POST /v1/conversations/{conversation_id}/items": Operation(
        response_answers.ItemList, _WITH_BODY, ConversationItemsBody
    ),
    "GET /v1/conversations/{conversation_id}/items/{item_id}": Operation(
        response_answers.Item, _NAMED
    ),
    "DELETE /v1/conversations/{conversation_id}/items/{item_id}": Operation(
        response_answers.Conversation, _NAMED
    ),
    "/api/chat": Operation(
        ollama_answers.OllamaChatAnswer,
        _WITH_BODY,
        OllamaChatBody,
        ollama_answers.OllamaChatAnswer,
        ollama_answers.OllamaError,
    ),
    "/api/generate": Operation(
        ollama_answers.OllamaGenerateAnswer,
        _WITH_BODY,
        OllamaGenerateBody,
        ollama_answers.OllamaGenerateAnswer,
        ollama_answers.OllamaError,
    ),
    "/api/embed": Operation(
        ollama_answers.OllamaEmbedAnswer,
        _WITH_BODY,
        OllamaEmbedBody,
        error=ollama_answers.OllamaError,
    ),
    "/api/embeddings": Operation(
        ollama_answers.OllamaEmbeddingsAnswer,
        _WITH_BODY,
        OllamaEmbeddingsBody,
        error=ollama_answers.OllamaError,
    ),
    "/api/tags": Operation(ollama_answers.OllamaTags, _GUARDED, error=ollama_answers.OllamaError),
    "/api/ps": Operation(ollama_answers.OllamaRunning, _GUARDED, error=ollama_answers.OllamaError),
    "/api/show": Operation(
        ollama_answers.OllamaShown, _WITH_BODY, ShowBody, error=ollama_answers.OllamaError
    ),
    "/api/version": Operation(
        ollama_answers.OllamaVersion, _GUARDED, error=ollama_answers.OllamaError
    ),
    "/inference/v1/generate": Operation(
        generation_answers.TokensAnswer, _WITH_BODY, GenerateBody, generation_answers.TokensChunk
    ),
    "/invocations": Operation(InvocationAnswer, _WITH_BODY, InvocationBody, InvocationChunk),
    "/v1/files": Operation(file_answers.FileObject, (*_WITH_BODY, 403, 507), form=UPLOAD),
    "/v1/files/{file_id}": Operation(file_answers.FileObject, (*_GUARDED, 404)),
    "/v1/files/{file_id}/content": Operation(None, (*_GUARDED, 404)),
    "/v1/batches": Operation(file_answers.Batch, (*_WITH_BODY, 507), CreateBatchBody),
    "/v1/batches/{batch_id}": Operation(file_answers.Batch, (*_GUARDED, 404)),
    "/v1/batches/{batch_id}/cancel": Operation(file_answers.Batch, (*_GUARDED, 403, 404, 409, 507)),
    "/v1/streams/{stream_id:path}": Operation(
        None,
        (*_GUARDED, 404),
        chunk=InvocationChunk,
        query={"from": ("0",)},
    ),
    "/v1/engine/view": Operation(None, (*_GUARDED, 404, 429), chunk=answers.ViewEvent),
    "/v1/requests": Operation(explain_answers.RecentRequests, _GUARDED),
    "/v1/requests/{request_id:path}/explain": Operation(
        explain_answers.Explanation, (*_GUARDED, 404), query={"simulate": ("true", "false")}
    ),
    "/tokenize": Operation(answers.Tokens, _WITH_BODY, TokenizeBody),
    "/detokenize": Operation(answers.Text, _WITH_BODY, DetokenizeBody),
    "/tokenizer_info": Operation(answers.TokenizerInfo, (*_GUARDED, 404)),
    "/server_info": Operation(
        answers.ServerInfo, (*_GUARDED, 403), query={"config_format": ("text", "json")}
    ),
    "/reset_prefix_cache": Operation(
        admin_answers.CacheReset,
        _ADMIN,
        query={"reset_running_requests": _FLAG, "reset_external": _FLAG},
    ),
    "/reset_encoder_cache": Operation(admin_answers.CacheReset, _ADMIN),
    "/reset_mm_cache": Operation(admin_answers.CacheReset, _ADMIN),
    "/sleep": Operation(
        admin_answers.FellAsleep,
        (*_ADMIN, 404),
        query={"level": ("1", "0", "2"), "mode": ("abort", "wait", "keep")},
    ),
    "/wake_up": Operation(
        admin_answers.WokeUp,
        (*_ADMIN, 404),
        query={"tags": ("", "weights", "kv_cache", "scheduling")},
    ),
    "/is_sleeping": Operation(admin_answers.IsSleeping, (*_GUARDED, 403, 404)),
    "/pause": Operation(
        admin_answers.Paused,
        _ADMIN,
        query={"mode": ("abort", "wait", "keep"), "clear_cache": ("true", "false")},
    ),
    "/resume": Operation(admin_answers.Resumed, _ADMIN),
    "/is_paused": Operation(admin_answers.IsPaused, (*_GUARDED, 403)),
    "/v1/load_lora_adapter": Operation(answers.ModelCard, (*_WITH_BODY, 403, 404), LoadAdapterBody),
    "/v1/unload_lora_adapter": Operation(
        answers.AdapterUnloaded, (*_WITH_BODY, 403, 404), UnloadAdapterBody
    ),
    "/scale_elastic_ep": Operation(admin_answers.Scaled, (*_WITH_BODY, 403, 409), ScaleBody),
    "/is_scaling_elastic_ep": Operation(admin_answers.IsScaling, (*_ADMIN, 404)),
    "/start_profile": Operation(admin_answers.ProfileStarted, (*_ADMIN, 404, 409)),
    "/stop_profile": Operation(admin_answers.ProfileStopped, (*_ADMIN, 404, 409)),
    "GET /v1/files": Operation(
        file_answers.FileList,
        (*_GUARDED, 404),
        query={"purpose": _TEXT, "order": ("desc", "asc"), "after": _TEXT, "limit": ("10000",)},
    ),
    "DELETE /v1/files/{file_id}": Operation(file_answers.FileDeleted, (*_GUARDED, 404, 409, 507)),
    "GET /v1/batches": Operation(
        file_answers.BatchList,
        (*_GUARDED, 404),
        query={**_PAGES, "after": _TEXT},
    ),
}
"""Documentation by path, or by method and path ("DELETE /v1/...")."""


def operation_of(path: str, method: str) -> Operation:
    """Return the documentation of a route."""
    return OPERATIONS.get(f"{method} {path}") or OPERATIONS[path]


def describe_routes(
    routes: Iterable[tuple[str, Callable[..., Any], str]],
) -> dict[str, Any]:
    """Return the OpenAPI description of routes: path, function and method of each."""
    app = FastAPI(
        title="Octavo", version=__version__, description="OpenAI-compatible inference server."
    )
    for path, endpoint, method in routes:
        operation = operation_of(path, method)
        app.add_api_route(
            path,
            endpoint,
            methods=[method],
            response_class=Response,
            responses=operation.responses(),
            openapi_extra=operation.extra(path),
        )
    models: list[type[object]] = [
        answers.ErrorAnswer,
        anthropic_answers.AnthropicError,
        ollama_answers.OllamaError,
        pooling_answers.TEIError,
    ]
    for operation in OPERATIONS.values():
        found = (operation.body, operation.answer, operation.chunk)
        models += [model for model in found if model is not None and model not in models]
    inputs: list[tuple[str, JsonSchemaMode, TypeAdapter[object]]] = [
        (model.__name__, "validation", TypeAdapter(model)) for model in models
    ]
    _, schemas = TypeAdapter.json_schemas(inputs, ref_template=_SCHEMA_REF)
    describe(schemas["$defs"])
    description = app.openapi()
    description.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    return description


def _ref(model: type[object]) -> dict[str, str]:
    return {"$ref": _SCHEMA_REF.format(model=model.__name__)}


def _response(status: int, content: dict[str, Any]) -> dict[str, Any]:
    return {"description": HTTPStatus(status).phrase, "content": content}
