"""Answers of Ollama's API. Durations are in nanoseconds."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from octavo.server.answers import Answer
from octavo.server.explain_answers import Explained
from octavo.server.generation_answers import ChatLogprob

DoneReason = Literal["stop", "length", "load"]


class OllamaError(Answer):
    """Body of every error, and line of a stream that failed."""

    error: str


class OllamaVersion(Answer):
    """GET /api/version."""

    version: str


class CalledTool(Answer):
    """Function of a call."""

    index: int
    """Number of the call in the message."""
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(Answer):
    """Call of a tool."""

    id: str
    function: CalledTool


class OllamaMessage(Answer):
    """Message of the model, or a new part of it."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaToolCall]]


class OllamaAnswer(Explained):
    """Fields of both kinds of answers, and of the lines of their streams."""

    model: str
    """Name of the model as in the request."""
    created_at: str
    done: bool
    """False in all lines of a stream except the last one."""
    done_reason: NotRequired[DoneReason]
    total_duration: NotRequired[int]
    """From the arrival of the request."""
    load_duration: NotRequired[int]
    """From the arrival to the first step that computes the prompt."""
    prompt_eval_count: NotRequired[int]
    """Tokens of the prompt, also those that were cached."""
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    """Tokens of the answer."""
    eval_duration: NotRequired[int]
    logprobs: NotRequired[list[ChatLogprob]]


class OllamaChatAnswer(OllamaAnswer):
    """POST /api/chat, whole or a line of its stream."""

    message: OllamaMessage


class OllamaGenerateAnswer(OllamaAnswer):
    """POST /api/generate, whole or a line of its stream."""

    response: str
    thinking: NotRequired[str]


class OllamaDetails(Answer):
    """Kind of a model."""

    parent_model: str
    format: Literal["gguf", "safetensors"]
    family: str
    families: list[str]
    parameter_size: str
    """Number of parameters, such as 7.6B."""
    quantization_level: str
    """Form of most weights, such as Q4_K or BF16."""


class OllamaModel(Answer):
    """Served model."""

    name: str
    model: str
    modified_at: str
    size: int
    """Bytes of the weights in memory."""
    digest: str
    """Hash that changes when the answers to the same request may change."""
    details: OllamaDetails


class OllamaEmbedAnswer(Answer):
    """POST /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    """Nanoseconds until the model was loaded."""
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(Answer):
    """POST /api/embeddings."""

    embedding: list[float]


class OllamaTags(Answer):
    """GET /api/tags."""

    models: list[OllamaModel]


class OllamaRunningModel(Answer):
    """Model that is loaded."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    """Far in the future: the model stays loaded."""
    size_vram: int
    """Bytes of the weights in the memory of a GPU."""
    context_length: int


class OllamaRunning(Answer):
    """GET /api/ps."""

    models: list[OllamaRunningModel]


class OllamaShown(Answer):
    """POST /api/show."""

    modelfile: str
    parameters: str
    """Default sampling parameters of the model, one a line."""
    template: str
    """Chat template, in Jinja."""
    details: OllamaDetails
    model_info: dict[str, Any]
    """Shape of the model, by GGUF's names. context_length is the server's."""
    capabilities: list[Literal["completion", "embedding", "vision", "tools", "thinking"]]
    modified_at: str
