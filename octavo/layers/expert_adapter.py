"""Mixtures of experts whose experts adapters change.

The rows of a mixture's products belong to pairs of a token and an expert. The change of a pair is
that of its token's adapter to its expert. It must come before the activation, so the two products
are two calls.

A rank that computes an expert usually changes it, too. But experts may move between ranks, and
several engines, each with adapters of its own, may divide the experts. Then the products and the
changes are apart, and rows go between the ranks in shared memory:

1. Each rank computes the first product of its experts for all tokens.
2. Each engine changes the rows of its own tokens and applies the activation. Its ranks divide the
   experts among themselves for that, and this division never changes. So the factors of adapters
   stay where they were read.
3. Each rank computes the second product of its experts for all tokens.
4. Each engine changes the rows of its own tokens, and sums them.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.lora import LoraTable
from octavo.kernels.routing import ExpertActivation
from octavo.kernels.weights import StackedWeight
from octavo.layers.adapter import Adapters
from octavo.layers.shared import Columns
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class ApartRows:
    """Rows of pairs that are changed by another rank than the one that computes the products.

    The buffers have K * N columns for rows [T * K, N], where K is the number of a token's experts.
    """

    up: Columns
    """Results of the first product."""
    inner: Columns
    """Inputs of the second product."""


@dataclass(slots=True)
class AdaptedExperts:
    """Changes of adapters to the experts of a mixture."""

    adapters: Adapters
    up: LoraTable
    down: LoraTable
    share: Tensor | None = None
    """1 for each expert whose rows this rank changes, else 0: int32 [experts]; None: all are 1."""
    apart: ApartRows | None = None
    """Rows of ranks among which experts move; None: they do not, or several engines divide them."""

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

    def change_up(
        self,
        rows: Tensor,
        x: Tensor,
        ids: Tensor,
        places: Tensor,
        activation: ExpertActivation,
        factors: Tensor | None,
        inner: Tensor,
    ) -> Tensor:
        """Change results of the first product that other ranks have computed.

        Args:
            rows: results of the pairs of all ranks [M, N].
            x: inputs of this engine's tokens [T, H].
            ids: their experts, int32 [T, K].
            places: rows of their pairs, int32 [T, K].
            activation: activation after the product.
            factors: factors of x, float32 [T, K]; None: 1.
            inner: receives the inputs of the second product of this rank's share [M, I].

        Returns:
            The same inputs of this engine's pairs [T * K, I], by expert and then by token.
        """
        ops, slots, table = self.adapters.ops, self.adapters.slots, self.up
        assert slots is not None
        own, order = ops.take_expert_rows(rows, ids, places, table.experts, self.share)
        own = ops.add_expert_lora(own, x, ids, order, slots, table, activation, factors)
        ops.put_expert_rows(inner, own, ids, places, order, self.share)
        return own

    def change_down(
        self, rows: Tensor, inner: Tensor, ids: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Change results of the second product that other ranks have computed.

        Args:
            rows: results of the pairs of all ranks [M, N]; with a `share`, receives the changed
                ones of this rank.
            inner: the inputs that `change_up` has returned.
            ids: experts of this engine's tokens, int32 [T, K].
            places: rows of their pairs, int32 [T, K].

        Returns:
            The changed results of this engine's pairs, and the row of each pair, int32 [T, K]. With
            a `share`: `rows` and `places`, once all ranks have come here.
        """
        ops, slots, table = self.adapters.ops, self.adapters.slots, self.down
        assert slots is not None
        own, order = ops.take_expert_rows(rows, ids, places, table.experts, self.share)
        ops.add_expert_lora(own, inner, ids, order, slots, table)
        if self.share is None:
            return own, order
        ops.put_expert_rows(rows, own, ids, places, order, self.share)
        return rows, places
