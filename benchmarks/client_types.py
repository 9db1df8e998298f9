"""Types for the answers of each route, of the clients' own packages.

`openai` and `ollama` must be installed. `anthropic` may be: `pip install anthropic`.
"""

from __future__ import annotations

import json
from typing import Any

import ollama._types as ollama
import openai.types as openai
from openai.types import chat, conversations, responses
from openai.types.conversations.conversation_item import ConversationItem
from openai.types.conversations.conversation_item_list import ConversationItemList
from openai.types.responses.response_item_list import ResponseItemList
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter, ValidationError

try:
    import anthropic.types as anthropic
except ImportError:  # then the server's own description is the only one of these routes
    anthropic = None  # type: ignore[assignment]

Json = dict[str, Any]


class _Error(BaseModel):
    error: ErrorObject


class _OllamaError(BaseModel):
    error: str


class _TEIError(BaseModel):
    error: str
    error_type: str


class _Files(BaseModel):
    object: str
    data: list[openai.FileObject]
    has_more: bool


class _Batches(BaseModel):
    object: str
    data: list[openai.Batch]
    has_more: bool


class _Models(BaseModel):
    object: str
    data: list[openai.Model]


ANSWERS: dict[str, Any] = {
    "POST /v1/completions": openai.Completion,
    "POST /v1/chat/completions": chat.ChatCompletion,
    "GET /v1/models": _Models,
    "GET /v1/models/{model}": openai.Model,
    "POST /v1/responses": responses.Response,
    "POST /v1/responses/input_tokens": responses.InputTokenCountResponse,
    "GET /v1/responses/{response_id}": responses.Response,
    "POST /v1/responses/{response_id}/cancel": responses.Response,
    "GET /v1/responses/{response_id}/input_items": ResponseItemList,
    "POST /v1/conversations": conversations.Conversation,
    "GET /v1/conversations/{conversation_id}": conversations.Conversation,
    "POST /v1/conversations/{conversation_id}": conversations.Conversation,
    "DELETE /v1/conversations/{conversation_id}": conversations.ConversationDeletedResource,
    "GET /v1/conversations/{conversation_id}/items": ConversationItemList,
    "POST /v1/conversations/{conversation_id}/items": ConversationItemList,
    "GET /v1/conversations/{conversation_id}/items/{item_id}": ConversationItem,
    "DELETE /v1/conversations/{conversation_id}/items/{item_id}": conversations.Conversation,
    "POST /v1/files": openai.FileObject,
    "GET /v1/files": _Files,
    "GET /v1/files/{file_id}": openai.FileObject,
    "DELETE /v1/files/{file_id}": openai.FileDeleted,
    "POST /v1/batches": openai.Batch,
    "GET /v1/batches": _Batches,
    "GET /v1/batches/{batch_id}": openai.Batch,
    "POST /v1/batches/{batch_id}/cancel": openai.Batch,
    "POST /api/chat": ollama.ChatResponse,
    "POST /api/generate": ollama.GenerateResponse,
    "POST /api/embed": ollama.EmbedResponse,
    "POST /api/embeddings": ollama.EmbeddingsResponse,
    "GET /api/tags": ollama.ListResponse,
    "GET /api/ps": ollama.ProcessResponse,
    "POST /api/show": ollama.ShowResponse,
}
"""Type of the answer by method and route."""
EVENTS: dict[str, Any] = {
    "POST /v1/completions": openai.Completion,
    "POST /v1/chat/completions": chat.ChatCompletionChunk,
    "POST /v1/responses": responses.ResponseStreamEvent,
    "GET /v1/responses/{response_id}": responses.ResponseStreamEvent,
    "POST /api/chat": ollama.ChatResponse,
    "POST /api/generate": ollama.GenerateResponse,
}
"""Type of the data of a stream's events by method and route."""
if anthropic is not None:
    ANSWERS["POST /v1/messages"] = anthropic.Message
    ANSWERS["POST /v1/messages/count_tokens"] = anthropic.MessageTokensCount
    EVENTS["POST /v1/messages"] = anthropic.RawMessageStreamEvent


_TEI = ("/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity")


def error_type(route: str) -> Any:
    """Return the type of the errors of a route."""
    if "/v1/messages" in route:
        return Any if anthropic is None else anthropic.ErrorResponse
    if route.partition(" ")[2] in _TEI:
        return _TEIError
    return _OllamaError if " /api/" in route else _Error


def check(kind: Any, data: bytes | str, body: Json) -> None:
    """Check an answer or an event against a client's type.

    Args:
        kind: one of the types here.
        data: JSON.
        body: the request, whose fields of vLLM change some of OpenAI's values.

    Raises:
        ValidationError: it does not have the type.
    """
    adapter = TypeAdapter(kind)
    # Ollama's client reads some times and durations from texts and numbers of other kinds.
    strict = not getattr(kind, "__module__", "").startswith("ollama")
    found = json.loads(data)
    if isinstance(found, dict) and isinstance(found.get("choices"), list):
        _hide(found, body)
    # Anthropic's documentation has this type of error, the package has not.
    is_error = anthropic is not None and kind is anthropic.ErrorResponse
    if is_error and found["error"]["type"] == "request_too_large":
        found["error"]["type"] = "invalid_request_error"
    adapter.validate_json(json.dumps(found), strict=strict)


def _hide(found: Json, body: Json) -> None:
    """Hide what OpenAI's own servers send against their types, or what vLLM's fields ask for."""
    for choice in found["choices"]:
        if found["object"] == "text_completion" and choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"  # in a stream
        if choice["finish_reason"] == "abort":  # by /pause and /sleep, as with vLLM
            choice["finish_reason"] = "length"
        message = choice.get("message") or choice.get("delta") or {}
        if body.get("add_generation_prompt") is False or body.get("continue_final_message"):
            message.pop("role", None)
            if "message" in choice:
                message["role"] = "assistant"


__all__ = ["ANSWERS", "EVENTS", "ValidationError", "check", "error_type"]
