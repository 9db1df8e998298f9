"""Setup of a worker, which the control plane creates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kv_cache.groups import KVCacheGroup, make_kv_cache_groups, select_layers
from octavo.kv_connector.layout import KVLayout
from octavo.layers.adapter_table import ADAPTER_SLOTS
from octavo.layers.step_table import StepArray, StepSize
from octavo.messages import Modality
from octavo.models.expert_sizes import ExpertSizes, divide_slots
from octavo.models.spec import ModelSpec, divide_layers
from octavo.models.state_cache import StateCache
from octavo.plan.balance_layout import BalanceLayout
from octavo.plan.group_layout import GroupLayout
from octavo.plan.memory import Scratch
from octavo.structured_output.base import MAX_FORCED
from octavo.system.distributed import ALONE, Rank
from octavo.system.dtypes import DTYPE_NBYTES

# Prompt logprobs need logits for every prompt token. They are computed for at most this number of
# tokens at a time, or for `max_num_seqs` if that is less: an ordinary step has memory for them.
PROMPT_LOGPROBS_ROWS = 64
FORCED_DRAFTS = 32
"""Most places in a step for drafts of grammars, without speculative decoding."""


def resolve_kv_cache_dtype(config: EngineConfig, dtype: str) -> str:
    """Return the type of the KV cache of a model in `dtype`, as `CacheSpec` names it.

    Raises:
        ConfigError: the configured type has 16 or 32 bits and is not the model's type.
    """
    match config.cache.kv_cache_dtype:
        case "auto":
            return dtype
        case "fp8":
            return "fp8_e4m3"
        case ("float32" | "float16" | "bfloat16") as asked if asked != dtype:
            raise ConfigError(
                f"kv_cache_dtype={asked} is not supported with a model in {dtype}; use auto, "
                "fp8_e4m3, fp8_e5m2 or int8."
            )
        case asked:
            return asked


class Machine(msgspec.Struct, frozen=True):
    """One of several machines whose engines divide the experts; see `ExpertRelay`."""

    first_engine: int
    """Index of the machine's first engine; 0: it is the head."""
    num_engines: int
    address: str
    """Address of the head's relay, in ZMQ's form."""
    public: bytes
    secret: bytes
    """Secret key of the cluster's key pair; both keys are Z85."""
    generation: bytes
    """Random id of the engines that were started together; others are not connected."""


