"""Mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.kernels.base import Ops
from octavo.kernels.ops_experts import PlacedExperts, TokenSlots
from octavo.kernels.routing import ExpertActivation, Routing
from octavo.kernels.weights import StackedWeight
from octavo.layers.expert_adapter import AdaptedExperts
from octavo.layers.expert_exchange import ExpertExchange
from octavo.layers.linear import Linear
from octavo.layers.mlp import MLP
from octavo.layers.norm import Norm
from octavo.layers.shared import Columns
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class Router:
    """Choice of a token's experts."""

    proj: Linear
    routing: Routing
    choice_bias: Tensor | None = None
    """Numbers that are added to the scores for the choice: float32 [experts]."""
    factors: Tensor | None = None
    """Factors of the experts' weights: float32 [experts]."""
    norm: Norm | None = None
    on_input: bool = False
    """True if weights are factors of the experts' inputs."""
    scale: float = 1.0
    """Factor of the logits."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map [T, hidden_size] to experts, int32 [T, K], and their weights, float32 [T, K]."""
        logits = self.proj(x if self.norm is None else self.norm(x), "float32")
        if self.scale != 1.0:
            self.proj.ops.scale_(logits, self.scale)
        return self.proj.ops.route(logits, self.routing, self.choice_bias, self.factors)


@dataclass(slots=True)
class Divided:
    """Buffers of the ranks that compute a mixture together.

    K is the number of a token's experts. A buffer with K * N columns holds rows [T * K, N], of
    which each rank fills a part.
    """

    inner: tuple[Columns, tuple[int, int]] | None = None
    """Results of the first product, and this rank's columns of them; None: ranks divide experts."""
    result: Columns | None = None
    """This rank's columns of the block's result; None: ranks divide experts."""
    rows: Columns | None = None
    """Results of the second product; None: ranks divide columns."""


