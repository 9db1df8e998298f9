"""Interface of the operations on mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo._native import ExpertLayer
from octavo.kernels.lora import LoraTable
from octavo.kernels.routing import ExpertActivation, Routing
from octavo.kernels.weights import (
    PackedWeight,
    QuantizedWeight,
    StackedWeight,
)
from octavo.system.tensor import Tensor


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """Tokens of several processes, each with a slot of the same size in one tensor.

    Attributes:
        counts: int32 [slots]: the tokens in each slot, at its beginning.
        size: tokens that fit in a slot.
        own: slot of this process.
    """

    counts: Tensor
    size: int
    own: int


@dataclass(frozen=True, slots=True)
class PlacedExperts:
    """Place of a layer's experts, which may change between steps, and their loads.

    Attributes:
        loads: int64 [E]: the number of each expert's pairs in all processes is added; None: they
            have been added.
        shares: int32 [E, 2]: if several processes have an expert, the part of its rows that this
            one computes, and the number of parts.
    """

    loads: Tensor | None
    shares: Tensor


class ExpertOps(Protocol):
    """Operations on mixtures of experts; see `Ops`."""

    def stack(
        self,
        weights: Sequence[PackedWeight | QuantizedWeight | None],
        bias: Tensor | None = None,
        cached: ExpertLayer | None = None,
    ) -> StackedWeight:
        """Return the weights of all experts for `experts`; nothing is copied.

        With `cached`, the layer of an expert cache, the weights only tell shape and form.
        """
        ...

    def route(
        self,
        logits: Tensor,
        routing: Routing,
        bias: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose experts for each token by logits [T, E], float32.

        A token's experts have the largest scores plus bias; of equal ones the first is chosen. NaN
        is chosen last.

        Args:
            logits: the router's results.
            routing: the rules.
            bias: float32 [E]: added to scores for the choice, and not for the weights.
            factors: float32 [E]: factors of the experts' weights.

        Returns:
            Experts, int32 [T, K], the largest score first; and their weights, float32 [T, K].
        """
        ...

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        up: StackedWeight | None,
        down: StackedWeight | None,
        activation: ExpertActivation | None,
        factors: Tensor | None = None,
        inner: Tensor | None = None,
        out: Tensor | None = None,
        counts: Tensor | None = None,
        slots: TokenSlots | None = None,
        placed: PlacedExperts | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the feed-forward blocks of the chosen experts, down(act(up(x))).

        Rows of the results belong to pairs of a token and an expert. The weights of a form other
        than plain are multiplied as by `linear`. Experts without a weight have no rows.

        Args:
            x: [T, H]; not read without `up`.
            ids: int32 [T, K]: experts of each token, each in [0, E).
            up: weights [I, H], gated: [2 * I, H], gate and up. None: `inner` is given.
            down: weights [N, I]. None: only `inner` is computed.
            activation: the activation; None: `inner` has the results of the first product as they
                are: [T * K, 2 * I] if gated. On a CPU only.
            factors: float32 [T, K]: factors of x; None: 1.
            inner: memory for the results of the first product: [T * K, I], of any row stride.
            out: memory for those of the second product: [T * K, N].
            counts: int64 [E]: the pairs of each expert are added; on a CPU only.
            slots: the tokens of several processes, which T covers whole; `counts` is of those of
                this process. On a CPU only.
            placed: the place of the experts, if it may change; None: each is in one process. On a
                CPU only.

        Returns:
            The results of the last product; and the row of each pair in them, int32 [T, K].
        """
        ...

    def add_expert_lora(
        self,
        out: Tensor,
        x: Tensor,
        ids: Tensor,
        places: Tensor,
        slots: Tensor,
        table: LoraTable,
        activation: ExpertActivation | None = None,
        factors: Tensor | None = None,
        inner: Tensor | None = None,
    ) -> Tensor:
        """Add the changes of each token's adapter to the results of one product of `experts`.

        The change of a row is that of `add_lora` with the pair (slot of the token, expert).

        Args:
            out: results [T * K, N], dense; changed in place.
            x: inputs of the first product: [T, H], or with `activation=None` those of the second
                one: [T * K, I].
            ids: int32 [T, K]: experts of each token.
            places: int32 [T, K]: rows of `out`.
            slots: int32 [T], the slot of each token's adapter; -1: none.
            table: row `slot * E + expert` has an adapter's change of an expert.
            activation: activation after the first product; None: `out` are results of the second
                one.
            factors: float32 [T, K]: factors of x [T, H]; None: 1.
            inner: memory for activated rows: [T * K, I], of any row stride.

        Returns:
            The activated rows, or else `out`.
        """
        ...

    def take_expert_rows(
        self,
        rows: Tensor,
        ids: Tensor,
        places: Tensor,
        experts: int,
        share: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Copy the rows of this process's pairs from those of several processes.

        On a CPU only.

        Args:
            rows: rows of all pairs, of any row stride: [M, N].
            ids: int32 [T, K]: experts of each token of this process.
            places: int32 [T, K]: rows of `rows`.
            experts: number of experts.
            share: int32 [experts]: 0 for experts whose rows are left out; None: for none.

        Returns:
            The rows [T * K, N], by expert and then by token; those left out have any numbers. And
            the row of each pair, int32 [T, K].
        """
        ...

    def put_expert_rows(
        self,
        rows: Tensor,
        own: Tensor,
        ids: Tensor,
        places: Tensor,
        own_places: Tensor,
        share: Tensor | None = None,
    ) -> None:
        """Copy rows back to those of several processes; see `take_expert_rows`.

        Args:
            rows: receives the rows.
            own: rows of this process's pairs: [T * K, N].
            ids: experts of each token.
            places: rows of `rows`.
            own_places: rows of `own`.
            share: as in `take_expert_rows`.
        """
        ...

    def sum_experts(
        self, x: Tensor, places: Tensor, weights: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """Sum rows of x [M, N] for each token, times weights, from first to last: [T, N].

        Args:
            x: rows, such as the results of `experts`.
            places: int32 [T, K]: rows of x.
            weights: float32 [T, K]; None: 1.
            out: memory for the result.
        """
        ...
