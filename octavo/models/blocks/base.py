"""Interface of every block of a model, and the parts that a live block is built from."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.errors import ConfigError
from octavo.layers.step_table import StepArray
from octavo.models.cache import CacheSpec
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo._native import ExpertLayer
    from octavo.attention.base import AttentionBackend
    from octavo.kernels.base import Ops
    from octavo.kernels.weights import PackedWeight, QuantizedWeight
    from octavo.layers.adapter import AdaptedEmbedding, AdaptedLinear, Adapters
    from octavo.layers.cross_attention import CrossAttention
    from octavo.layers.expert_adapter import AdaptedExperts
    from octavo.layers.expert_exchange import ExpertExchange
    from octavo.layers.experts import Experts
    from octavo.layers.layer import Block
    from octavo.layers.shared import BufferRows, Columns, SharedBuffers
    from octavo.system.tensor import HostTensor, Tensor


_PRODUCTS = ("up", "down")
"""The two products of an expert."""


class Table(Protocol):
    """Tensor that is computed, not loaded; blocks with equal tables share it.

    Hashable.
    """

    def nbytes(self, max_model_len: int) -> int:
        """Return the bytes of the table for a context of `max_model_len` tokens."""
        ...


@dataclass(frozen=True, slots=True)
class LargestStep:
    """Size of the largest step, which bounds the memory that a block's kernels use.

    Attributes:
        num_tokens: tokens of the step.
        max_model_len: longest context, in tokens.
        num_threads: number of threads that compute.
    """

    num_tokens: int
    max_model_len: int
    num_threads: int


class BlockSpec(ABC):
    """Specification of a block, a part of a layer. Subclasses are frozen dataclasses.

    It describes everything that the engine needs before the block is loaded. Only `weights` and
    `build` have no default.
    """

    @abstractmethod
    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights to load, in the order in which the forward pass uses them."""

    @abstractmethod
    def build(self, parts: Parts, caches: tuple[int, ...]) -> Block:
        """Return the live block.

        Args:
            parts: the block's weights and operations.
            caches: indices of the block's caches in `StepContext.caches`.
        """

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the caches that the block uses."""
        return ()

    def cache_layer(self) -> int | None:
        """Return the index of the layer whose caches the block reads; None: it has its own."""
        return None

    def split_experts(self, rank: Rank) -> BlockSpec:
        """Return the block with the share of its experts of a rank of several engines, if any.

        Raises:
            ConfigError: there are fewer experts than ranks.
        """
        return self

    def for_adapters(self) -> BlockSpec:
        """Return the block with the experts whose changes by adapters the rank computes."""
        return self

    def in_stage(self, begin: int) -> BlockSpec:
        """Return the block in a pipeline stage whose first layer is `begin`."""
        return self

    def layer_inputs(self) -> tuple[int, int] | None:
        """Return the shape of a token's `StepContext.layer_inputs` if the block makes or reads it.

        It is (layers, numbers of a layer).
        """
        return None

    def arrays(self) -> tuple[StepArray, ...]:
        """Return the arrays of a step that the block needs in addition to those of all models."""
        return ()

    def tables(self) -> tuple[Table, ...]:
        """Return the tables that the block uses in addition to its weights."""
        return ()

    def scratch_nbytes(self, backend: AttentionBackend, largest: LargestStep) -> int:
        """Return an upper bound of the bytes that the block's kernels allocate in a step."""
        return 0

    def split(self, rank: Rank) -> BlockSpec:
        """Return the part of the block that a rank computes: a block of the same kind.

        Raises:
            ConfigError: the block cannot be split, or not among `rank.size` ranks.
        """
        raise ConfigError(
            f"tensor_parallel_size={rank.size} is not supported with models that have "
            f"{type(self).__name__}; leave it out."
        )


def is_adaptable(name: str) -> bool:
    """Return True if adapters may change a layer, by its name."""
    return name.startswith(("layers.", "embed.", "lm_head.", "project.", "poolers."))


