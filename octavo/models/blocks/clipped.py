"""Specification of matrix products whose inputs and results are clamped (Gemma 4's encoders)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.checkpoints.base import Source
from octavo.models.blocks.linear import LinearSpec
from octavo.models.weights import Names, Weight

if TYPE_CHECKING:
    from octavo.layers.linear import Linear
    from octavo.models.blocks.base import Parts

_BOUNDS = {
    "input_min": -math.inf,
    "input_max": math.inf,
    "output_min": -math.inf,
    "output_max": math.inf,
}


@dataclass(frozen=True)
class ClippedLinearSpec(LinearSpec):
    """Products of an input with stacked modules, each with bounds of its input and of its result.

    The weight of a module is that of its submodule `linear`, and the bounds are scalars of it.
    """

    @property
    def weight_modules(self) -> tuple[str, ...]:
        """Submodules with the weights."""
        return tuple(f"{module}.linear" for module, _ in self.modules)

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weight and the bounds of each module."""
        assert self.columns is None, "the bounds are those of a whole sum"
        begin = 0
        for i, (module, rows) in enumerate(self.modules):
            own = names.of(f"{i}")
            parts = self._parts_of(begin, rows)
            begin += rows
            form = self.forms[i : i + 1]
            one = LinearSpec(((f"{module}.linear", rows),), self.inputs, parts=parts, forms=form)
            yield from one.weights(own)
            sources = tuple(
                Source(f"{names.checkpoint}{module}.{name}", (), "flat", dummy=bound)
                for name, bound in _BOUNDS.items()
            )
            yield Weight(f"{own.own}bounds", "vector", (4,), sources, dtype="float32")

    def build(self, parts: Parts, shared: str | None = None) -> Linear:
        """Return the live block."""
        from octavo.layers.clipped import ClippedLinear

        modules = [parts.of(f"{i}") for i in range(len(self.modules))]
        weights = tuple(module.linear("weight") for module in modules)
        bounds = tuple(module.tensor("bounds") for module in modules)
        columns = None
        if shared is not None and self.parts is not None:
            (part,) = self.parts
            columns = parts.columns(shared, self.whole_outputs, part)
        return ClippedLinear(parts.ops, weights[0], columns=columns, weights=weights, bounds=bounds)
