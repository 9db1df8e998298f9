"""Messages between the parts of Octavo: the only interface of control plane and data plane.

Front end -> engine core: `EngineCoreRequest`, abort and utility calls.
Scheduler -> worker: `SchedulerOutput`, a plain record of what changed since the last step.
Worker -> scheduler: `ModelRunnerOutput`. Engine core -> front end: `EngineCoreOutputs`.
All are msgspec structs and can cross a process border. Times are seconds of `clock.now`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from octavo.lora_request import LoRARequest
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.sampling_params import RepetitionGuard


class FinishReason(enum.IntEnum):
    """Reason for the end of a request; `str()` returns OpenAI's word."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


EmbedsDtype: TypeAlias = Literal["float64", "float32", "float16", "bfloat16"]
EMBEDS_DTYPES: dict[EmbedsDtype, int] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number of `PromptEmbeds`, by data type."""

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
"""Treatment of unfinished requests when an engine is put to sleep; see `EngineCore.sleep`."""


class BadWordsTokenIds(msgspec.Struct, array_like=True, frozen=True):
    """Forbidden token sequences, as arrays of int32 (`NO_TOKEN`: padding)."""

    prefixes: bytes
    """[words, longest - 1]: all tokens of each sequence except the last, padded on the left."""
    last: bytes
    """[words]: last token of each sequence."""


NO_TOKEN = -1


class GrammarSpec(msgspec.Struct, array_like=True, frozen=True):
    """Required form of an answer (structured output)."""

    kind: Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
    text: str = ""
    """A JSON schema, a regular expression, a JSON list of choices, a grammar (EBNF or Lark), a
    structural tag in JSON; empty for json_object."""
    backend: Literal["auto", "xgrammar", "llguidance"] = "auto"
    """auto: the first backend that supports the grammar."""
    any_whitespace: bool = True
    """True if JSON may have white space between its parts."""
    additional_properties: bool = False
    """True if JSON may have properties and items that its schema neither names nor forbids."""
    strict: bool = False
    """True if a schema with a `format` that cannot be enforced is an error; else the format is
    ignored."""


class GuardSpec(msgspec.Struct, array_like=True, frozen=True):
    """Limits of an answer's reasoning and repetition; see `octavo.guard`."""

    begin: tuple[int, ...] = ()
    """Tokens before reasoning; empty: unknown."""
    end: tuple[int, ...] = ()
    """Tokens after reasoning; empty: unknown."""
    thinks: bool = False
    """True if the prompt ends inside of reasoning; then `end` is known."""
    budget: int | None = None
    """Number of tokens of reasoning after which `end` is forced; None: no limit."""
    repetition: RepetitionGuard = "off"
    """Action when the answer repeats itself; see `SamplingParams`."""

    @property
    def forces_tokens(self) -> bool:
        """True if the guard may force tokens."""
        return bool(self.end) and (self.budget is not None or self.repetition == "close_thinking")


class Repetition(msgspec.Struct, array_like=True, frozen=True):
    """Loop that the guard has found in an answer."""

    period: int
    """Number of tokens that the answer repeats."""
    action: RepetitionGuard
    """Action of the guard."""