class Parts:
    """Weights, operations and buffers that a block is built from.

    Args:
        weights: all loaded weights by name; linear ones are packed.
        ops: table of operations that packed them.
        dtype: type of weights and activations.
        max_model_len: longest context.
        shared: buffers in which ranks combine their results; None: one rank computes the model.
        cached: the layers of an expert cache, by the names of the blocks.
        expert_slots: number of experts that this cache has in memory; 0: there is no cache.
        exchange: exchange with other engines, if they divide the experts.
        adapters: changes of adapters to linear layers; None: adapters are off.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor | PackedWeight | QuantizedWeight],
        ops: Ops,
        *,
        dtype: str,
        max_model_len: int,
        shared: SharedBuffers | None = None,
        cached: Mapping[str, ExpertLayer] | None = None,
        expert_slots: int = 0,
        exchange: ExpertExchange | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.ops = ops
        self.dtype = dtype
        """Type of the model, and of all weights that are not quantized."""
        self.max_model_len = max_model_len
        self.exchange = exchange
        self.expert_slots = expert_slots
        self.mixtures: list[Experts] = []
        """All mixtures of experts that were built, in the order of the forward pass."""
        self.cross_attention: list[CrossAttention] = []
        """The same of cross attention."""
        self._shared = shared
        self._weights = weights
        self.adapters = adapters
        self._cached = cached or {}
        self._own = ""
        self._of_encoder = False
        self._tables: dict[Table, Tensor] = {}

    def of(self, part: str) -> Parts:
        """Return the parts of a component of the block, with weights named after it.

        Args:
            part: name of the component, as in `Names.of`.
        """
        parts = copy.copy(self)
        parts._own = f"{self._own}{part}."
        return parts

    def of_encoder(self, part: str, max_num_tokens: int) -> Parts:
        """Return the parts of an encoder beside the decoder; its ranks have buffers of their own.

        Args:
            part: name of the encoder.
            max_num_tokens: tokens of its longest item.
        """
        parts = self.of(part)
        parts.max_model_len, parts.adapters, parts._of_encoder = max_num_tokens, None, True
        parts._tables = {}
        return parts

    def has(self, name: str) -> bool:
        """Return True if the block has a weight with this name."""
        return self._own + name in self._weights

    @property
    def token_table(self) -> Tensor | PackedWeight | QuantizedWeight:
        """The decoder's table of tokens: its own weight, or that of the LM head."""
        own = self._weights.get("embed.weight")
        return self._weights["lm_head.weight"] if own is None else own

    @property
    def cached_experts(self) -> ExpertLayer | None:
        """The block's layer of the expert cache; None: all of its experts are in memory."""
        return self._cached.get(self._own)

    def adapted(
        self, outputs: Sequence[int], inputs: int, bias: Tensor | None
    ) -> AdaptedLinear | None:
        """Return the changes of adapters to the linear layer that these are the parts of.

        Args:
            outputs: number of outputs of each stacked module that the rank computes.
            inputs: number of inputs that the rank uses.
            bias: bias that the results contain before they are changed.
        """
        if self.adapters is None or not self._adapts(self._own):
            return None
        return self.adapters.layer(self._own, outputs, inputs, bias, has_bias=self.has("bias"))

    def adapted_embedding(self, name: str, size: int, vocab_size: int) -> AdaptedEmbedding | None:
        """Return the changes of adapters to a table of the embedding that these are the parts of.

        Args:
            name: name of the table; "": that of tokens.
            size: numbers of an embedding.
            vocab_size: number of tokens.
        """
        if self.adapters is None or not self._adapts(self._own + name):
            return None
        return self.adapters.embedding(self._own + name, size, vocab_size)

    def adapted_experts(
        self,
        have: Collection[int],
        experts: int,
        up: tuple[Sequence[int], int],
        down: tuple[Sequence[int], int],
    ) -> AdaptedExperts | None:
        """Return the changes of adapters to the experts of the mixture that these are the parts of.

        Args:
            have: numbers of the experts that the rank computes.
            experts: number of all experts.
            up: outputs and inputs of the first product of an expert, as in `adapted`.
            down: the same of the second product.
        """
        adapters = self.adapters
        if adapters is None or not adapters.adapts_experts:
            return None
        names = {part: {i: f"{self._own}experts.{i}.{part}." for i in have} for part in _PRODUCTS}
        if not any(self._adapts(layer) for part in _PRODUCTS for layer in names[part].values()):
            return None
        from octavo.layers.expert_adapter import AdaptedExperts

        first = adapters.experts(names["up"], experts, *up)
        return AdaptedExperts(adapters, first, adapters.experts(names["down"], experts, *down))

    def _adapts(self, layer: str) -> bool:
        """Return True if adapters may change a layer, by its name; they must be on."""
        assert self.adapters is not None
        targets = self.adapters.targets
        return is_adaptable(layer) and (targets is None or layer in targets)

    def linear(self, name: str) -> PackedWeight | QuantizedWeight:
        """Return a packed weight."""
        from octavo.kernels.weights import PackedWeight, QuantizedWeight

        weight = self.any(name)
        assert isinstance(weight, PackedWeight | QuantizedWeight)
        return weight

    def any(self, name: str) -> Tensor | PackedWeight | QuantizedWeight:
        """Return a weight of any kind."""
        return self._weights[self._own + name]

    def tensor(self, name: str) -> Tensor:
        """Return a weight that is not linear."""
        from octavo.kernels.weights import PackedWeight, QuantizedWeight

        weight = self.any(name)
        assert not isinstance(weight, PackedWeight | QuantizedWeight)
        return weight

    def columns(
        self,
        name: str,
        size: int,
        part: tuple[int, int],
        dtype: str | None = None,
        rows: BufferRows = "tokens",
    ) -> Columns:
        """Reserve a buffer of which each rank fills some columns; see `SharedBuffers`.

        Args:
            name: name of the buffer; blocks that never use it at the same time may share it.
            size: number of columns of all ranks.
            part: this rank's columns, as (begin, end).
            dtype: type of the buffer; default: the model's.
            rows: dimension of a step that limits the rows.
        """
        assert self._shared is not None, "a rank's part needs the others"
        if self._of_encoder:
            name, rows = f"encoder.{name}", "encoder"
        return self._shared.columns(name, size, part, dtype or self._shared.dtype, rows)

    def join_ranks(self) -> None:
        """Wait until all ranks have come here, if several compute the model."""
        if self._shared is not None:
            self._shared.barrier()

    @property
    def splits_rows(self) -> bool:
        """True if ranks split the rows of norms; see `Rank`."""
        return self._shared is not None and self._shared.rank.splits_rows and not self._of_encoder

    def table(self, table: Table, compute: Callable[[], HostTensor]) -> Tensor:
        """Return a table on the device; compute it at the first call."""
        if table not in self._tables:
            self._tables[table] = self.ops.to_device(compute())
        return self._tables[table]
