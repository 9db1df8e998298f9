"""Tasks of the served model: what it can do, and errors for what it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import RequestError
from octavo.media.content import Modality
from octavo.speech.model import hears

if TYPE_CHECKING:
    from octavo.config import ModelConfig
    from octavo.models.blocks.pooler import PoolerSpec
    from octavo.models.spec import ModelSpec

_ROUTES = {
    "embed": "POST /v1/embeddings",
    "classify": "POST /v1/classify",
    "token_embed": "POST /pooling",
    "token_classify": "POST /pooling",
}
"""A route of each task."""


def input_modalities(spec: ModelSpec, settings: ModelConfig) -> list[str]:
    """Return what a model reads: "text", "image", "audio", "video".

    An encoder-decoder that hears reads no text.

    Args:
        spec: the model.
        settings: its settings, which may allow no items of a modality.
    """
    if spec.is_encoder_decoder and hears(spec):
        return ["audio"]
    kinds: tuple[Modality, ...] = ("image", "audio", "video")
    read = [kind for kind in kinds if spec.encoder(kind) is not None and settings.limit(kind)]
    return ["text", *read]


def answers_texts(spec: ModelSpec) -> bool:
    """Return True if a model generates text without a sound."""
    return spec.generates and not (spec.is_encoder_decoder and hears(spec))


def abilities(spec: ModelSpec) -> str:
    """Return the tasks of a model, each with a route."""
    can = ["generate (POST /v1/completions)"] if answers_texts(spec) else []
    if hears(spec):
        can.append("transcribe (POST /v1/audio/transcriptions)")
    can += [f"{pooler.task} ({_ROUTES[pooler.task]})" for pooler in spec.poolers]
    if any(pooler.sparse for pooler in spec.poolers):
        can.append("sparse vectors (POST /embed_sparse)")
    return ", ".join(can)


def check_generates(spec: ModelSpec) -> None:
    """Reject a request for text if the model writes none.

    Raises:
        RequestError: the model generates no text; the message has what it can do.
    """
    if not spec.generates:
        raise cannot(spec, "generates no text")
    if not answers_texts(spec):
        raise cannot(spec, "generates no text without a sound")


def check_hears(spec: ModelSpec) -> None:
    """Reject a request for a transcript if the model writes none.

    Raises:
        RequestError: the model does not hear; the message has what it can do.
    """
    if not hears(spec):
        raise cannot(spec, "does not transcribe sounds")


def find_pooler(spec: ModelSpec, task: str) -> PoolerSpec:
    """Return the pooler of a task.

    Raises:
        RequestError: the model does not have it; the message has what it can do.
    """
    pooler = spec.pooler(task)
    if pooler is None:
        raise cannot(spec, f"does not have the task {task}")
    return pooler


def cannot(spec: ModelSpec, what: str) -> RequestError:
    """Return the error of a request that the model cannot answer."""
    return RequestError(
        f"This model ({spec.architecture}) {what}. It can: {abilities(spec)}.",
        "model",
        "unsupported_task",
    )