@dataclass(frozen=True)
class WorkerSetup:
    """Setup of a worker and its part of the model."""

    config: EngineConfig
    spec: ModelSpec
    model_path: Path
    dtype: str
    """"float32", "float16" or "bfloat16"."""
    max_model_len: int
    max_num_batched_tokens: int
    scratches: tuple[Scratch, ...] = ()
    """Planned memory of steps on a CPU, of each stage."""
    kept_layers: tuple[int, ...] = ()
    """Layers with hidden states that steps return, for draft heads."""
    draft: WorkerSetup | None = None
    """Setup of the draft model. It uses the same blocks as the target."""
    rank: Rank = ALONE
    """Rank of the worker among the processes that compute the model."""
    model_identity: str = ""
    """Identity of the model, for KV connectors; see `KVLayout.model`."""
    group: int | None = None
    """Inherited descriptor of the ranks' memory of `group_nbytes` bytes."""
    engine: Rank = ALONE
    """Position of the engine among those that divide the experts."""
    expert_memory: tuple[str, ...] = ()
    """Paths of the memories of these engines, by stage."""
    machine: Machine | None = None
    """This machine, if these engines are on several; None: all are here."""

    @property
    def first_rank(self) -> int:
        """Index of the engine's first process among those of all engines that have this stage."""
        return self.engine.index * self.rank.size

    @property
    def expert_rank(self) -> Rank:
        """Position of the rank among the processes of all engines that have this stage."""
        if self.engine.size == 1:
            return ALONE
        index, size = self.first_rank + self.rank.index, self.engine.size * self.rank.size
        return replace(self.engine, index=index, size=size)

    @property
    def meeting_rank(self) -> Rank:
        """Position of the rank among those that meet in this machine's memory.

        On several machines the last one is a relay, in place of the ranks of the other machines.
        """
        if self.machine is None:
            return self.expert_rank
        index = self.expert_rank.index - self.machine.first_engine * self.rank.size
        size = self.machine.num_engines * self.rank.size + 1
        return replace(self.engine, index=index, size=size)

    @property
    def kv_cache_dtype(self) -> str:
        """Type of the KV cache, as `CacheSpec` names it."""
        return resolve_kv_cache_dtype(self.config, self.dtype)

    @cached_property
    def part(self) -> ModelSpec:
        """Part of the model that this rank computes."""
        return self._of_stage(self.spec.split(self.rank).split_experts(self.expert_rank))

    @property
    def has_embeds(self) -> bool:
        """True if rows may replace the embeddings of tokens: those of prompts, or of encoders."""
        encoders = bool(self.part.encoders) and not self.spec.is_encoder_decoder
        return self.config.model.enable_prompt_embeds or encoders

    @property
    def encoder_cache_size(self) -> int:
        """Number of rows that the encoder cache holds: those of a step's tokens, or of the longest
        item if that is more; 0 without encoders, and if cross attention reads the rows."""
        if self.spec.is_encoder_decoder:
            return 0
        longest = max((encoder.longest_item for encoder in self.spec.encoders), default=0)
        rows = max(self.max_num_batched_tokens, min(longest, self.max_model_len))
        return rows if longest else 0

    @property
    def encoder_pieces(self) -> dict[Modality, Callable[[int, int], int]]:
        """Function of each modality from the tokens and rows of an item to the number of pieces of
        its run; empty if cross attention reads the rows."""
        encoders = () if self.spec.is_encoder_decoder else self.spec.encoders
        return {
            modality: encoder.num_pieces
            for encoder in encoders
            for modality in (encoder.modality, *encoder.modalities)
        }

    @property
    def longest_sequence(self) -> int:
        """Most tokens that attention reads at a time, of the decoder or of an encoder."""
        return max(self.max_model_len, *(it.max_num_tokens for it in self.spec.encoders), 0)

    @property
    def encoder_cache_nbytes(self) -> int:
        """Bytes of the encoder cache of a worker."""
        sizes = [encoder.out_size for encoder in self.spec.encoders]
        return self.encoder_cache_size * max(sizes, default=0) * DTYPE_NBYTES[self.dtype]

    @property
    def step_arrays(self) -> tuple[StepArray, ...]:
        """Arrays of a step that the model's blocks and its adapters need."""
        return (*self.part.step_arrays, *self.adapter_arrays)

    @property
    def adapter_arrays(self) -> tuple[StepArray, ...]:
        """Arrays of a step that the model's adapters need."""
        return (ADAPTER_SLOTS,) if self.config.lora.enable_lora else ()

    @property
    def whole_layers(self) -> ModelSpec:
        """Layers of this rank, with the parts that other ranks compute."""
        return self._of_stage(self.spec)

    def _of_stage(self, spec: ModelSpec) -> ModelSpec:
        return spec if self.rank.num_stages == 1 else spec.stage(*self.stage_layers)

    @property
    def expert_sizes(self) -> ExpertSizes:
        """Sizes of this rank's experts."""
        return ExpertSizes.of(self.part.weights(), self.dtype)

    @cached_property
    def expert_slots(self) -> int:
        """Number of slots of this rank's expert cache; 0: there is no cache.

        Raises:
            ConfigError: the model has no experts, or expert_cache is too small for one token.
        """
        size = self.config.load.expert_cache
        if size is None:
            return 0
        ranks = [
            replace(self, rank=Rank.of(number, self.config.device)).expert_sizes
            for number in range(self.rank.world_size)
        ]
        return divide_slots(size, ranks, self.spec.architecture)[self.rank.number]

    @cached_property
    def balance_layout(self) -> BalanceLayout | None:
        """Layout of the memory for the balancing of this rank's experts; None: they never move."""
        if self.config.device.eplb is None:
            return None
        ranks = max(self.rank.size, self.expert_rank.size)
        layout = BalanceLayout.of(self.part.weights(), self.dtype, ranks)
        return layout if layout.layers else None

    @cached_property
    def stage_layers(self) -> tuple[int, int]:
        """Layers (begin, end) of this rank."""
        asked = self.config.device.pipeline_layers
        return divide_layers(self.spec, self.rank.num_stages, asked)[self.rank.stage]

    @cached_property
    def kv_cache_groups(self) -> list[KVCacheGroup]:
        """Groups of the KV cache, the same for all ranks, with the layers of this rank."""
        groups = make_kv_cache_groups(self.spec.split(self.rank).caches)
        return groups if self.rank.num_stages == 1 else select_layers(groups, *self.stage_caches)

    @cached_property
    def stage_caches(self) -> tuple[int, int]:
        """Caches (begin, end) of this rank's layers."""
        return self.spec.cache_range(*self.stage_layers)

    @property
    def kv_layout(self) -> KVLayout:
        """Layout of this rank's part of a block of the KV cache."""
        device = self.config.device
        size = device.tensor_parallel_size * device.pipeline_parallel_size
        ranks = [replace(self, rank=Rank.of(number, device)) for number in range(size)]
        layouts = [rank._own_kv_layout for rank in ranks]
        return replace(
            layouts[self.rank.number],
            largest_copy_nbytes=max(layout.copy_nbytes for layout in layouts),
            most_pieces=max(layout.num_pieces for layout in layouts),
        )

    @property
    def _own_kv_layout(self) -> KVLayout:
        """The layout of this rank alone, without the sizes on other ranks."""
        device, groups = self.config.device, self.kv_cache_groups
        return KVLayout(
            model=self.model_identity,
            block_size=self.config.cache.block_size,
            dtype=self.kv_cache_dtype,
            groups=tuple(group for group in groups if not group.has_states),
            states=tuple(group for group in groups if group.has_states),
            first_layer=self.stage_caches[0] if self.rank.num_stages > 1 else 0,
            rank=self.rank.number,
            world_size=device.tensor_parallel_size * device.pipeline_parallel_size,
            sums_in_parts=self.rank.reduces,
        )

    @property
    def stages(self) -> list[WorkerSetup]:
        """Setup of the first rank of each stage."""
        firsts = [replace(self.rank, index=0, stage=i) for i in range(self.rank.num_stages)]
        return [replace(self, rank=rank) for rank in firsts]

    @property
    def peers(self) -> list[WorkerSetup]:
        """Setups of all ranks of this rank's stage."""
        ranks = [replace(self.rank, index=index) for index in range(self.rank.size)]
        return [replace(self, rank=rank) for rank in ranks]

    @property
    def scratch(self) -> Scratch | None:
        """Planned memory of this rank's steps."""
        return self.scratches[self.rank.stage] if self.scratches else None

    @property
    def prompt_logprobs_rows(self) -> int:
        """Most rows of logits of prompt tokens at a time."""
        return min(PROMPT_LOGPROBS_ROWS, self.config.scheduler.max_num_seqs)

    @property
    def group_nbytes(self) -> int:
        """Size of the memory of all ranks in bytes; see `GroupLayout`."""
        return self.group_layout.nbytes

    @property
    def group_layout(self) -> GroupLayout:
        """Layout of the memory that ranks share."""
        return GroupLayout(
            size=self.largest_step,
            max_num_drafts=self.max_num_drafts,
            num_slots=self.max_in_flight + 1,
            rank=self.rank,
            handed_nbytes=self.spec.handed_numbers * DTYPE_NBYTES[self.dtype],
            buffers=[scratch.shared for scratch in self.scratches],
            balancing=self._balancing,
        )

    @cached_property
    def _balancing(self) -> list[int]:
        """Bytes of each stage's memory for the balancing of experts among the engine's ranks."""
        if self.config.device.eplb is None or self.engine.size > 1:
            return []
        layouts = [stage.balance_layout for stage in self.stages]
        return [0 if layout is None else layout.nbytes for layout in layouts]

    @property
    def max_in_flight(self) -> int:
        """Most steps that may be submitted before the result of the first one arrives."""
        return self.rank.num_stages + self.config.scheduler.async_scheduling

    @property
    def num_speculative_tokens(self) -> int:
        """Most drafts of a request in a step."""
        speculative = self.config.speculation.speculative_config
        return 0 if speculative is None else speculative.num_drafts

    @property
    def max_num_drafts(self) -> int:
        """Most drafts of all requests in a step; grammars draft without speculation, too."""
        requests = self.config.scheduler.max_num_seqs
        forced = 0 if self.has_states else min(requests * MAX_FORCED, FORCED_DRAFTS)
        return max(requests * self.num_speculative_tokens, forced)

    @property
    def has_states(self) -> bool:
        """True if the model has layers with recurrent states."""
        return any(isinstance(cache, StateCache) for cache in self.spec.caches)

    @property
    def states_per_request(self) -> int:
        """Number of slots of a request's recurrent state: one, and one for each draft of a step.

        Each draft needs a copy of the state. So without speculation grammars draft nothing.
        """
        drafts = self.num_speculative_tokens
        return 1 + (max(drafts, MAX_FORCED) if drafts else 0)

    @property
    def max_encoder_len(self) -> int:
        """Most tokens of an encoder-decoder's encoder for a request; 0: it has none.

        A step computes them beside at least one token of the decoder.
        """
        return min(self.spec.max_encoder_len, self.max_num_batched_tokens - 1)

    @property
    def largest_step(self) -> StepSize:
        """Size of the largest step."""
        tokens, requests = self.max_num_batched_tokens, self.config.scheduler.max_num_seqs
        samples = min(requests + self.max_num_drafts, tokens)  # one for each token at most
        return StepSize(tokens, requests, max(requests, samples))
