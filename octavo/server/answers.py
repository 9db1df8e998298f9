"""Answers of the API: the server builds and encodes them, and `/openapi.json` describes them."""

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


class DurationUsage(Answer):
    """Seconds of a sound, rounded up."""

    type: Literal["duration"]
    seconds: int


class Transcription(Answer):
    """POST /v1/audio/transcriptions with response_format=json."""

    text: str
    usage: DurationUsage


class TranscriptionSegment(Answer):
    """Part of a transcription; probabilities are those of its window."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptionWord(Answer):
    """Word of a transcript."""

    word: str
    start: float
    end: float


class VerboseTranscription(Answer):
    """POST /v1/audio/transcriptions with response_format=verbose_json.

    `timestamp_granularities` chooses words, segments or both.
    """

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    words: NotRequired[list[TranscriptionWord]]
    segments: NotRequired[list[TranscriptionSegment]]
    usage: DurationUsage


class TranscriptionDelta(Answer):
    """Text of a part of a sound."""

    type: Literal["transcript.text.delta"]
    delta: str


class TranscriptionDone(Answer):
    """Whole text of a sound."""

    type: Literal["transcript.text.done"]
    text: str
    usage: DurationUsage


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


class CacheMiss(Answer):
    """Reason why at least 256 tokens of the prompt were not in the cache though a recent prompt of
    the same key has them, or was the same but for a part."""

    reason: Literal["changed", "forgotten", "no_state", "emptied", "other_adapter"]
    """changed: this prompt differs; forgotten: the cache has used the blocks for others; no_state:
    it has the blocks, but no recurrent state; emptied: the cache was emptied, as by the end of an
    engine; other_adapter: the recent prompt ran with another adapter, or only one of
    the two had one."""
    token: int
    """Index of the first token that differs, or that was not in the cache."""
    message: int | None
    """Index of the chat's message with this token; null: before the first one, or unknown."""
    known_tokens: int
    """changed: number of tokens of the recent prompt with its answer; else of those in common."""
    seconds: float
    """emptied: seconds since then; else seconds since the tokens were last used."""


class PromptTokensDetails(Answer):
    """Part of `Usage`."""

    cached_tokens: int
    cache_miss: NotRequired[CacheMiss]


class PromptDifference(Answer):
    """Place where the prompt differs from the most alike recent prompt of the same key."""

    volatile: str | None
    """What usually changes there: a date or time, an id, an agent's billing header; null: nothing
    known."""
    text: NotRequired[str | None]
    """Text around the first token that differs, with --explain-prompts."""
    earlier_text: NotRequired[str | None]
    """Text of the earlier prompt there."""


class OtherRequest(Answer):
    """Another request that the client may see."""

    number: str
    """Its number, as in the engine view."""
    id: NotRequired[str | None]
    """Id of its answer, while it is recorded."""
    ms: NotRequired[float | None]
    tokens: NotRequired[int | None]
    blocks: NotRequired[int | None]


class GivenUpBlocks(Answer):
    """Blocks of the prompt's prefix that the cache gave up for another request."""

    seconds_before: float
    """Seconds between that and the arrival of the request."""
    token: int
    """Index of the first token of the first of these blocks."""
    by: OtherRequest | None
    """That request; null: the client may not see it."""


class ExplainedCache(Answer):
    """Cached and computed tokens of the prompts, and why not more were in the cache."""

    prompt_tokens: int
    cached_tokens: int
    miss: CacheMiss | None
    difference: PromptDifference | None
    given_up: GivenUpBlocks | None
    text: list[str]
    """The same in sentences, without texts of prompts."""


class ExplainedSpan(Answer):
    """Part of the time line, with one cause."""

    cause: str
    begin_ms: float
    """Milliseconds since the arrival of the request."""
    ms: float
    text: str
    reason: NotRequired[str | None]
    """With queued: SEAT, BUDGET, BLOCKS, LEADER, REMOTE_KVS or IN_FLIGHT."""
    is_behind: NotRequired[bool | None]
    """With queued: true if the reason is that of another request, which was the first in the
    queue."""
    steps: NotRequired[int | None]
    tokens: NotRequired[int | None]
    """Number of computed tokens of this request."""
    others: NotRequired[int | None]
    """Most other requests in one of the steps."""
    who: NotRequired[list[OtherRequest] | None]
    """Other requests that are the cause, at most 8: with their tokens in the steps; with queued for
    BUDGET the most tokens in a step, for BLOCKS the most KV blocks; otherwise the time."""
    more: NotRequired[int | None]
    """Number of further ones, and of those that the client may not see."""
    behind: NotRequired[list[OtherRequest] | None]
    """With is_behind: those that were the first in the queue, as far as the client may see them."""
    theirs_ms: NotRequired[float | None]
    """Share of the steps' time, by tokens, of the other requests."""
    between_ms: NotRequired[float | None]
    """Time between the steps; in causes it belongs to between_steps."""


