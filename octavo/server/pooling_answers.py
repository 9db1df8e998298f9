"""Answers of the routes that return vectors, classes and scores, of all their APIs."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from octavo.server.answers import Answer
from octavo.server.generation_answers import Usage


class Embedding(Answer):
    """Vector of a text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Numbers, or with encoding_format=base64 little-endian float32."""


class EmbeddingsAnswer(Answer):
    """POST /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: Usage


class Pooled(Answer):
    """Result of a text."""

    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str
    """Numbers, or those of each token, or with encoding_format=base64 little-endian float32."""


class PoolingAnswer(Answer):
    """POST /pooling."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Pooled]
    usage: Usage


class Class(Answer):
    """Classes of a text."""

    index: int
    label: str | None
    """Name of the most probable class."""
    probs: list[float]
    num_classes: int


class ClassifyAnswer(Answer):
    """POST /v1/classify."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Class]
    usage: Usage


class PairScore(Answer):
    """Score of a pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(Answer):
    """POST /v1/score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: Usage


class RankedText(Answer):
    """Text of a document."""

    text: str


class RankedDocument(Answer):
    """Result of /v1/rerank."""

    index: int
    relevance_score: float
    document: NotRequired[RankedText | None]


class RerankUsage(Answer):
    """Token counts of /v1/rerank."""

    prompt_tokens: int
    total_tokens: int


class RerankAnswer(Answer):
    """POST /v1/rerank."""

    id: str
    model: str
    results: list[RankedDocument]
    """Documents, the best first."""
    usage: RerankUsage
    meta: dict[str, dict[str, int]]
    """Cohere's counts."""


class CohereMeta(Answer):
    """Counts of a request in Cohere's form."""

    api_version: dict[str, str]
    billed_units: dict[str, int]
    """input_tokens."""
    warnings: NotRequired[list[str]]


class CohereVectors(Answer):
    """POST /v1/embed without embedding_types."""

    response_type: Literal["embeddings_floats"]
    id: str
    embeddings: list[list[float]]
    texts: list[str]
    meta: CohereMeta


class CohereVectorsByType(Answer):
    """POST /v2/embed."""

    response_type: Literal["embeddings_by_type"]
    id: str
    embeddings: dict[
        Literal["float", "int8", "uint8", "binary", "ubinary", "base64"],
        list[list[float]] | list[str],
    ]
    """Vectors by type. int8: from -127 to 127, each vector with its own scale. uint8: int8 plus
    128. ubinary: a bit for each number, 1 if it is positive, eight in a byte, the highest first.
    binary: ubinary minus 128. base64: little-endian float32."""
    texts: list[str]
    meta: CohereMeta


class TEIRank(Answer):
    """Result of /rerank in the form of text-embeddings-inference."""

    index: int
    text: NotRequired[str | None]
    score: float


class TEISparseEntry(Answer):
    """Entry of the vocabulary that has a weight in a text."""

    index: int
    value: float


class TEIPrediction(Answer):
    """Class of a text."""

    score: float
    label: str


class TEIInfo(Answer):
    """GET /info."""

    model_id: str
    model_sha: None
    served_model_name: str
    model_dtype: str
    model_type: dict[str, dict[str, Any]]
    """embedding, reranker or classifier, with its way of pooling or its labels."""
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: None
    docker_label: None


class TEIError(Answer):
    """Error of a route of text-embeddings-inference."""

    error: str
    error_type: str
