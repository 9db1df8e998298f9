"""What the parts say to each other: the only place where control plane and data plane meet.

Front end -> engine core: `EngineCoreRequest`, abort and utility calls.
Scheduler -> worker: `SchedulerOutput`, a plain record of what changed since the last step.
Worker -> scheduler: `ModelRunnerOutput`. Engine core -> front end: `EngineCoreOutputs`.
All are msgspec structs, so every one of them can cross a process border. Times are seconds of
`clock.now`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from octavo.observability.scheduler_stats import SchedulerStats


class FinishReason(enum.IntEnum):
    """Why a request ended; `str()` gives OpenAI's word."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


EmbedsDtype: TypeAlias = Literal["float64", "float32", "float16", "bfloat16"]
EMBEDS_DTYPES: dict[EmbedsDtype, int] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Of `PromptEmbeds`: bytes of a number."""

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
"""What becomes of unfinished requests when an engine is put to sleep; see `EngineCore.sleep`."""


class BadWordsTokenIds(msgspec.Struct, array_like=True, frozen=True):
    """Token sequences that may not be generated, as arrays of int32 (`NO_TOKEN`: padding)."""

    prefixes: bytes
    """[words, longest - 1]: all but the last token of each, padded on the left."""
    last: bytes
    """[words]"""


NO_TOKEN = -1


class GrammarSpec(msgspec.Struct, array_like=True, frozen=True):
    """What an answer has to look like (structured output)."""

    kind: Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
    text: str = ""
    """A JSON schema, a regular expression, a JSON list of choices, a grammar (EBNF or Lark), a
    structural tag in JSON; nothing for json_object."""
    backend: Literal["auto", "xgrammar", "llguidance"] = "auto"
    """auto: the first one that supports it."""
    any_whitespace: bool = True
    """Whether JSON may have white space between its parts."""
    additional_properties: bool = False
    """Whether JSON may have properties and items that its schema neither names nor forbids."""
    strict: bool = False
    """Refuse a schema with a `format` that cannot be enforced, instead of leaving it out."""


class CoreSamplingParams(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What the engine core must know of a request's `SamplingParams`, and nothing else.

    Made by `make_core_params`, which completes and packs what has been checked: decoding checks
    types only, and the n requests of a group share whatever is long.
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
    """Token ids int32 [logprobs]: these, not the most probable ones."""
    prompt_logprobs: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    """Those that the request brought."""
    all_stop_token_ids: frozenset[int] = frozenset()
    """Every token that ends the answer, the end of sequence included."""
    allowed_token_ids: bytes | None = None
    """Bitmask int32 [ceil(vocab / 32)] as in `Ops.apply_bitmask_`."""
    logit_bias: tuple[bytes, bytes] | None = None
    """Token ids int32 [E], none twice, and what is added to their logits, float32 [E]."""
    bad_words: BadWordsTokenIds | None = None
    grammar: GrammarSpec | None = None
    extra_args: dict[str, Any] | None = None
    """What it asks of logits processors of plug-ins: plain data."""

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0


class PromptEmbeds(msgspec.Struct, array_like=True, frozen=True):
    """Embeddings that come with a prompt, as they go into the model instead of its tokens'."""

    data: bytes
    """[tokens, size], checked: all are finite."""
    dtype: EmbedsDtype
    size: int
    """Numbers of an embedding."""

    @property
    def row_nbytes(self) -> int:
        """Bytes of an embedding."""
        return self.size * EMBEDS_DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return len(self.data)

    @property
    def num_tokens(self) -> int:
        """How many there are."""
        return self.nbytes // self.row_nbytes

    def rows(self, start: int, stop: int) -> memoryview:
        """Bytes of those from `start` up to `stop`."""
        return memoryview(self.data)[start * self.row_nbytes : stop * self.row_nbytes]