class ExplainedCause(Answer):
    """All time with one cause."""

    cause: str
    ms: float
    text: str


class ExplainedAnswer(Answer):
    """Answer to a prompt, by the engine's steps."""

    number: str
    """Its number in the engine view."""
    prompt: int
    index: int
    followed: bool
    """True if the time line is that of this answer: it ended last."""
    begin_ms: float
    end_ms: float
    steps: int
    prompt_chunks: int
    """Number of the steps that computed the prompt."""
    computed_tokens: int
    cached_tokens: int
    preemptions: int


class Advice(Answer):
    """Setting that would have helped."""

    setting: str
    text: str
    saved_ms: float | None
    estimate: Literal["at_most", "simulated", "unknown"]
    """at_most: the time of the causes that the setting removes; simulated: by a simulation of the
    requests of that time."""


class RecentRequest(Answer):
    """Recent request."""

    id: str
    """Id of the answer."""
    request_id: str
    path: str
    model: str
    created: float
    """Arrival in seconds since 1970."""
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    status: int | None
    """HTTP status; null: none was sent yet."""
    finished: bool


class RecentRequests(Answer):
    """GET /v1/requests."""

    object: Literal["list"]
    data: list[RecentRequest]


class Explanation(RecentRequest):
    """GET /v1/requests/{request_id}/explain."""

    object: Literal["request.explanation"]
    wall_ms: float
    first_token_ms: float | None
    timeline: list[ExplainedSpan]
    """Parts in order, without gaps: they sum to wall_ms."""
    causes: list[ExplainedCause]
    """Time by cause, the longest first: they sum to wall_ms, too."""
    answers: list[ExplainedAnswer]
    cache: ExplainedCache
    advice: list[Advice]


class Explained(Answer):
    """Base of answers, and of last chunks, that explain their request."""

    explanation: NotRequired[Explanation | None]
    """With explain."""


class Usage(Answer):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


class PerRequestMetrics(Answer):
    """Times of the request, with --enable-per-request-metrics or return_metrics, and counts with
    return_metrics. Unknown times are null; a stream leaves them out."""

    time_to_first_token_ms: NotRequired[float | None]
    """Time of the prompt: from the first step to the first token."""
    generation_time_ms: NotRequired[float | None]
    queue_time_ms: NotRequired[float | None]
    mean_itl_ms: NotRequired[float | None]
    tokens_per_second: NotRequired[float | None]
    num_cached_tokens: NotRequired[int]
    num_preemptions: NotRequired[int]
    num_draft_tokens: NotRequired[int]
    """Number of drafts proposed."""
    num_accepted_tokens: NotRequired[int]
    """Number of accepted drafts."""


class PromptProgress(Answer):
    """Part of a prompt that has been computed, in chunks before the first token."""

    total: int
    """Number of tokens of the prompt."""
    cache: int
    """Number of them from the cache."""
    processed: int
    """Number of them that are computed or from the cache."""
    time_ms: float
    """Time since the first step with the prompt."""


class Envelope(Answer):
    """Fields of all answers and chunks of the generation endpoints."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class PromptLogprob(Answer):
    """Candidate token at a position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


FinishReason = Literal["stop", "length", "abort"]
ChatFinishReason = Literal["stop", "length", "abort", "tool_calls", "function_call"]
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Answer):
    """Four lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    repetition_period: NotRequired[int | None]
    """Number of tokens that the answer repeats, if the repetition guard found that."""


class CompletionAnswer(Envelope, Explained):
    """POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    metrics: NotRequired[PerRequestMetrics | None]
    kv_transfer_params: NotRequired[dict[str, Any] | None]


class CompletionChunkChoice(Answer):
    """New part of a text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int] | None]
    prompt_token_ids: NotRequired[list[int] | None]
    repetition_period: NotRequired[int | None]
    """Number of tokens that the answer repeats, if the repetition guard found that."""


class CompletionChunk(Envelope, Explained):
    """Event of a stream of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]
    metrics: NotRequired[PerRequestMetrics | None]
    prompt_progress: NotRequired[PromptProgress | None]


