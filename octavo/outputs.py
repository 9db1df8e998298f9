"""Results for callers: vLLM's `RequestOutput` and `CompletionOutput`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from octavo.lora_request import LoRARequest


@dataclass(slots=True)
class Logprob:
    """Candidate token: its log probability, 1-based rank and text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# Candidates of each position; the token itself is always among them.
SampleLogprobs = Sequence[dict[int, Logprob]]
PromptLogprobs = Sequence[dict[int, Logprob] | None]


class FlatLogprobs(Sequence[Any]):
    """List of a dict for each position (`SampleLogprobs`), stored as arrays of numbers.

    A dict is made only when it is read: all of them as objects would need twenty times the memory.
    It compares, slices and prints like the list that it represents, and is pickled as a list.

    Args:
        text_of: returns the text of a token; None: no text.
        of_prompt: True if the first position is None, as in `PromptLogprobs`.
        ranked: True if the candidates are the most probable ones; others have no ranks.
    """

    __slots__ = (
        "_logprobs",
        "_num_rows",
        "_of_prompt",
        "_ranks",
        "_token_ids",
        "ranked",
        "text_of",
    )

    def __init__(
        self,
        text_of: Callable[[int], str] | None,
        *,
        of_prompt: bool = False,
        ranked: bool = True,
    ) -> None:
        self.text_of, self.ranked = text_of, ranked
        self._of_prompt = of_prompt
        self._token_ids, self._logprobs, self._ranks = array("i"), array("f"), array("i")
        self._num_rows = 0  # a copy shares the arrays, which may have grown since

    @property
    def num_candidates(self) -> int:
        """Number of entries of all positions together."""
        return len(self._token_ids)

    def candidates(self, position: int) -> tuple[array[int], array[float]]:
        """Return token ids and logprobs of a position's candidates, the most probable one first."""
        width = len(self._token_ids) // len(self._ranks)
        row = slice(position * width + 1, (position + 1) * width)  # without the token itself
        return self._token_ids[row], self._logprobs[row]

    def append_rows(self, token_ids: bytes, logprobs: bytes, ranks: bytes) -> None:
        """Add positions; the arguments are the fields of `octavo.messages.LogprobsLists`."""
        self._token_ids.frombytes(token_ids)
        self._logprobs.frombytes(logprobs)
        self._ranks.frombytes(ranks)
        self._num_rows = len(self._ranks)

    def extend(self, other: FlatLogprobs) -> None:
        """Add the positions of another object, which is not of a prompt."""
        self._token_ids.extend(other._token_ids)
        self._logprobs.extend(other._logprobs)
        self._ranks.extend(other._ranks)
        self._num_rows = len(self._ranks)

    def copy(self) -> FlatLogprobs:
        """Return a snapshot: it has no later positions, and none may be added to it."""
        new = FlatLogprobs(self.text_of, of_prompt=self._of_prompt, ranked=self.ranked)
        new._token_ids, new._logprobs, new._ranks = self._token_ids, self._logprobs, self._ranks
        new._num_rows = self._num_rows
        return new

    def __len__(self) -> int:
        return self._num_rows + self._of_prompt

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index] - self._of_prompt
        if at < 0:
            return None
        text_of, width = self.text_of, len(self._token_ids) // len(self._ranks)
        row: dict[int, Logprob] = {}
        begin = at * width
        for i in range(width):
            token_id = self._token_ids[begin + i]
            if token_id not in row:
                text = None if text_of is None else text_of(token_id)
                # The most probable tokens, of rank 1, 2 ..., follow the token itself.
                rank = self._ranks[at] if not i else i if self.ranked else None
                row[token_id] = Logprob(self._logprobs[begin + i], rank, text)
        return row

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FlatLogprobs | list | tuple):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[type, tuple[list[Any]]]:
        return list, (list(self),)


@dataclass(slots=True)
class CalledFunction:
    """Function of a call, in OpenAI's form."""

    name: str
    arguments: str
    """JSON text that the model wrote; it may be cut at the length limit."""


@dataclass(slots=True)
class ToolCall:
    """Call of a tool, in OpenAI's form."""

    id: str
    function: CalledFunction
    type: str = "function"