@dataclass(slots=True)
class Experts:
    """Sum of the chosen experts' results, times their weights."""

    ops: Ops
    router: Router
    up: StackedWeight
    down: StackedWeight
    activation: ExpertActivation
    shared: MLP | None = None
    """Block that all tokens use in addition."""
    shared_gate: Linear | None = None
    """Projection to one number, whose sigmoid is a factor of the shared block's result."""
    divided: Divided | None = None
    """Buffers of several ranks; None: this one computes the whole block."""
    norm: Norm | None = None
    """Norm of the experts' input; the router reads the input before this norm."""
    latent: tuple[Linear, Linear] | None = None
    """Projections to the experts' input, and from the sum of their results."""
    exchange: ExpertExchange | None = None
    """Exchange with the engines that compute the other experts; None: there are no others."""
    counts: Tensor | None = None
    """Sums over all steps of the tokens that chose each expert: int64 [experts]; None: unknown."""
    placed: PlacedExperts | None = None
    """Processes that have each expert, if experts move; None: they stay where they are."""
    bias: Tensor | None = None
    """Numbers that are added to the sum of the experts' results: [hidden_size]."""
    adapted: AdaptedExperts | None = None
    """Changes of adapters to the experts; None: adapters are off, or cannot change them."""
    following: Experts | None = None
    """The model's next mixture, if an expert cache fetches its experts ahead; None: it does not."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size]."""
        ids, weights = self.router(x)
        if self.following is not None:
            self.following.expect(x)
        if self.norm is not None:
            x = self.norm(x)
        if self.latent is None:
            result = self._mix(x, ids, weights)
        else:
            to_latent, from_latent = self.latent
            result = from_latent(self._mix(to_latent(x), ids, weights))
        if self.bias is not None:
            result = self.ops.add(result, self.bias)
        if self.shared is None:
            return result
        shared = self.shared(x, step)
        if self.shared_gate is not None:
            shared = self.ops.multiply(shared, self.shared_gate(x), "sigmoid")
        return self.ops.add(result, shared)

    def expect(self, x: Tensor) -> None:
        """Guess the experts of tokens, for the expert cache to fetch them ahead.

        The residual stream changes little from layer to layer. So the router's choice for the input
        of an earlier mixture is a guess (Eliseev and Mazur, arXiv 2312.17238).

        Args:
            x: [T, hidden_size]: the input of the mixture before this one.
        """
        ids, _ = self.router(x)
        tokens, top_k = ids.shape
        if self.up.cached is not None:  # else a recording that only measures memory
            self.up.cached.expect(ids=ids.data_ptr(), tokens=tokens, top_k=top_k)

    def _mix(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts' results; it has the shape of x."""
        ops, divided = self.ops, self.divided
        factors = weights if self.router.on_input else None
        after = None if self.router.on_input else weights
        tokens, top_k = ids.shape
        adapted = None if self.adapted is None or not self.adapted.in_step else self.adapted
        if adapted is not None and (self.exchange is not None or adapted.apart is not None):
            return self._mix_apart(adapted, x, ids, factors, after)
        if self.exchange is not None:
            self.exchange.send(x, ids, factors)
            rows, places = self.serve()
            begin = self.exchange.slots.own * self.exchange.slots.size
            return ops.sum_experts(rows, places[begin : begin + tokens], after)
        if divided is None:
            rows, places = self._multiply(x, ids, factors)
            return ops.sum_experts(rows, places, after)
        if divided.rows is not None:
            whole, _ = divided.rows.empty(tokens, x.dtype)
            rows = whole.view((tokens * top_k, -1))
            _, places = self._multiply(x, ids, factors, rows)
            divided.rows.join()
            return ops.sum_experts(rows, places, after)
        assert divided.inner is not None
        assert divided.result is not None
        columns, (begin, end) = divided.inner
        whole, _ = columns.empty(tokens, x.dtype)
        inner = whole.view((tokens * top_k, -1))
        self._multiply_up(x, ids, factors, inner[:, begin:end])
        columns.join()
        rows, places = self._multiply_down(inner, ids)
        whole, own = divided.result.empty(tokens, x.dtype)
        ops.sum_experts(rows, places, after, own)
        divided.result.join()
        return whole

    def _mix_apart(
        self,
        adapted: AdaptedExperts,
        x: Tensor,
        ids: Tensor,
        factors: Tensor | None,
        after: Tensor | None,
    ) -> Tensor:
        """Mix with changed rows of the experts that other ranks compute; see `AdaptedExperts`."""
        begin, tokens = 0, len(ids)
        if self.exchange is not None:
            self.exchange.send(x, ids, factors)
            begin = self.exchange.slots.own * self.exchange.slots.size
        all_rows = self._all_rows(x, ids, factors)
        places = self._multiply_all_up(all_rows)[begin : begin + tokens]
        inner = adapted.change_up(
            all_rows.up, x, ids, places, self.activation, factors, all_rows.inner
        )
        self._multiply_all_down(all_rows)
        rows, places = adapted.change_down(all_rows.results, inner, ids, places)
        if adapted.share is not None:
            self._join()
        return self.ops.sum_experts(rows, places, after)

    def _all_rows(self, x: Tensor, ids: Tensor, factors: Tensor | None) -> _AllRows:
        """Return the rows of all ranks in a step with adapters.

        Args:
            x: inputs of this engine's tokens [T, H].
            ids: their experts [T, K].
            factors: factors of x [T, K]; None: 1.
        """
        (tokens, top_k), exchange = ids.shape, self.exchange
        if exchange is not None:
            return self._exchanged_rows()
        assert self.divided is not None
        assert self.divided.rows is not None
        assert self.adapted is not None
        assert self.adapted.apart is not None
        apart = self.adapted.apart
        columns = apart.up, apart.inner, self.divided.rows
        rows = (it.empty(tokens, x.dtype)[0].view((tokens * top_k, -1)) for it in columns)
        return _AllRows(x, ids, factors, None, *rows)

    def _exchanged_rows(self) -> _AllRows:
        exchange, top_k = self.exchange, self.router.routing.top_k
        assert exchange is not None
        x, ids, factors = exchange.inputs(self.down.first.n, top_k)
        return _AllRows(
            x,
            ids,
            factors if self.router.on_input else None,
            exchange.slots,
            exchange.results(self.up.first.n, top_k),
            exchange.inner(self.down.first.k, top_k),
            exchange.results(self.down.first.n, top_k),
        )

    def _multiply_all_up(self, rows: _AllRows) -> Tensor:
        """Compute the first product of this rank's experts; return the row of each pair.

        All ranks have computed theirs afterwards.
        """
        if self.exchange is not None:
            self._join()  # all tokens have been sent
        _, places = self.ops.experts(
            rows.x,
            rows.ids,
            self.up,
            None,
            None,
            rows.factors,
            rows.up,
            counts=self.counts,
            slots=rows.slots,
            placed=self.placed,
        )
        self._join()
        return places

    def _multiply_all_down(self, rows: _AllRows) -> None:
        """Compute the second product of this rank's experts, once all inputs are there.

        All ranks have computed theirs afterwards.
        """
        self._join()
        placed = None if self.placed is None else replace(self.placed, loads=None)
        self.ops.experts(
            rows.inner,
            rows.ids,
            None,
            self.down,
            None,
            inner=rows.inner,
            out=rows.results,
            slots=rows.slots,
            placed=placed,
        )
        self._join()

    def _join(self) -> None:
        """Wait until all ranks have come here."""
        if self.exchange is not None:
            self.exchange.join()
        else:
            assert self.divided is not None
            assert self.divided.rows is not None
            self.divided.rows.join()

    def _multiply(
        self, x: Tensor, ids: Tensor, factors: Tensor | None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the results of the rank's experts, and the row of each pair."""
        if self.adapted is not None and self.adapted.in_step:
            inner, _ = self._multiply_up(x, ids, factors)
            return self._multiply_down(inner, ids, out)
        return self.ops.experts(
            x,
            ids,
            self.up,
            self.down,
            self.activation,
            factors,
            out=out,
            counts=self.counts,
            placed=self.placed,
        )

    def _multiply_up(
        self, x: Tensor, ids: Tensor, factors: Tensor | None, inner: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the inputs of the second product, and the row of each pair."""
        up, act, counts = self.up, self.activation, self.counts
        if self.adapted is not None and self.adapted.in_step:
            return self.adapted.multiply_up(x, ids, up, act, factors, inner, counts)
        return self.ops.experts(x, ids, up, None, act, factors, inner, counts=counts)

    def _multiply_down(
        self, inner: Tensor, ids: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the results of the second product, and the row of each pair."""
        if self.adapted is not None and self.adapted.in_step:
            return self.adapted.multiply_down(inner, ids, self.down, out)
        return self.ops.experts(inner, ids, None, self.down, self.activation, inner=inner, out=out)

    def serve(self) -> tuple[Tensor, Tensor]:
        """Compute this rank's experts for the tokens of all engines.

        Returns:
            The rows of all pairs, and the row of each pair, int32 [tokens of all slots, K].
        """
        exchange = self.exchange
        assert exchange is not None
        hidden, top_k = self.down.first.n, self.router.routing.top_k
        x, ids, factors = exchange.inputs(hidden, top_k)
        rows = exchange.results(hidden, top_k)
        exchange.join()
        _, places = self.ops.experts(
            x,
            ids,
            self.up,
            self.down,
            self.activation,
            factors if self.router.on_input else None,
            out=rows,
            counts=self.counts,
            slots=exchange.slots,
            placed=self.placed,
        )
        exchange.join()
        return rows, places

    def serve_apart(self) -> None:
        """Compute this rank's experts in a step with adapters, without tokens of its own."""
        assert self.adapted is not None
        rows = self._exchanged_rows()
        self._multiply_all_up(rows)
        self._multiply_all_down(rows)
        if self.adapted.share is not None:
            self._join()


@dataclass(slots=True)
class _AllRows:
    """Rows of the tokens of all ranks, in a step with adapters."""

    x: Tensor
    """Inputs [T, H]."""
    ids: Tensor
    """Experts, int32 [T, K]."""
    factors: Tensor | None
    """Factors of the inputs, float32 [T, K]; None: 1."""
    slots: TokenSlots | None
    """Tokens of each engine; None: there is one engine."""
    up: Tensor
    """Results of the first product [T * K, N]."""
    inner: Tensor
    """Inputs of the second product [T * K, I]."""
    results: Tensor
    """Results of the second product [T * K, H]; they may have the memory of `up`."""