class Candidate(Answer):
    """Token and its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Candidate):
    """Token of the answer, and the most probable candidates at its position."""

    top_logprobs: list[Candidate]


class ChatLogprobs(Answer):
    """One entry for each token."""

    content: list[ChatLogprob]
    refusal: None


class CalledFunction(Answer):
    """Function of a tool call."""

    name: str
    arguments: str
    """JSON text that the model wrote; it may be cut at the length limit."""


class ToolCall(Answer):
    """Call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    """Message of the answer."""

    role: str
    content: str | None
    refusal: None
    reasoning: str | None
    reasoning_content: NotRequired[str | None]
    """The same as `reasoning`."""
    tool_calls: NotRequired[list[ToolCall] | None]
    function_call: NotRequired[CalledFunction | None]
    """Call, for a request with functions."""


class ChatChoice(Answer):
    """One message."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None
    repetition_period: NotRequired[int | None]
    """Number of tokens that the answer repeats, if the repetition guard found that."""


class ChatAnswer(Envelope, Explained):
    """POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    metrics: NotRequired[PerRequestMetrics | None]
    kv_transfer_params: NotRequired[dict[str, Any] | None]
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class CalledFunctionDelta(Answer):
    """New part of a call's function."""

    name: NotRequired[str | None]
    arguments: NotRequired[str | None]


class ToolCallDelta(Answer):
    """New part of a tool call; its id, type and name come with the first part."""

    index: int
    """Number of the call in the message."""
    id: NotRequired[str | None]
    type: NotRequired[Literal["function"] | None]
    function: CalledFunctionDelta


class ChatDelta(Answer):
    """New part of a message."""

    role: NotRequired[str | None]
    content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCallDelta] | None]
    function_call: NotRequired[CalledFunctionDelta | None]


class ChatChunkChoice(Answer):
    """New part of an answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int] | None]
    repetition_period: NotRequired[int | None]
    """Number of tokens that the answer repeats, if the repetition guard found that."""


class ChatChunk(Envelope, Explained):
    """Event of a stream of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    metrics: NotRequired[PerRequestMetrics | None]
    prompt_progress: NotRequired[PromptProgress | None]
    prompt_token_ids: NotRequired[list[int] | None]


class TokenLogprob(Answer):
    """Candidate token."""

    token_id: int
    logprob: float
    rank: int | None


class ChosenTokenLogprob(TokenLogprob):
    """Token of an answer, with the candidates at its position."""

    top_logprobs: list[TokenLogprob]


class TokensLogprobs(Answer):
    """Logprobs of an answer's tokens."""

    content: list[ChosenTokenLogprob]


class TokensChunkChoice(Answer):
    """New part of an answer."""

    index: int
    token_ids: list[int]
    logprobs: TokensLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    text: NotRequired[str | None]
    repetition_period: NotRequired[int | None]
    """Number of tokens that the answer repeats, if the repetition guard found that."""


class TokensAnswer(Answer):
    """POST /inference/v1/generate."""

    request_id: str
    model: str
    created: int
    output_mode: Literal["tokens", "text"]
    choices: list[TokensChunkChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    kv_transfer_params: NotRequired[dict[str, Any] | None]


class TokensChunk(Answer):
    """Event of a stream of /inference/v1/generate."""

    request_id: str
    output_mode: Literal["tokens", "text"]
    choices: list[TokensChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int] | None]


class Tokens(Answer):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class ContentBlock(Answer):
    """Block of an Anthropic message: text, thinking, or tool_use with id, name and input."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str | None]
    thinking: NotRequired[str | None]
    signature: NotRequired[str | None]
    """Empty: no service has to verify the reasoning."""
    id: NotRequired[str | None]
    name: NotRequired[str | None]
    input: NotRequired[dict[str, Any] | None]


class AnthropicUsage(Answer):
    """Token counts."""

    input_tokens: int
    """Tokens of the prompt that were computed."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    """Tokens of the prompt that were cached."""
    output_tokens: int


AnthropicStopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicMessage(Explained):
    """POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: AnthropicStopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicDelta(Answer):
    """New part of a block, or the end of the message."""

    type: NotRequired[
        Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | None
    ]
    text: NotRequired[str | None]
    thinking: NotRequired[str | None]
    signature: NotRequired[str | None]
    partial_json: NotRequired[str | None]
    stop_reason: NotRequired[AnthropicStopReason | None]
    stop_sequence: NotRequired[str | None]