@dataclass(slots=True)
class ChatMessage:
    """Answer of a chat, separated as the server separates it."""

    content: str | None
    """Text without reasoning and calls; None if there are only calls."""
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    role: str = "assistant"


@dataclass(slots=True)
class CompletionOutput:
    """Answer to a prompt. Fields of type None are vLLM's, for unsupported features."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    routed_experts: None = None
    finish_reason: str | None = None
    """"stop", "length", "repetition", "abort" or "error"; None while the answer is incomplete."""
    stop_reason: int | str | None = None
    """Stop token id or stop text that ended the answer; None for the end-of-sequence token."""
    lora_request: None = None
    sampling_mask: None = None
    spec_decode_metrics: None = None
    weight_versions: None = None
    repetition_period: int | None = None
    """Number of tokens that the answer repeats, if `repetition_guard` found that."""
    message: ChatMessage | None = None
    """Content, reasoning and calls of an answer of `LLM.chat`."""

    def finished(self) -> bool:
        """Return True if this answer is complete."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of `time.monotonic` unless stated otherwise."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    """Number of drafts proposed for all answers; after an engine's death, those since then."""
    num_accepted_tokens: int = 0
    """Number of accepted ones."""
    num_stored_tokens: int = 0
    """Number of prompt tokens with cached keys and values; more than `num_cached_tokens` if a
    recurrent state was missing."""

    @property
    def scheduled_ts(self) -> float:
        """vLLM's name of `first_scheduled_time`; 0 if the request never ran."""
        return self.first_scheduled_time or 0.0

    @property
    def first_token_ts(self) -> float:
        """vLLM's name of `first_token_time`; 0 without a token."""
        return self.first_token_time or 0.0

    @property
    def last_token_ts(self) -> float:
        """vLLM's name of `last_token_time`; 0 without a token."""
        return self.last_token_time or 0.0

    @property
    def first_token_latency(self) -> float:
        """Seconds from the arrival to the first token; 0 without a token."""
        return self.first_token_ts and self.first_token_ts - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """Answers to one prompt. Fields of type None are vLLM's, for unsupported features."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    lora_request: LoRARequest | None = None
    """The adapter of the request: the caller's object."""
    encoder_prompt: str | None = None
    """Text that the encoder of an encoder-decoder read; `prompt` is then the decoder's."""
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int = 0
    """Number of prompt tokens that were in the prefix cache."""
    num_cache_creation_tokens: None = None
    prompt_token_id_logprobs: None = field(default=None, kw_only=True)
    kv_transfer_params: dict[str, Any] | None = field(default=None, kw_only=True)
    """Parameters of the KV connector for a server that continues with the prompt."""
    ec_transfer_params: None = field(default=None, kw_only=True)
    num_computed_tokens: int = field(default=0, kw_only=True)
    """Number of prompt tokens computed so far, in outputs without answers that tell progress."""
    pooled: bytes | None = field(default=None, kw_only=True)
    """Result of a pooling model, as the worker computed it."""


@dataclass(slots=True)
class PoolingOutput:
    """Result of a text."""

    data: NDArray[np.float32]
    """Numbers [n], or for each token [tokens, n]."""


@dataclass(slots=True)
class EmbeddingOutput:
    """Vector of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of numbers."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """Scores of the classes for a text."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """Score of a pair of texts."""

    score: float


Pooled = TypeVar("Pooled", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Pooled]):
    """Result of a pooling model for one prompt, as in vLLM."""

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    """Number of prompt tokens that were in the prefix cache."""
    finished: bool = True


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


@dataclass(slots=True)
class BeamSearchSequence:
    """Beam of a search, as in vLLM."""

    tokens: list[int]
    """Tokens of the prompt and the answer; the end-of-sequence token only on request."""
    logprobs: list[dict[int, Logprob]]
    """Candidates at each generated token, including the end-of-sequence token."""
    cum_logprob: float = 0.0
    """Sum of the logprobs of the generated tokens, including the end-of-sequence token."""
    text: str | None = None
    """Text of `tokens`."""
    finish_reason: str | None = None
    """"stop" or "length"."""


@dataclass(slots=True)
class BeamSearchOutput:
    """Result of a search for one prompt, as in vLLM."""

    sequences: list[BeamSearchSequence]
    """Beams, the best first."""
