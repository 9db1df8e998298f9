"""Interface of the operations on recurrent states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from octavo.system.tensor import Tensor

ConvActivation = Literal["none", "silu"]
"""Activation of a convolution."""


class StateSlots(Protocol):
    """Slots of the recurrent states that a step reads and writes.

    The state of a request's first token may be read from a slot that the request also writes.
    """

    @property
    def query_start_loc(self) -> Tensor:
        """First token of each request, and the end of the last one: int32 [R + 1]."""
        ...

    @property
    def sources(self) -> Tensor:
        """Slot with the state before each request's first token: int32 [R]; -1: zeros."""
        ...

    @property
    def slots(self) -> Tensor:
        """Slot that receives the state after each token: int32 [T]; -1: none."""
        ...

    @property
    def snapshots(self) -> Tensor:
        """Second slot that receives the state after each token: int32 [T]; -1: none."""
        ...


@dataclass(frozen=True, slots=True)
class StateRates:
    """Parameters of `Ops.ssd`, float32 [H] each, or of `Ops.selective_scan`.

    Attributes:
        a_log: logarithm of the decay's rate.
        dt_bias: term of the step sizes.
        skip: factor of x in the result.
        dt_min: least step size.
        dt_max: largest step size; may be infinite.
    """

    a_log: Tensor
    dt_bias: Tensor
    skip: Tensor
    dt_min: float = 0.0
    dt_max: float = float("inf")


@dataclass(frozen=True, slots=True)
class Wkv7Inputs:
    """Inputs of `Ops.wkv7`: [T, H, N] each, heads dense, any stride of tokens.

    Attributes:
        receptance: r, which reads the state.
        decay: logits of the decay.
        key: k.
        value: v.
        rate: logits of the in-context learning rate.
        gate: factor of the result.
        first: the value of the model's first layer, and logits of its share of the value; None: the
            value is used alone.
    """

    receptance: Tensor
    decay: Tensor
    key: Tensor
    value: Tensor
    rate: Tensor
    gate: Tensor
    first: tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True)
class Wkv7Parameters:
    """Parameters of `Ops.wkv7`, float32 [H * N] each.

    Attributes:
        removal: factor of the key that removes from the state.
        key_rate: share of the learning rate in the key that adds to it.
        bonus: factor of the token's own key in the result.
        weight: weight of the norm of each head.
        bias: bias of this norm.
        eps: term of the variance.
    """

    removal: Tensor
    key_rate: Tensor
    bonus: Tensor
    weight: Tensor
    bias: Tensor
    eps: float


