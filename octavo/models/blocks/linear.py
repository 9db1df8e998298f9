"""Specification of a matrix product: one weight, stacked from one or more checkpoint tensors."""

from __future__ import annotations

import math
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
    layout: Literal["rows", "conv1d", "by_group", "by_shard", "halves", "taps"] = "rows"
    """Layout of the weights in the checkpoint. rows: [outputs, inputs]. conv1d: [inputs, outputs]
    (GPT-2). by_group: rows are queries, keys and values of each group of heads in turn (BLOOM,
    Falcon). by_shard: rows are queries, values and keys of each part of the heads (CodeGen).
    halves: rows are those of an MLP's projection up, then those of its gate (GTE). taps: [outputs,
    inputs of a tap, taps], of a convolution, or with the last two as one dimension, or the taps of
    a square as two; the inputs are those of each tap in turn."""
    bare: bool = False
    """True if the names of the modules are those of their weights, without .weight (Gemma 3)."""
    stored: tuple[int, ...] = ()
    """Dimensions of the inputs in the checkpoint, if there are several, as of a patch of a picture:
    channels, height and width. Empty: there is one."""
    groups: int = 1
    """Number of groups, for by_group, of parts, for by_shard, or of taps; see `Source`."""
    group_queries: int = 1
    """Number of query heads of a group, for by_group."""
    group_parts: tuple[int, ...] = ()
    """Sizes of a group's parts, for by_group; see `Source`."""
    expert: tuple[int, int] | None = None
    """Index of an expert, and number of experts, if each tensor of the checkpoint has the weights
    of all experts. `modules` then names these tensors. None: a tensor has one weight."""
    alternate: bool = False
    """True if the rows of the single module are gate and up in turn (gpt-oss)."""
    exact: bool = False
    """True for routers: --quantization does not quantize the weight, and some tools that quantize
    checkpoints leave it plain, too."""
    parts: tuple[tuple[int, int], ...] | None = None
    """Outputs (begin, end) that a rank computes; None: all."""
    columns: tuple[int, int] | None = None
    """Inputs (begin, end) that a rank uses, out of `whole_inputs`; None: all."""
    whole_inputs: int = 0
    summand: tuple[int, int] = (0, 1)
    """With `columns`: index of the rank, and number of the ranks; their results are summed."""
    biases: tuple[str, str] | None = None
    """Tensors with the biases of queries and of values, if keys have none (DeBERTa V1). None: each
    module has its own."""
    whole_bias: str | None = None
    """Tensor [1, outputs] with the bias, without a prefix; zeros if the checkpoint lacks it (BART).
    None: each module has its own."""
    unbiased: tuple[str, ...] = ()
    """With `bias`: modules that lack it in the checkpoint; theirs is 0 (Whisper's keys)."""
    forms: tuple[WeightForm, ...] = ()
    """Form of each module in the checkpoint and in memory; empty: all are plain. Successive modules
    of one form are one weight."""

    @property
    def weight_modules(self) -> tuple[str, ...]:
        """Modules of the checkpoint that have the weights."""
        return tuple(module for module, _ in self.modules)

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
        """Yield the weight of each run of modules with one form, then the bias of all modules."""
        is_part = self.parts is not None
        for name, (begin, end) in self._runs().items():
            sources = self._sources(names, "weight", begin, end)
            rows = sum(rows for _, rows in self.modules[begin:end])
            shape = self._outputs_of(begin, end), self.inputs
            whole = rows if is_part else None
            form = self.forms[begin] if self.forms else PLAIN
            yield Weight(f"{names.own}{name}", "linear", shape, sources, whole, form)
        if self.bias:
            sources = self._bias_sources(names)
            whole = self.whole_outputs if is_part else None
            yield Weight(f"{names.own}bias", "vector", (self.outputs,), sources, whole)

    def _runs(self) -> dict[str, tuple[int, int]]:
        """Return the name of each weight, and its modules as (begin, end).

        A weight of which the rank computes no output is left out.
        """
        forms = self.forms or (PLAIN,)
        starts = [i for i in range(len(forms)) if i == 0 or forms[i] != forms[i - 1]]
        if len(starts) == 1:
            return {"weight": (0, len(self.modules))}
        ends = [*starts[1:], len(self.modules)]
        runs = {f"weight.{i}": run for i, run in enumerate(zip(starts, ends, strict=True))}
        return {name: run for name, run in runs.items() if self._outputs_of(*run)}

    def _outputs_of(self, begin: int, end: int) -> int:
        """Return the number of outputs that the rank computes of the modules [begin, end)."""
        first = sum(rows for _, rows in self.modules[:begin])
        rows = sum(rows for _, rows in self.modules[begin:end])
        parts = self._parts_of(first, rows)
        return rows if parts is None else sum(b - a for a, b in parts)

    @property
    def each_outputs(self) -> list[int]:
        """Numbers of outputs of each module that the rank computes."""
        return [self._outputs_of(i, i + 1) for i in range(len(self.modules))]

    def _bias_sources(self, names: Names) -> tuple[Source, ...]:
        """Return the tensors of the bias."""
        if self.whole_bias is not None:
            shape, parts = (1, self.whole_outputs), self._parts_of(0, self.whole_outputs)
            name = self.whole_bias
            return (Source(name, shape, "flat_or_zeros", parts=parts, dummy=0.0, optional=True),)
        if self.biases is None:
            return self._sources(names, "bias", 0, len(self.modules))
        rows, (queries, values) = self.whole_outputs // 3, self.biases
        stored = (rows,)
        return (
            Source(
                f"{names.checkpoint}{queries}", stored, "padded", parts=self._parts_of(0, 2 * rows)
            ),
            Source(f"{names.checkpoint}{values}", stored, parts=self._parts_of(2 * rows, rows)),
        )

    def _sources(
        self, names: Names, kind: Literal["weight", "bias"], first: int, last: int
    ) -> tuple[Source, ...]:
        """Return the tensors of the modules [first, last), each with the part of the rank."""
        sources: list[Source] = []
        inputs = self.inputs if self.columns is None else self.whole_inputs
        begin = sum(rows for _, rows in self.modules[:first])
        for index, (module, rows) in enumerate(self.modules[first:last], first):
            name, parts = f"{names.checkpoint}{module}", self._parts_of(begin, rows)
            begin += rows
            if kind == "bias":
                stored: tuple[Source, ...] = (Source(f"{name}.bias", (rows,)),)
                if module in self.unbiased:
                    absent = replace(stored[0], transform="flat_or_zeros", optional=True)
                    stored = (replace(absent, dummy=0.0),)
            else:
                form = self.forms[index] if self.forms else PLAIN
                stored = form.sources(name, rows, inputs)
                if self.columns is not None:
                    stored = tuple(replace(source, columns=self.columns) for source in stored)
            for source in stored:
                if self.bare:
                    source = replace(source, name=source.name.removesuffix(".weight"))
                if self.alternate:
                    source = replace(source, alternate=True)
                if self.layout in ("by_group", "by_shard", "halves"):
                    source = replace(
                        source,
                        transform=self.layout,
                        groups=self.groups,
                        group_queries=self.group_queries,
                        group_parts=self.group_parts,
                    )
                elif self.stored and kind == "weight":
                    source = replace(source, shape=(rows, *self.stored), transform="flat_rows")
                elif self.layout == "taps":
                    if kind == "weight":
                        shape = (rows, inputs // self.groups, self.groups)
                        forms: tuple[tuple[int, ...], ...] = ((rows, inputs),)
                        if (side := math.isqrt(self.groups)) ** 2 == self.groups:
                            forms += ((*shape[:2], side, side),)
                        source = replace(source, shape=shape, other_shapes=forms, transform="taps")
                elif self.layout == "conv1d" and source.shape == (rows, inputs):
                    source = replace(source, shape=(inputs, rows), transform="transpose")
                if self.expert is not None:
                    index, count = self.expert
                    stacked = source.name.replace(".weight.weight", ".weight")
                    if stacked == source.name:
                        stacked = stacked.removesuffix(".weight").replace(".bias", "_bias")
                    first, *others = source.shape
                    shapes = tuple((count, *shape) for shape in source.other_shapes)
                    source = replace(
                        source,
                        name=stacked,
                        shape=(count, *source.shape),
                        other_shapes=(*shapes, (count * first, *others)),
                        index=index,
                    )
                sources.append(source if parts is None else replace(source, parts=parts))
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
        from octavo.layers.linear import Linear, StackedLinear, SummedLinear

        weights = tuple(parts.linear(name) for name in self._runs())
        columns = None
        if shared is not None and self.parts is not None:
            (part,) = self.parts
            columns = parts.columns(shared, self.whole_outputs, part)
        bias = parts.tensor("bias") if self.bias else None
        # A rank of several that divide the inputs adds the bias to the sum.
        own_bias = bias if self.columns is None else None
        adapted = parts.adapted(self.each_outputs, self.inputs, own_bias)
        if len(weights) > 1:
            assert self.columns is None, "the sum over ranks has one module"
            return StackedLinear(parts.ops, weights[0], bias, columns, adapted, weights)
        (weight,) = weights
        if self.columns is None:
            return Linear(parts.ops, weight, bias, columns, adapted)
        assert shared is not None
        index, size = self.summand
        part = index * self.outputs, (index + 1) * self.outputs
        columns = parts.columns(shared, size * self.outputs, part, "float32")
        return SummedLinear(parts.ops, weight, bias, columns, adapted, size)