class CoreSamplingParams(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The part of a request's `SamplingParams` that the engine core needs.

    `make_core_params` completes and packs parameters that have been checked; decoding checks only
    types. The n requests of a prompt share long values.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    logprob_token_ids: bytes | None = None
    """Token ids int32 [logprobs] to report instead of the most probable tokens."""
    prompt_logprobs: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    """Stop tokens that the request names."""
    all_stop_token_ids: frozenset[int] = frozenset()
    """Every token that ends the answer, the end of sequence included."""
    allowed_token_ids: bytes | None = None
    """Bitmask int32 [ceil(vocab / 32)] as in `Ops.apply_bitmask_`."""
    logit_bias: tuple[bytes, bytes] | None = None
    """Distinct token ids int32 [E] and the numbers to add to their logits, float32 [E]."""
    bad_words: BadWordsTokenIds | None = None
    grammar: GrammarSpec | None = None
    extra_args: dict[str, Any] | None = None
    """Plain data for the logits processors of plug-ins."""
    guard: GuardSpec | None = None
    """Limits of reasoning and repetition."""

    @property
    def greedy(self) -> bool:
        """True if sampling always chooses the most probable token."""
        return self.temperature == 0.0


class PromptEmbeds(msgspec.Struct, array_like=True, frozen=True):
    """Embeddings of a prompt that the model reads in place of its tokens' embeddings."""

    data: bytes
    """Numbers [tokens, size]; all are checked to be finite."""
    dtype: EmbedsDtype
    size: int
    """Number of numbers of an embedding."""

    @property
    def row_nbytes(self) -> int:
        """Bytes of an embedding."""
        return self.size * EMBEDS_DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all embeddings."""
        return len(self.data)

    @property
    def num_tokens(self) -> int:
        """Number of embeddings."""
        return self.nbytes // self.row_nbytes

    def rows(self, start: int, stop: int) -> memoryview:
        """Return the bytes of the embeddings from `start` up to, but not including, `stop`."""
        return memoryview(self.data)[start * self.row_nbytes : stop * self.row_nbytes]


class PlaceholderRange(msgspec.Struct, array_like=True, frozen=True):
    """Range of a prompt's tokens that stand for one item, such as a picture."""

    offset: int
    """Index of the first token."""
    length: int
    """Number of tokens."""
    is_embed: bytes | None = None
    """One byte for each token: 1 if a row of the encoder replaces the token's embedding, 0 if the
    token is an ordinary one. None: rows replace all tokens."""

    @property
    def end(self) -> int:
        """Index after the last token."""
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        """Number of tokens that rows replace."""
        return self.length if self.is_embed is None else self.is_embed.count(1)

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Ranges (begin, end) of successive tokens that rows replace."""
        if self.is_embed is None:
            return ((self.offset, self.end),)
        found = []
        end = 0
        while (begin := self.is_embed.find(1, end)) >= 0:
            end = self.is_embed.find(0, begin)
            end = self.length if end < 0 else end
            found.append((self.offset + begin, self.offset + end))
        return tuple(found)

    def num_embeds_before(self, position: int) -> int:
        """Return the number of tokens before a position of the prompt that rows replace."""
        count = min(max(position - self.offset, 0), self.length)
        return count if self.is_embed is None else self.is_embed.count(1, 0, count)


class TensorData(msgspec.Struct, array_like=True, frozen=True):
    """Array of numbers."""

    dtype: str
    """Name of numpy's type, or "bfloat16"."""
    shape: tuple[int, ...]
    data: bytes
    """The numbers in C order, little-endian."""


Modality: TypeAlias = Literal["image", "video", "audio", "text"]

EMBEDS = "embeds"
"""Key of `MultiModalFeatureSpec.data` for the rows themselves, [rows, size]: no encoder computes
them, and there is no other array."""


class MultiModalFeatureSpec(msgspec.Struct, array_like=True, frozen=True):
    """One item of a prompt for an encoder: a picture, a video, a sound, or a text."""

    modality: Modality
    identifier: str
    """Digest of the processed content. Items with the same one share the encoder's result and
    cached prefixes; it includes the scope of the cache, if the request has one."""
    mm_position: PlaceholderRange
    """Tokens of the prompt that stand for the item; (0, 0) for the input of an encoder-decoder,
    whose rows cross attention reads."""
    data: dict[str, TensorData]
    """Input of the encoder, by name."""
    num_encoder_tokens: int
    """Number of tokens in the encoder's layers: patches, frames, or tokens of a text; 0 if `data`
    has the rows themselves."""
    grid: tuple[int, int, int] | None = None
    """Sizes of the rows in time, height and width, for models whose positions have sections
    (m-RoPE): the row of the item's n-th placeholder is the n-th of this grid, width first."""
    follows: int = 0
    """Number of tokens from the first row of a video to this part of it, if the positions of its
    parts are those of one grid."""
    time: int = 0
    """Position of this part in time, in that grid."""
    ranges: tuple[tuple[int, int], ...] = ()
    """Ranges (begin, end) of the prompt's tokens that see each other in both directions, in order.
    A step that computes a token of a range also computes all later ones of the range."""

    @property
    def is_embeds(self) -> bool:
        """True if its data are the rows themselves (`EMBEDS`)."""
        return self.mm_position.num_embeds > 0 and not self.num_encoder_tokens

    @property
    def num_rows(self) -> int:
        """Number of rows that the encoder returns."""
        return self.mm_position.num_embeds or self.num_encoder_tokens

    @property
    def begin(self) -> int:
        """Index of the first token of the item, and of its ranges."""
        return min([self.mm_position.offset, *(begin for begin, _ in self.ranges)])

    @property
    def end(self) -> int:
        """Index after the last token of the item, and of its ranges."""
        return max(self.mm_position.end, *(end for _, end in self.ranges), 0)

    @property
    def reaches_text(self) -> bool:
        """True if tokens of the item see others that do not stand for it."""
        place = self.mm_position
        return any(begin < place.offset or place.end < end for begin, end in self.ranges)


ALIGNMENT = "whisper_alignment"
"""Key of `SamplingParams.extra_args` with an `AlignmentSpec`: the request returns weights of cross
attention."""


class AlignmentSpec(msgspec.Struct, array_like=True, frozen=True):
    """Weights of cross attention that say when each token of a transcript is spoken."""

    heads: tuple[tuple[int, int], ...]
    """Layer and head of the weights to average."""
    num_rows: int
    """Number of the encoder's first rows to compare with."""


class PoolingSpec(msgspec.Struct, array_like=True, frozen=True):
    """Result that the engine core computes for a request of a pooling model, instead of tokens."""

    task: str
    """Name of the model's pooler; see `PoolerSpec`."""
    reads_all: bool = False
    """True if the pooler reads all tokens: the prefix cache then cannot replace some."""
    whole: bool = False
    """True if one step must compute all tokens: each of them sees all others."""
    second_begin: int = 0
    """Index of the first token of the second text of a pair; 0: there is one text."""
    bare: bool = False
    """True for the hidden states of the tokens, without the pooler's layers."""
    alignment: AlignmentSpec | None = None
    """Weights of cross attention, which are the result in place of a pooler's."""


class AdapterRef(msgspec.Struct, array_like=True, frozen=True):
    """Adapter whose files a front end has checked."""

    name: str
    path: str
    """Folder of the adapter."""
    content_hash: str
    """Hash of all that changes answers. Adapters with equal ones are the same, whatever their names
    are; the worker rejects files with another one."""
    invocation_tokens: tuple[int, ...] = ()
    """Tokens of the prompt that begin an activated LoRA; empty: the adapter changes all tokens."""
    request: LoRARequest | None = None
    """The adapter as the caller named it; the engine ignores it."""
    draft: AdapterRef | None = None
    """Adapter of the draft model, for requests with this adapter; None: it drafts without one."""

    @property
    def key(self) -> str:
        """Key that two adapters share if they and those of their draft models are the same."""
        if self.draft is None:
            return self.content_hash
        return f"{self.content_hash}+{self.draft.content_hash}"


class RequestOptions(msgspec.Struct, array_like=True, frozen=True):
    """The envelope of a request: its properties besides the prompt and the sampling parameters.

    The server or the public method of an engine creates it. `InputProcessor.process` adds the
    options in the prompt and the parameters. The scheduler receives the result.
    """

    arrival_time: float
    tenant: str | None = None
    """Sender of the request. Tenants share tokens fairly, see `scheduler/fairness.py`."""
    priority: int = 0
    """Rank with `scheduling_policy=priority`: smaller is served earlier."""
    deadline: float | None = None
    """Time at which the request ends with an error."""
    first_token_deadline: float | None = None
    """Time at which the request ends with an error if it has no token yet."""
    turn: int = 0
    """Number of earlier prompts in the same call; see `scheduler/queue.py`."""
    cache_salt: str | None = None
    """Scope of the prefix cache: only requests with the same salt share blocks."""
    kv_transfer_params: dict[str, Any] | None = None
    """Parameters for the KV connector."""
    flow: int | None = None
    """Class of the client's address. Without tenants, flows share tokens fairly."""
    background: bool = False
    """True for a line of a batch: all other requests are served first, under every policy."""
    reports_progress: bool = False
    """True if each step with a part of the prompt makes an output without tokens."""
    trace_headers: dict[str, str] | None = None
    """Headers traceparent, tracestate and x-request-id, for the request's span; see
    `observability/tracing.py`."""
    adapter: AdapterRef | None = None
    """Adapter of the request; None: the model alone."""
    adapter_begin: int = 0
    """Index of the first token that the adapter changes."""

    @property
    def share(self) -> str | int | None:
        """The tenant, or else the flow; the scheduler divides tokens fairly among shares.

        What a tenant computes in the background does not count against its other requests.
        """
        share = self.flow if self.tenant is None else self.tenant
        return f"background of {share}" if self.background else share

    @property
    def due(self) -> float:
        """The earlier one of the deadlines; infinite if there is no deadline."""
        first = math.inf if self.first_token_deadline is None else self.first_token_deadline
        return first if self.deadline is None else min(self.deadline, first)


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A checked and tokenised prompt, as the front end passes it to the engine core.

    With n > 1 the front end sends it once, and the core makes n requests of it.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: CoreSamplingParams
    options: RequestOptions
    n: int = 1
    """Number of answers."""
    output_token_ids: list[int] = []
    """Tokens that the request has generated earlier; it continues after them. None of them ends the
    request; they count against `max_tokens` and `min_tokens`."""
    num_prompt_logprobs: int = 0
    """Number of prompt logprobs that the client already has."""
    prompt_embeds: PromptEmbeds | None = None
    """Embeddings in place of the prompt's first tokens; the ids of those tokens are 0."""
    answers: dict[int, list[int]] | None = None
    """With n > 1, the unfinished answers of a continued request: `output_token_ids` by index.
    None: all answers, from the start."""
    pooling: PoolingSpec | None = None
    """Result in place of tokens; None: the request generates tokens."""
    mm_features: list[MultiModalFeatureSpec] = []
    """Items of the prompt for encoders, in order of their placeholders."""

    @property
    def known_token_ids(self) -> list[int]:
        """Tokens of the prompt that are not replaced by embeddings."""
        if self.prompt_embeds is None:
            return self.prompt_token_ids
        return self.prompt_token_ids[self.prompt_embeds.num_tokens :]

    @property
    def indices(self) -> Iterable[int]:
        """Indices of the answers to make."""
        return range(self.n) if self.answers is None else self.answers

    @property
    def child_ids(self) -> list[str]:
        """Ids of the core's requests, one for each answer to make; `request_id` if n is 1."""
        return [self._child_id(index) for index in self.indices]

    def _child_id(self, index: int) -> str:
        return self.request_id if self.n == 1 else f"{index}_{self.request_id}"

    def child(self, index: int) -> EngineCoreRequest:
        """Return the request for one of the answers; `self` if n is 1.

        Child i of n > 1 has the seed `seed + i`. Only child 0 requests the prompt's logprobs.
        """
        if self.n == 1:
            return self
        replace, params = msgspec.structs.replace, self.sampling_params
        return replace(
            self,
            request_id=self._child_id(index),
            sampling_params=replace(
                params,
                seed=(params.seed + index) % 2**64,
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            ),
            n=1,
            options=replace(self.options, turn=self.options.turn + index),
            answers=None,
        )


class LogprobsLists(msgspec.Struct, array_like=True):
    """Logprobs of consecutive positions of one request, as arrays.

    A row has 1 + k entries; the first is that of the position's own token.
    """

    token_ids: bytes = b""
    """int32 [rows, 1 + k]"""
    logprobs: bytes = b""
    """float32 [rows, 1 + k]"""
    ranks: bytes = b""
    """int32 [rows], 1-based rank of the position's own token in the whole vocabulary."""

    @property
    def num_rows(self) -> int:
        """Number of positions."""
        return len(self.ranks) // 4

    def select(self, start: int, stop: int) -> LogprobsLists:
        """Return the rows from `start` up to, but not including, `stop`."""
        if not self.ranks:
            return self
        row = len(self.token_ids) // self.num_rows
        return LogprobsLists(
            self.token_ids[start * row : stop * row],
            self.logprobs[start * row : stop * row],
            self.ranks[start * 4 : stop * 4],
        )

    @staticmethod
    def join(parts: Sequence[LogprobsLists]) -> LogprobsLists:
        """Join the rows of all parts in order; all rows must have the same number of entries."""
        return LogprobsLists(
            b"".join(part.token_ids for part in parts),
            b"".join(part.logprobs for part in parts),
            b"".join(part.ranks for part in parts),
        )


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """Result of one step for one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs: LogprobsLists | None = None
    """Rows for the newly computed prompt positions, in order; the first row is position 1."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """Stop token that ended the request, if the request names it; None for the end of sequence."""
    error: str | None = None
    """Error message, with `FinishReason.ERROR`."""
    error_kind: str | None = None
    """Name of the error class in `octavo.errors` for `error`."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; with statistics only."""
    first_scheduled_time: float | None = None
    """Time of the request's first step; None: the output has no statistics. It has some up to the
    first token, after a change, and at the end."""
    num_preemptions: int = 0
    """With statistics only."""
    kv_transfer_params: dict[str, Any] | None = None
    """With the last token: the KV connector's parameters for continuing on another engine."""
    repetition: Repetition | None = None
    """Loop in the answer so far."""
    num_computed_tokens: int = 0
    """Number of prompt tokens computed so far; only before the first token, and on request."""
    num_draft_tokens: int = 0
    """Number of drafts proposed for the request so far; with statistics only."""
    num_accepted_tokens: int = 0
    """Number of accepted ones; with statistics only."""
    num_stored_tokens: int = 0
    """Prompt tokens with cached keys and values, with statistics only; more than
    `num_cached_tokens` if a recurrent state was missing."""
    pooled: bytes | None = None
    """Result of a `PoolingSpec`: float32 [n], or for each token [tokens, n]. The request ends."""


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """Message that the engine core sends after a step."""

    outputs: list[EngineCoreOutput] = []
    stats: SchedulerStats | None = None
    timestamp: float = 0.0
    """Time at the end of the step."""
    engine_index: int = 0
    """Index of the engine that sends the message."""
    steps: list[msgspec.Raw] = []
    """A `StepRecord` as msgpack for each step that has ended since the last message; empty without
    `EngineProcesses.reports_steps`."""


class NewRequestData(msgspec.Struct, array_like=True):
    """The worker's data of a request that is new, or resumed after a preemption."""

    token_ids: list[int]
    """Tokens of the prompt and, if resumed, those generated so far."""
    num_prompt_tokens: int
    sampling_params: CoreSamplingParams
    num_computed_tokens: int
    """Number of tokens found in the prefix cache. The worker counts later tokens itself."""
    private: bool = False
    """True if other requests may not use any of its data."""
    prompt_embeds: PromptEmbeds | None = None
    """Embeddings of the prompt; see `EngineCoreRequest`."""
    state_slots: list[int] = []
    """Slots of its recurrent states, in rotation: the state after the token at position p is in
    slot p mod n. Empty if the model has no states."""
    state_source: int = -1
    """Slot with the state after `num_computed_tokens` tokens; -1: none were computed."""
    pooling: PoolingSpec | None = None
    """Result in place of tokens; see `EngineCoreRequest`."""
    adapter_slot: int = -1
    """Slot of its adapter; -1: it has none."""
    adapter_begin: int = 0
    """Index of the first token that the adapter changes."""
    mm_features: list[MultiModalFeatureSpec] = []
    """Items of the prompt; see `EngineCoreRequest`. `data` is empty for those that no encoder
    has to read again."""


class ScheduledRequest(msgspec.Struct, array_like=True):
    """One request's part of a step. The worker holds a row for it, or allocates one if `new`."""

    req_id: str
    num_tokens: int
    """Number of tokens to compute after the request's computed tokens, drafts included."""
    new_block_ids: list[list[int]] | None = None
    """Blocks to append, one list for each KV-cache group; None: no new ones."""
    num_drafts: int = 0
    """Number of places for drafts, the last of `num_tokens`. The worker proposes the drafts when
    the step begins; it skips places without a draft."""
    has_grammar: bool = False
    """True if sampling for the request waits for the bitmask of a `GrammarOutput` in this step."""
    new: NewRequestData | None = None
    snapshots: list[tuple[int, int]] = []
    """Pairs (n, slot): copy the state after the request's first n tokens to the slot, once they are
    computed."""


class AdapterChange(msgspec.Struct, array_like=True, frozen=True):
    """Change of a worker's adapters."""

    slot: int
    adapter: AdapterRef | None
    """Adapter to read, beside the steps; None: the slot becomes empty."""


class AdapterLoaded(msgspec.Struct, array_like=True, frozen=True):
    """Result of reading an adapter on a worker."""

    slot: int
    error: str | None = None
    """Reason why the slot stays empty."""
    error_kind: str = "AdapterError"
    """Name of the error class in `octavo.errors` for `error`."""


class EncoderSlice(msgspec.Struct, array_like=True, frozen=True):
    """Part of an encoder's run for one item: some of its pieces, see `EncoderSpec.pieces`."""

    item: MultiModalFeatureSpec
    """The item. It has its data if `begin` is 0, unless a request that was sent has them."""
    begin: int
    """First piece; 0 begins the run, in place of any other."""
    end: int
    """Piece after the last one."""


class SchedulerOutput(msgspec.Struct, array_like=True):
    """Work of one step."""

    scheduled_reqs: list[ScheduledRequest] = []
    """Requests in batch order."""
    total_num_scheduled_tokens: int = 0
    finished_req_ids: list[str] = []
    """Finished or preempted requests; the worker frees their rows before this step."""
    blocks_to_copy: list[tuple[int, int]] = []
    """(source, destination) block ids to copy before this step: copy on write."""
    loaded_block_ids: list[int] = []
    """Blocks that a KV connector fills from this step on. The drafter discards its data of them,
    which belongs to earlier requests."""
    kv_connector_metadata: bytes | None = None
    """Encoded message of the scheduler's half of a KV connector to the workers' half."""
    kv_loads_before: list[str] = []
    """Requests whose blocks a KV connector loads before this step instead of during it."""
    serves: bool = False
    """True for a step without requests that takes part in a step of other engines, which need this
    engine's experts."""
    adapter_changes: list[AdapterChange] = []
    """Changes of the adapters to begin before this step, in order."""
    scheduled_encoder_inputs: dict[str, list[int]] = {}
    """By request id, the indices in `mm_features` of the items that encoders compute in this
    step."""
    free_encoder_mm_hashes: list[str] = []
    """Identifiers of the items whose rows the worker forgets before this step."""
    encoder_slice: EncoderSlice | None = None
    """Part of an encoder's run that takes several steps. If it ends the run, the item is one of
    `scheduled_encoder_inputs`."""


class KVConnectorOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """Transfers that the worker's half of a KV connector has finished."""

    finished_sending: list[str] = []
    """Requests whose blocks the connector no longer needs."""
    finished_recving: list[str] = []
    """Requests whose loads have ended, successfully or not."""
    invalid_block_ids: list[int] = []
    """Blocks of `finished_recving` with wrong contents."""


class GrammarOutput(msgspec.Struct, array_like=True):
    """Tokens that the grammars of a step's requests allow; sent while the model computes."""

    req_ids: list[str]
    """Requests scheduled with `has_grammar`."""
    bitmask: bytes
    """int32 [rows, ceil(vocab / 32)] as in `Ops.apply_bitmask_`. In the order of `req_ids`, each
    request has one row for each position that it samples: its number of drafts plus 1."""
    forced: dict[str, list[int]] = {}
    """Tokens that a grammar forces, by request, after those known when the mask was made. Later
    steps use them as drafts."""


class ExpertLoad(msgspec.Struct, array_like=True):
    """Tokens of experts, by layer; a layer without experts has zeros."""

    num_experts: int = 0
    """Most experts of a layer."""
    tokens: list[int] = []
    """Choices of all experts together."""
    most: list[int] = []
    """Choices of the most chosen expert."""
    num_rearrangements: int = 0
    """Number of changes of the place of a layer's experts."""
    process_tokens: tuple[float, float] = (0.0, 0.0)
    """Mean and maximum of the choices that a process computes, each summed over all layers, in the
    last window of the balancing."""


class ModelRunnerOutput(msgspec.Struct, array_like=True):
    """Result of one step, in the order of `req_ids`."""

    req_ids: list[str] = []
    sampled_token_ids: list[list[int]] = []
    """New tokens of each request: its accepted drafts and one more. Empty while its prompt is
    being computed."""
    logprobs: dict[str, LogprobsLists] = {}
    prompt_logprobs: dict[str, LogprobsLists] = {}
    num_draft_tokens: dict[str, int] = {}
    """Number of drafts of each request that had drafts in the step. The number of accepted drafts
    is its number of new tokens minus 1."""
    errors: dict[str, str] = {}
    """Error messages of requests that failed without their step; they have no new tokens."""
    expert_counts: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    """Experts found in memory, experts waited for, bytes read, experts fetched ahead, and those of
    them that were used, since the start."""
    forget_prefixes: bool = False
    """True if some keys and values of the cache are unusable: experts could not be read."""
    expert_load: ExpertLoad | None = None
    """Sums over all steps of the tokens of experts; None: the model has none."""
    sample_seconds: float = 0.0
    """Time of the worker after the forward pass, within which a captured step samples."""
    pooled: dict[str, bytes] = {}
    """Results of the requests with a `PoolingSpec` that have all tokens computed."""


class UtilityCall(msgspec.Struct, array_like=True):
    """A call of one of the engine core's utility methods."""

    call_id: int
    method: str
    args: list[Any] = []


class UtilityResult(msgspec.Struct, array_like=True):
    """Result of a `UtilityCall`: a plain value or an error."""

    call_id: int
    value: Any = None
    error: str | None = None
    error_kind: str | None = None
    """Name of the error class."""
