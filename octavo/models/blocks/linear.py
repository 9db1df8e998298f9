"""A matrix product: one weight, stacked of one or several tensors of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from octavo.models.weights import Names, Source, Weight

if TYPE_CHECKING:
    from octavo.layers.linear import Linear
    from octavo.models.blocks.base import Parts


@dataclass(frozen=True)
class LinearSpec:
    """y = x W^T + b."""

    modules: tuple[tuple[str, int], ...]
    """Modules of the checkpoint and the outputs of each, to be stacked."""
    inputs: int
    bias: bool = False
    layout: Literal["rows", "conv1d", "by_group"] = "rows"
    """Weights are [outputs, inputs]; or, as GPT-2's Conv1D, [inputs, outputs]; or rows are queries,
    keys and values of each group of heads in turn (BLOOM, Falcon)."""
    groups: int = 1
    group_queries: int = 1
    """by_group: see `Source`."""

    @property
    def outputs(self) -> int:
        """Of all modules."""
        return sum(rows for _, rows in self.modules)

    def weights(self, names: Names) -> Iterator[Weight]:
        """The weight, then the bias."""
        shape = (self.outputs, self.inputs)
        yield Weight(f"{names.own}weight", "linear", shape, self._sources(names, "weight"))
        if self.bias:
            yield Weight(f"{names.own}bias", "vector", shape[:1], self._sources(names, "bias"))

    def _sources(self, names: Names, kind: Literal["weight", "bias"]) -> tuple[Source, ...]:
        sources = []
        for module, rows in self.modules:
            name = f"{names.checkpoint}{module}.{kind}"
            shape = (rows, self.inputs) if kind == "weight" else (rows,)
            if self.layout == "by_group":
                sources.append(Source(name, shape, "by_group", self.groups, self.group_queries))
            elif self.layout == "conv1d" and kind == "weight":
                sources.append(Source(name, shape[::-1], "transpose"))
            else:
                sources.append(Source(name, shape))
        return tuple(sources)

    def build(self, parts: Parts) -> Linear:
        """The live block."""
        from torch import Tensor

        from octavo.layers.linear import Linear

        weight = parts.any("weight")
        assert not isinstance(weight, Tensor)
        return Linear(parts.ops, weight, parts.tensor("bias") if self.bias else None)
