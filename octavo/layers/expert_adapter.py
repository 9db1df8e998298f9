"""Mixtures of experts whose experts adapters change.

The rows of a mixture's products belong to pairs of a token and an expert. The change of a pair is
that of its token's adapter to its expert. It must come before the activation, so the two products
are two calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.base import StackedWeight
from octavo.kernels.lora import LoraTable
from octavo.kernels.routing import ExpertActivation
from octavo.layers.adapter import Adapters
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class AdaptedExperts:
    """Changes of adapters to the experts of a mixture."""

    adapters: Adapters
    up: LoraTable
    down: LoraTable

    @property
    def in_step(self) -> bool:
        """True if a token of the step has an adapter."""
        return self.adapters.slots is not None

    def multiply_up(
        self,
        x: Tensor,
        ids: Tensor,
        up: StackedWeight,
        activation: ExpertActivation,
        factors: Tensor | None,
        inner: Tensor | None,
        counts: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the first product and the activation; see `Ops.experts`.

        Returns:
            The inputs of the second product [T * K, I], and the row of each pair [T, K].
        """
        ops, slots = self.adapters.ops, self.adapters.slots
        assert slots is not None
        rows, places = ops.experts(x, ids, up, None, None, factors, counts=counts)
        inner = ops.add_expert_lora(
            rows, x, ids, places, slots, self.up, activation, factors, inner
        )
        return inner, places

    def multiply_down(
        self, inner: Tensor, ids: Tensor, down: StackedWeight, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute the second product of `inner` [T * K, I]; see `Ops.experts`.

        Returns:
            The results [T * K, N], and the row of each pair [T, K].
        """
        ops, slots = self.adapters.ops, self.adapters.slots
        assert slots is not None
        rows, places = ops.experts(inner, ids, None, down, None, inner=inner, out=out)
        return ops.add_expert_lora(rows, inner, ids, places, slots, self.down), places