class RequestOptions(msgspec.Struct, array_like=True, frozen=True):
    """The envelope of a request: its properties besides the prompt and the sampling parameters.

    The server or the public method of an engine makes it; `InputProcessor.process` adds what the
    prompt and the parameters say. From there the same object goes to the scheduler.
    """

    arrival_time: float
    tenant: str | None = None
    """The sender of the request. Tenants share tokens fairly, see `scheduler/fairness.py`."""
    priority: int = 0
    """Rank with `scheduling_policy=priority`: smaller is served earlier."""
    deadline: float | None = None
    """Time at which the request ends with an error."""
    first_token_deadline: float | None = None
    """Time at which the request ends with an error if it has no token yet."""
    turn: int = 0
    """Number of prompts before it in the same call; see `scheduler/queue.py`."""
    cache_salt: str | None = None
    """Scope of the prefix cache: only requests with the same salt share blocks."""
    kv_transfer_params: dict[str, Any] | None = None
    """Parameters for the KV connector."""
    flow: int | None = None
    """Class of the client's address. Without tenants, flows share tokens fairly."""

    @property
    def share(self) -> str | int | None:
        """The tenant, or else the flow: tokens are shared fairly between shares."""
        return self.flow if self.tenant is None else self.tenant

    @property
    def due(self) -> float:
        """The earlier one of the deadlines; infinite if there is no deadline."""
        first = math.inf if self.first_token_deadline is None else self.first_token_deadline
        return first if self.deadline is None else min(self.deadline, first)


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A prompt as the front end hands it to the engine core: checked and tokenised.

    With n > 1 it travels once, and the core makes n requests of it.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: CoreSamplingParams
    options: RequestOptions
    n: int = 1
    """Answers."""
    output_token_ids: list[int] = []
    """Output that the request has already: it goes on behind it, as if it had made it here. None
    of these tokens ends it; they count against `max_tokens` and `min_tokens`."""
    num_prompt_logprobs: int = 0
    """Prompt logprobs that it has already."""
    prompt_embeds: PromptEmbeds | None = None
    """In place of the first tokens of the prompt, whose ids are 0 and mean nothing."""
    answers: dict[int, list[int]] | None = None
    """With n > 1, of a request that goes on: those of its answers that are still to be made, by
    their index, with their `output_token_ids`. None: all, from the start."""

    @property
    def known_token_ids(self) -> list[int]:
        """The prompt's tokens that did not come as embeddings."""
        if self.prompt_embeds is None:
            return self.prompt_token_ids
        return self.prompt_token_ids[self.prompt_embeds.num_tokens :]

    @property
    def indices(self) -> Iterable[int]:
        """Of the answers that are to be made."""
        return range(self.n) if self.answers is None else self.answers

    @property
    def child_ids(self) -> list[str]:
        """Ids of the core's requests, one for each answer to be made: its own if n is 1."""
        return [self._child_id(index) for index in self.indices]

    def _child_id(self, index: int) -> str:
        return self.request_id if self.n == 1 else f"{index}_{self.request_id}"

    def child(self, index: int) -> EngineCoreRequest:
        """The request for one of the answers: itself if it has but one.

        Child i of n > 1 has the seed `seed + i`, only the first one brings the prompt's logprobs,
        and none has tokens yet.
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
    """Logprobs of some consecutive positions of one request, as arrays.

    A row has 1 + k entries; the first one is the token itself.
    """

    token_ids: bytes = b""
    """int32 [rows, 1 + k]"""
    logprobs: bytes = b""
    """float32 [rows, 1 + k]"""
    ranks: bytes = b""
    """int32 [rows], 1-based rank of the token itself among the whole vocabulary."""

    @property
    def num_rows(self) -> int:
        """How many positions."""
        return len(self.ranks) // 4

    def select(self, start: int, stop: int) -> LogprobsLists:
        """The rows from `start` up to `stop`."""
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
        """All rows, in order; they are equally long."""
        return LogprobsLists(
            b"".join(part.token_ids for part in parts),
            b"".join(part.logprobs for part in parts),
            b"".join(part.ranks for part in parts),
        )


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one step brought for one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs: LogprobsLists | None = None
    """Rows for prompt positions in order, starting at position 1, as they get computed."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token, if one of the request's own ended it; None for the end of sequence."""
    error: str | None = None
    """What went wrong, with `FinishReason.ERROR`."""
    error_kind: str | None = None
    """Name of the error class in `octavo.errors` for `error`."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    first_scheduled_time: float | None = None
    """When the request was part of a step for the first time."""
    num_preemptions: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    """With the last token: what the KV connector tells whoever goes on elsewhere."""


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """What the engine core sends after a step."""

    outputs: list[EngineCoreOutput] = []
    stats: SchedulerStats | None = None
    timestamp: float = 0.0
    """When the step ended."""
    engine_index: int = 0
    """Which engine it comes from."""


class NewRequestData(msgspec.Struct, array_like=True):
    """What the worker must know of a request that is new, or resumed after a preemption."""

    token_ids: list[int]
    """Prompt and, if resumed, the tokens generated so far."""
    num_prompt_tokens: int
    sampling_params: CoreSamplingParams
    num_computed_tokens: int
    """Found in the prefix cache. From here on the worker itself knows how far it is."""
    private: bool = False
    """Whether nothing of it may be used for other requests."""
    prompt_embeds: PromptEmbeds | None = None
    """See `EngineCoreRequest`."""


class ScheduledRequest(msgspec.Struct, array_like=True):
    """One request's part of a step. The worker holds a row for it, or is to give it one (`new`)."""

    req_id: str
    num_tokens: int
    """To compute, places for drafts included, from where the request truly stands."""
    new_block_ids: list[list[int]] | None = None
    """Blocks to append, one list for each KV-cache group; None: no new ones."""
    num_drafts: int = 0
    """How many of them, the last ones, are places for drafts. The worker proposes these when the
    step begins; places without a draft are left out."""
    has_grammar: bool = False
    """Whether its sampling in this step waits for a bitmask, which comes in `GrammarOutput`."""
    new: NewRequestData | None = None


