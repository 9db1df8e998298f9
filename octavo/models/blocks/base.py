"""The contract of every block of a model, and the parts that a live block is built from."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.errors import ConfigError
from octavo.layers.step_table import StepArray
from octavo.models.cache import CacheSpec
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.attention.base import AttentionBackend
    from octavo.kernels.base import Ops, PackedWeight, QuantizedWeight
    from octavo.layers.layer import Block
    from octavo.layers.shared import BufferRows, Columns, SharedBuffers


class Table(Protocol):
    """A tensor that is computed, not loaded; blocks with equal tables share it.

    Hashable.
    """

    def nbytes(self, max_model_len: int) -> int:
        """Return the bytes of the table for a context of `max_model_len` tokens."""
        ...


@dataclass(frozen=True, slots=True)
class LargestStep:
    """Bounds of the memory that a block's kernels use in a step.

    Attributes:
        num_tokens: tokens of the step.
        max_model_len: longest context, in tokens.
        num_threads: threads that compute.
    """

    num_tokens: int
    max_model_len: int
    num_threads: int


class BlockSpec(ABC):
    """A block: a part of a layer, as planned. Subclasses are frozen dataclasses.

    A block says all that the engine needs to know of it before it is loaded. Only `weights` and
    `build` have no default.
    """

    @abstractmethod
    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights to load, in the order in which the forward pass uses them."""

    @abstractmethod
    def build(self, parts: Parts, caches: tuple[int, ...]) -> Block:
        """Return the live block.

        Args:
            parts: the block's weights, and all else that it is built from.
            caches: indices of the block's caches in `StepContext.caches`.
        """

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the caches in which the block keeps the tokens it has seen."""
        return ()

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


class Parts:
    """What a block is built from.

    Args:
        weights: all that are loaded, by name, packed where they are linear.
        ops: table of operations that packed them.
        device: where they are.
        max_model_len: longest context.
        shared: where ranks put what they compute together, if there are several.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor | PackedWeight | QuantizedWeight],
        ops: Ops,
        *,
        device: torch.device,
        max_model_len: int,
        shared: SharedBuffers | None = None,
    ) -> None:
        self.ops = ops
        self.device = device
        self.max_model_len = max_model_len
        self._shared = shared
        self._weights = weights
        self._own = ""
        self._tables: dict[Table, Tensor] = {}

    def of(self, part: str) -> Parts:
        """Those of a part of the block, as `Names.of`."""
        parts = copy.copy(self)
        parts._own = f"{self._own}{part}."
        return parts

    @property
    def dtype(self) -> torch.dtype:
        """The model's: that of all weights which are not quantized."""
        return next(w.dtype for w in self._weights.values() if hasattr(w, "dtype"))

    def has(self, name: str) -> bool:
        """Whether there is a weight of that name."""
        return self._own + name in self._weights

    def any(self, name: str) -> Tensor | PackedWeight | QuantizedWeight:
        """A weight, whatever its kind."""
        return self._weights[self._own + name]

    def tensor(self, name: str) -> Tensor:
        """A weight that is no linear one."""
        from torch import Tensor

        weight = self.any(name)
        assert isinstance(weight, Tensor)
        return weight

    def columns(
        self,
        name: str,
        size: int,
        part: tuple[int, int],
        dtype: torch.dtype | None = None,
        rows: BufferRows = "tokens",
    ) -> Columns:
        """Reserve a buffer that ranks fill together, each some columns; see `SharedBuffers`.

        Args:
            name: the buffer; blocks that never use it at the same time may share it.
            size: columns of all ranks.
            part: this rank's columns, as (begin, end).
            dtype: default: the model's.
            rows: the number of a step that bounds the rows.
        """
        assert self._shared is not None, "a rank's part needs the others"
        return self._shared.columns(name, size, part, dtype or self._shared.dtype, rows)

    @property
    def splits_rows(self) -> bool:
        """See `Rank`."""
        return self._shared is not None and self._shared.rank.splits_rows

    def table(self, table: Table, compute: Callable[[], Tensor]) -> Tensor:
        """A table on the device; computed once."""
        if table not in self._tables:
            self._tables[table] = compute().to(self.device)
        return self._tables[table]