class StateOps(Protocol):
    """Operations on recurrent states; see `Ops`."""

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        slots: StateSlots,
        activation: ConvActivation,
        out: Tensor | None = None,
    ) -> Tensor:
        """Convolve each channel of x [T, C] with its own weights over its request's last inputs.

        Output t of a channel is act(bias + the sum of weight[k] * x[t - W + 1 + k] over k). Sums
        run in float32 from the oldest input on, and are rounded once, after the activation.

        Args:
            x: [T, C].
            weight: [C, W], dense, with 2 <= W <= `kernels.sizes.MAX_TAPS`.
            bias: [C] or None.
            state: float32 [slots, (W - 1) * C], the last W - 1 inputs of each request, oldest
                first; rows may have any stride.
            slots: the requests of the step, and their slots in `state`.
            activation: the function of the sum.
            out: as in `linear`; may be x itself.
        """
        ...

    def gated_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        slots: StateSlots,
        beta_scale: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute a linear attention whose state is a matrix S [DK, DV] of each head: [T, H, DV].

        Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464). For each token, in
        float32 and in order: S = g S; u = b (value - key S); S = S + key (x) u; result = query S.
        Keys and queries are divided by sqrt(sum of squares + 1e-6), queries also by sqrt(DK).
        g = exp(-exp(a_log) softplus(decay + dt_bias)) and b = beta_scale * sigmoid(beta).

        With a decay for each row of S it is Kimi Delta Attention (arXiv 2510.26692).

        Args:
            query: [T, KH, DK], heads dense; head h of the result uses head h * KH // H.
            key: as query.
            value: [T, H, DV], heads dense.
            decay: [T, H], or [T, H * DK] with a decay for each row of S.
            beta: [T, H].
            a_log: float32 [H].
            dt_bias: float32 [H], or [H * DK] with a decay for each row.
            state: float32 [slots, H * DK * DV]; rows may have any stride.
            slots: the requests of the step, and their slots in `state`.
            beta_scale: factor of beta.
            out: memory for the result: [T, H, DV] with dense heads.
        """
        ...

    def ssd(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        rates: StateRates,
        state: Tensor,
        slots: StateSlots,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute the recurrence of Mamba-2 (Dao and Gu, arXiv 2405.21060), token by token.

        The state of a head is a matrix [N, P]: S = exp(-exp(a_log) dt) S + b (dt x)^T with
        dt = softplus(dt + dt_bias), clamped. The result is S^T c + skip x in float32, rounded.

        Args:
            x: [T, H, P], dense heads, any stride of tokens.
            dt: [T, H], any stride of tokens.
            b: [T, G, N], dense groups, any stride of tokens; H / G heads share a group.
            c: as b.
            rates: parameters of the heads.
            state: float32 [slots, H * N * P]; rows may have any stride.
            slots: the requests of the step, and their slots in `state`.
            out: the result, of the shape of x, with dense heads; not x itself.
        """
        ...

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        gate: Tensor,
        rates: StateRates,
        state: Tensor,
        slots: StateSlots,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute the recurrence of Mamba-1 (Gu and Dao, arXiv 2312.00752), token by token: [T, C].

        The state of a channel has N numbers: s = exp(-exp(a_log) dt) s + b dt x with
        dt = softplus(dt + dt_bias), not clamped. The result is (c s + skip x) silu(gate) in
        float32, rounded.

        Args:
            x: [T, C].
            dt: [T, C].
            b: [T, N], of all channels.
            c: as b.
            gate: [T, C].
            rates: parameters of the channels; a_log is float32 [N, C], the others [C].
            state: float32 [slots, N * C]; rows may have any stride.
            slots: the requests of the step, and their slots in `state`.
            out: as in `linear`.
        """
        ...

    def token_shift(self, x: Tensor, mix: Tensor, state: Tensor, slots: StateSlots) -> Tensor:
        """Mix each token with the one before it in its request, in M ways: [T, M, C].

        Result m of a token is x + (before - x) * mix[m], in float32, rounded once.

        Args:
            x: [T, C].
            mix: float32 [M, C].
            state: float32 [slots, C], the last token of each request; rows may have any stride.
            slots: the requests of the step, and their slots in `state`.
        """
        ...

    def wkv7(
        self,
        inputs: Wkv7Inputs,
        parameters: Wkv7Parameters,
        state: Tensor,
        slots: StateSlots,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute the recurrence of RWKV 7 (Peng et al., arXiv 2503.14456), token by token.

        The state of a head is a matrix S [N, N] with a row for each key channel. In float32 and in
        order, with w = exp(-exp(-1/2) sigmoid(decay)), a = sigmoid(rate), and kappa = key * removal
        divided by its norm (at least 1e-12), and k = key * (1 + (a - 1) * key_rate):
        S = w S - (kappa * a) (x) (kappa S) + k (x) v. The result is
        gate * (norm(r S) * weight + bias + (r (bonus * k)) v), rounded once.

        Args:
            inputs: the vectors of the tokens. With `first`, v is the value plus
                sigmoid(logits) * (first value - value).
            parameters: parameters of the heads.
            state: float32 [slots, H * N * N]; rows may have any stride.
            slots: the requests of the step, and their slots in `state`.
            out: memory for the result: [T, H, N] with dense heads; none of the inputs.
        """
        ...
