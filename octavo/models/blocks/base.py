"""What every block of a model offers, and what it is built from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from octavo.models.cache import CacheSpec
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.attention.base import AttentionBackend
    from octavo.kernels.base import Ops, PackedWeight, QuantizedWeight
    from octavo.layers.layer import FeedForward, Mixer
    from octavo.layers.shared import Columns, SharedBuffers


class Table(Protocol):
    """A tensor that is computed, not loaded, and shared by the blocks that have equal ones.

    Hashable.
    """

    def nbytes(self, max_model_len: int) -> int:
        """Bytes, for a context of so many tokens."""
        ...


class Block(Protocol):
    """A part of a layer; a frozen dataclass."""

    def weights(self, names: Names) -> Iterator[Weight]:
        """What is to be loaded, in the order in which the forward pass uses it."""
        ...


@runtime_checkable
class Split(Protocol):
    """A block that several ranks may have parts of."""

    def split(self, rank: Rank) -> Any:
        """What a rank has of it: a block of the same kind.

        Raises:
            ConfigError: not among so many.
        """
        ...


class FeedForwardSpec(Block, Protocol):
    """What a layer does with each token by itself."""

    def build(self, parts: Parts) -> FeedForward:
        """The live block."""
        ...


class MixerSpec(Block, Protocol):
    """What a layer does with a token and those before it."""

    def cache(self) -> CacheSpec | None:
        """What it keeps; None: nothing."""
        ...

    def tables(self) -> tuple[Table, ...]:
        """What it computes with beside its weights."""
        ...

    def scratch_nbytes(
        self, backend: AttentionBackend, num_tokens: int, max_model_len: int, num_threads: int
    ) -> int:
        """Most bytes that kernels keep for themselves in a step of so many tokens."""
        ...

    def build(self, parts: Parts, cache: int) -> Mixer:
        """The live block, whose cache has that index in `StepContext.caches`."""
        ...


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
        self, name: str, size: int, part: tuple[int, int], dtype: torch.dtype | None = None
    ) -> Columns:
        """Columns from ... to ... of rows that ranks fill together: see `SharedBuffers`.

        `dtype`: default: the model's.
        """
        assert self._shared is not None, "a rank's part needs the others"
        return self._shared.columns(name, size, part, dtype or self._shared.dtype)

    @property
    def splits_rows(self) -> bool:
        """See `Rank`."""
        return self._shared is not None and self._shared.rank.splits_rows

    def table(self, table: Table, compute: Callable[[], Tensor]) -> Tensor:
        """A table on the device; computed once."""
        if table not in self._tables:
            self._tables[table] = compute().to(self.device)
        return self._tables[table]