class AnthropicEvent(Explained):
    """Event of a stream of /v1/messages."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: NotRequired[AnthropicMessage | None]
    index: NotRequired[int | None]
    content_block: NotRequired[ContentBlock | None]
    delta: NotRequired[AnthropicDelta | None]
    usage: NotRequired[AnthropicUsage | None]


class AnthropicErrorDetail(Answer):
    """Anthropic's error object."""

    type: str
    message: str


class AnthropicError(Answer):
    """Body of every error of /v1/messages."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class InputTokens(Answer):
    """POST /v1/messages/count_tokens."""

    input_tokens: int


class ResponseError(Answer):
    """Reason why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(Answer):
    """Reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(Answer):
    """Part of `ResponseUsage`."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    """Part of `ResponseUsage`."""

    reasoning_tokens: int
    """Tokens of the text of the reasoning."""


class ResponseUsage(Answer):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ConversationId(Answer):
    """Conversation of a response."""

    id: str


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseReasoning(Answer):
    """Settings of the reasoning."""

    effort: str | None
    summary: str | None


class ResponseObject(Explained):
    """POST /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[dict[str, Any]]
    """Items: reasoning, message and function_call."""
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: ConversationId | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float | None
    top_p: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


@with_config(ConfigDict(extra="allow", strict=True))
class ResponseEvent(TypedDict):
    """Event of a stream of /v1/responses; its type determines the other fields."""

    type: str
    sequence_number: int
    """Number of the event, counted from 0."""


@with_config(ConfigDict(extra="allow", strict=True))
class ViewEvent(TypedDict, total=False):
    """Event of GET /v1/engine/view; docs/engine_view.md describes the fields of each kind."""

    time: float
    """Time of the event, in seconds since 1970."""


class ResponseInputTokens(Answer):
    """POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(Answer):
    """Page of a list of items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class Deleted(Answer):
    """Deleted object."""

    id: str
    object: Literal["response", "conversation.deleted"]
    deleted: Literal[True]


class Conversation(Answer):
    """POST /v1/conversations."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


@with_config(ConfigDict(extra="allow", strict=True))
class Item(TypedDict):
    """Item of a conversation."""

    id: str
    type: str


class Text(Answer):
    """POST /detokenize."""

    prompt: str


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


class CacheReset(Answer):
    """POST /reset_prefix_cache, /reset_encoder_cache and /reset_mm_cache."""

    success: bool


class Scaled(Answer):
    """POST /scale_elastic_ep."""

    message: str


class IsScaling(Answer):
    """POST /is_scaling_elastic_ep."""

    is_scaling_elastic_ep: bool


class FellAsleep(Answer):
    """POST /sleep."""

    status: Literal["sleeping"]
    level: int


class WokeUp(Answer):
    """POST /wake_up."""

    status: Literal["awake", "sleeping"]
    tags: list[str] | None


class IsSleeping(Answer):
    """GET /is_sleeping."""

    is_sleeping: bool


class Paused(Answer):
    """POST /pause."""

    status: Literal["paused"]


class Resumed(Answer):
    """POST /resume."""

    status: Literal["resumed"]


class IsPaused(Answer):
    """GET /is_paused."""

    is_paused: bool


class ProfileStarted(Answer):
    """POST /start_profile."""

    status: Literal["recording"]


class ProfileStopped(Answer):
    """POST /stop_profile."""

    path: str


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


class FileObject(Answer):
    """OpenAI's description of a file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileList(Answer):
    """GET /v1/files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Answer):
    """DELETE /v1/files/{file_id}."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(Answer):
    """Reason why a batch failed."""

    code: str
    message: str
    param: str | None
    line: int | None
    """Number of the line, from 1."""


class BatchErrors(Answer):
    """Reasons why a batch failed, at most a hundred."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(Answer):
    """Numbers of the lines of a batch."""

    total: int
    completed: int
    failed: int


class Batch(Answer):
    """OpenAI's description of a batch. Times are seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(Answer):
    """GET /v1/batches."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


def respond(
    answer: Mapping[str, object], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return an answer as a response."""
    return Response(msgspec.json.encode(answer), status, headers, "application/json")
