"""Specification of a matrix product: one weight, stacked from one or more checkpoint tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from octavo.checkpoints.base import Source
from octavo.errors import ConfigError
from octavo.models.weights import Names, Weight
from octavo.quantization.base import WeightForm
from octavo.quantization.plain import PLAIN
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo.layers.linear import Linear
    from octavo.models.blocks.base import Parts


@dataclass(frozen=True)
class LinearSpec:
    """Specification of y = x W^T + b."""

    modules: tuple[tuple[str, int], ...]
    """Stacked modules of the checkpoint, with the number of outputs of each."""
    inputs: int
    bias: bool = False
    layout: Literal["rows", "conv1d", "by_group"] = "rows"
    """Layout of the weights in the checkpoint. rows: [outputs, inputs]. conv1d: [inputs, outputs]
    (GPT-2). by_group: rows are queries, keys and values of each group of heads in turn (BLOOM,
    Falcon)."""
    groups: int = 1
    """Number of groups, for by_group; see `Source`."""
    group_queries: int = 1
    """Number of query heads of a group, for by_group."""
    parts: tuple[tuple[int, int], ...] | None = None
    """Outputs (begin, end) that a rank computes; None: all."""
    columns: tuple[int, int] | None = None
    """Inputs (begin, end) that a rank uses, out of `whole_inputs`; None: all."""
    whole_inputs: int = 0
    summand: tuple[int, int] = (0, 1)
    """With `columns`: index of the rank, and number of the ranks; their results are summed."""
    form: WeightForm = PLAIN
    """Form of the weight in the checkpoint and in memory."""

    @property
    def outputs(self) -> int:
        """Number of outputs that are computed."""
        if self.parts is None:
            return self.whole_outputs
        return sum(end - begin for begin, end in self.parts)

    @property
    def whole_outputs(self) -> int:
        """Number of outputs of all modules."""
        return sum(rows for _, rows in self.modules)

    def split(self, *parts: tuple[int, int]) -> LinearSpec:
        """Return the product for a rank's outputs.

        Args:
            parts: the rank's outputs, as (begin, end).

        Raises:
            ConfigError: the part is empty.
        """
        if all(begin == end for begin, end in parts):
            raise ConfigError(
                f"tensor_parallel_size is too large for the {self.whole_outputs} outputs of "
                f"{self.modules[0][0]}: a process would have none; lower it."
            )
        return replace(self, parts=parts)

    def split_inputs(self, columns: tuple[int, int], rank: Rank) -> LinearSpec:
        """Return the product over a rank's inputs; the sum over all ranks is the whole result.

        Args:
            columns: the rank's inputs, as (begin, end).
            rank: the rank.

        Raises:
            ConfigError: the part is empty.
        """
        if columns[0] == columns[1]:
            raise ConfigError(
                f"tensor_parallel_size is too large for the {self.inputs} inputs of "
                f"{self.modules[0][0]}: a process would have none; lower it."
            )
        return replace(
            self,
            inputs=columns[1] - columns[0],
            columns=columns,
            whole_inputs=self.inputs,
            summand=(rank.index, rank.size),
        )

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weight, then the bias."""
        shape = (self.outputs, self.inputs)
        whole = None if self.parts is None else self.whole_outputs
        sources = self._sources(names, "weight")
        yield Weight(f"{names.own}weight", "linear", shape, sources, whole, self.form)
        if self.bias:
            sources = self._sources(names, "bias")
            yield Weight(f"{names.own}bias", "vector", shape[:1], sources, whole)

    def _sources(self, names: Names, kind: Literal["weight", "bias"]) -> tuple[Source, ...]:
        """Return the tensors of all modules, each with the part that the rank needs."""
        sources: list[Source] = []
        inputs = self.inputs if self.columns is None else self.whole_inputs
        begin = 0
        for module, rows in self.modules:
            name, parts = f"{names.checkpoint}{module}", self._parts_of(begin, rows)
            begin += rows
            if kind == "bias":
                stored: tuple[Source, ...] = (Source(f"{name}.bias", (rows,)),)
            else:
                stored = self.form.sources(name, rows, inputs)
                stored = tuple(replace(source, columns=self.columns) for source in stored)
            for source in stored:
                if self.layout == "by_group":
                    source = replace(
                        source,
                        transform="by_group",
                        groups=self.groups,
                        group_queries=self.group_queries,
                    )
                elif self.layout == "conv1d" and source.shape == (rows, inputs):
                    source = replace(source, shape=(inputs, rows), transform="transpose")
                sources.append(replace(source, parts=parts))
        return tuple(sources)

    def _parts_of(self, begin: int, rows: int) -> tuple[tuple[int, int], ...] | None:
        """Return the rows of one module that the rank needs, as (begin, end); None: all.

        Args:
            begin: index of the module's first output among the outputs of all modules.
            rows: number of the module's outputs.
        """
        if self.parts is None:
            return None
        cut = [(max(a - begin, 0), min(b - begin, rows)) for a, b in self.parts]
        return tuple((a, b) for a, b in cut if a < b)

    def build(self, parts: Parts, shared: str | None = None) -> Linear:
        """Return the live block.

        Args:
            parts: its weights.
            shared: name of the buffer in which ranks combine their parts of the result.
        """
        from octavo.kernels.base import PackedWeight, QuantizedWeight
        from octavo.layers.linear import Linear, SummedLinear

        weight = parts.any("weight")
        assert isinstance(weight, PackedWeight | QuantizedWeight)
        columns = None
        if shared is not None and self.parts is not None:
            (part,) = self.parts
            columns = parts.columns(shared, self.whole_outputs, part)
        bias = parts.tensor("bias") if self.bias else None
        if self.columns is None:
            return Linear(parts.ops, weight, bias, columns)
        assert shared is not None
        index, size = self.summand
        part = index * self.outputs, (index + 1) * self.outputs
        columns = parts.columns(shared, size * self.outputs, part, "float32")
        return SummedLinear(parts.ops, weight, bias, columns, size)