class SchedulerOutput(msgspec.Struct, array_like=True):
    """One step's work."""

    scheduled_reqs: list[ScheduledRequest] = []
    """In batch order."""
    total_num_scheduled_tokens: int = 0
    finished_req_ids: list[str] = []
    """Requests whose rows the worker gives up before this step: finished or preempted."""
    blocks_to_copy: list[tuple[int, int]] = []
    """(source, destination) block ids to copy before this step: copy on write."""
    loaded_block_ids: list[int] = []
    """Blocks that a KV connector fills from now on: what a drafter has of them is another's."""
    kv_connector_metadata: bytes | None = None
    """What the scheduler's half of a KV connector tells the workers', encoded."""
    kv_loads_before: list[str] = []
    """Requests whose blocks a KV connector loads before this step, not beside it."""


class KVConnectorOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """What the worker's half of a KV connector has finished."""

    finished_sending: list[str] = []
    """Requests whose blocks it needs no more."""
    finished_recving: list[str] = []
    """Requests whose blocks are loaded, or will not be."""
    invalid_block_ids: list[int] = []
    """Blocks of these that hold something else than they should."""


class GrammarOutput(msgspec.Struct, array_like=True):
    """What the grammars of a step's requests allow; it comes while the model computes."""

    req_ids: list[str]
    """Those scheduled with `has_grammar`."""
    bitmask: bytes
    """int32 [rows, ceil(vocab / 32)] as in `Ops.apply_bitmask_`: in order of `req_ids` a row for
    each position that the request samples, that is one more than it has drafts."""
    forced: dict[str, list[int]] = {}
    """Where a grammar leaves one way on: the tokens of its text behind those that were known when
    the mask was made. They are drafts for the steps to come."""


class ModelRunnerOutput(msgspec.Struct, array_like=True):
    """One step's result, in the order of `req_ids`."""

    req_ids: list[str] = []
    sampled_token_ids: list[list[int]] = []
    """New tokens of each request; none while its prompt is still being computed. Of its drafts
    those that are what it samples there, and one more."""
    logprobs: dict[str, LogprobsLists] = {}
    prompt_logprobs: dict[str, LogprobsLists] = {}
    num_draft_tokens: dict[str, int] = {}
    """Drafts that requests had in the step, if any. One less than they got tokens were right."""
    errors: dict[str, str] = {}
    """Requests that failed by themselves, with the reason; they get no tokens."""


class UtilityCall(msgspec.Struct, array_like=True):
    """A call of one of the engine core's utility methods."""

    call_id: int
    method: str
    args: list[Any] = []


class UtilityResult(msgspec.Struct, array_like=True):
    """Its answer: a plain value, or what went wrong."""

    call_id: int
    value: Any = None
    error: str | None = None
    error_kind: str | None = None
    """Name of the error's class."""
