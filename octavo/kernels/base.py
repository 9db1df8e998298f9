"""Interface of the table of operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.ops_experts import ExpertOps
from octavo.kernels.ops_logits import LogitOps, LongArray
from octavo.kernels.ops_lora import LoraOps
from octavo.kernels.ops_states import StateOps
from octavo.kernels.routing import Gate
from octavo.kernels.weights import (
    Codes,
    OnlineFormat,
    PackedWeight,
    QuantFormat,
    QuantizedWeight,
)
from octavo.system.tensor import HostTensor, Tensor

Gelu = Literal["none", "tanh"]
"""Method of computing GELU: exactly, with erf, or by its tanh approximation."""
Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
"""Activation of the result of a linear layer."""


class HostCopy(Protocol):
    """Numbers on their way from a device to the host."""

    def ready(self) -> bool:
        """Return True if `numpy` does not wait."""
        ...

    def numpy(self) -> NDArray[Any]:
        """Return the numbers; wait for them."""
        ...


@dataclass(frozen=True, slots=True)
class Arrived:
    """`HostCopy` of numbers that the host has."""

    array: NDArray[Any]

    def ready(self) -> bool:
        """Return True."""
        return True

    def numpy(self) -> NDArray[Any]:
        """Return the numbers."""
        return self.array


class Ops(StateOps, ExpertOps, LoraOps, LogitOps, Protocol):
    """Operations on tensors of one device.

    T is the number of tokens, which may be 0. By default, tensors are float32,
    bfloat16 or float16, and all tensors of a call have the same dtype. Sums run in float32. Inputs
    may be views with any row stride if the last dimension is dense; results are new, dense tensors.
    Shapes and dtypes are asserted, not validated: only the engine's layers call these methods.
    """

    name: str
    packs_weights: bool
    """True if packed weights have a special layout: they need separate memory and a cache."""

    def to_device(self, x: HostTensor | NDArray[Any]) -> Tensor:
        """Return numbers of the host as a tensor of the device, without waiting for the device.

        On a CPU the result shares the memory.
        """
        ...

    def to_host(self, x: Tensor) -> NDArray[Any]:
        """Return the numbers of a tensor; wait for them. On a CPU the result shares the memory."""
        ...

    def copy_to_host(self, x: Tensor) -> HostCopy:
        """Start a copy to the host; on a CPU nothing is copied."""
        ...

    def copy_(self, out: Tensor, x: Tensor) -> None:
        """Write x to `out`, of the same shape, in the type of `out`; both may have any strides."""
        ...

    def copy_blocks(
        self, caches: Sequence[Tensor], src_dst_pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Copy rows within each of the caches, uint8; read all sources before the first write."""
        ...

    def pack_weight(
        self,
        weight: HostTensor | Sequence[HostTensor],
        dtype: str | None = None,
        out: Tensor | None = None,
    ) -> PackedWeight:
        """Pack a weight [N, K], or several [N_i, K] stacked along N (fused projections).

        The result is a copy; the sources are no longer needed.

        Args:
            weight: the weight or its parts.
            dtype: dtype of the result; default: the weight's.
            out: memory for the result: uint8 [`kernels.sizes.packed_nbytes`].
        """
        ...

    def linear(
        self,
        x: Tensor,
        weight: PackedWeight | QuantizedWeight,
        bias: Tensor | None = None,
        out_dtype: str | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Multiply x [T, K] by the transposed weight and add bias [N], rounding once: [T, N].

        `out` receives the result; its rows may have any stride.

        With a quantized weight other than fp8, x is quantized too: each row, or with groups each
        group of a row, to -127 ... 127 times a scale that makes its largest number 127 (Dettmers
        et al., "LLM.int8()", section 2.1, the row-wise half). On a GPU x is quantized with int8
        only.
        """
        ...

    def head_linear(
        self, x: Tensor, weight: PackedWeight, num_heads: int, out: Tensor | None = None
    ) -> Tensor:
        """Multiply each head of x [T, H, K] by its own transposed weight [N, K]: [T, H, N].

        Args:
            x: any strides of tokens and heads.
            weight: plain weight [H * N, K]: the rows of each head in turn.
            num_heads: H.
            out: memory for the result, with any strides of tokens and heads; not x itself.
        """
        ...

    def quantize_weight(
        self,
        weight: Sequence[HostTensor],
        format: OnlineFormat,
        group_size: int,
        out: Tensor | None = None,
    ) -> QuantizedWeight:
        """Quantize and pack a weight: parts [N_i, K] of any type, stacked along N.

        int8: the largest magnitude of a row becomes 127. fp8: it becomes 448. int4_levels: each
        group uses the scale with the smallest squared error among several. The sources are no
        longer needed. `out` is memory for the result: uint8 [`kernels.sizes.quantized_nbytes`].
        """
        ...

    def pack_quantized(
        self,
        n: int,
        k: int,
        format: QuantFormat,
        group_size: int,
        parts: Iterable[Codes],
        out: Tensor | None = None,
        order: NDArray[np.int32] | None = None,
    ) -> QuantizedWeight:
        """Pack the codes of a weight [N, K] that arrive in parts of rows, from first to last.

        `out` is memory for the result: uint8 [`kernels.sizes.quantized_nbytes`]. `order` [K] is the
        column of x for each input; None: inputs are in order.
        """
        ...

    def pack_blocks(
        self,
        blocks: Sequence[HostTensor],
        block_type: QuantFormat,
        k: int,
        out: Tensor | None = None,
    ) -> QuantizedWeight:
        """Pack the blocks of a GGUF file: parts uint8 [N_i, bytes of K numbers], stacked along N.

        Codes, scales and minima stay as they are. `linear` then quantizes x in groups of 32. `out`
        is as in `quantize_weight`.
        """
        ...

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        weight_offset: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Apply the root-mean-square norm to rows of x [T, D] or [T, H, D] (any strides).

        Zhang and Sennrich, "Root Mean Square Layer Normalization". With weight_offset 0, as in
        Llama: the normed value is rounded to x's dtype, then multiplied by weight [D]. Otherwise,
        as in Gemma (offset 1): multiplied by weight_offset + weight in float32, rounded once. `out`
        may be x itself.
        """
        ...

    def fused_add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        weight_offset: float = 0.0,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(sum), sum) with sum = x + residual, rounded to their dtype; both [T, D].

        `out` receives both; the rows of its sum have the residual's stride.
        """
        ...

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        weight_offset: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Apply layer norm to x [T, D] with weight and bias [D] (Ba et al., "Layer Normalization").

        `weight_offset` is added to the weight. `out` as in `linear`.
        """
        ...

    def fused_add_layer_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        weight_offset: float = 0.0,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (layer_norm(sum), sum) with sum = x + residual, rounded to their dtype.

        Both are [T, D]. `out` receives both; the rows of its sum have the residual's stride.
        """
        ...

    def rms(self, x: Tensor, least: float = 0.0, *, inverse: bool = False) -> Tensor:
        """Return the root mean square of each row of x [T, D], or its inverse: [T, 1].

        `least` is a lower bound of the mean square.
        """
        ...

    def cutoff(self, x: Tensor, multiplier: float) -> Tensor:
        """Return max(0, x - (mean + multiplier * standard deviation)) of each row of x [T, D].

        The deviation is that of all D numbers, not of a sample.
        """
        ...

    def act_and_mul(self, gate_up: Tensor, activation: Gate, out: Tensor | None = None) -> Tensor:
        """Return act(gate) * up of gate_up [T, 2 I], gate first: [T, I]; `out` as in `linear`."""
        ...

    def linear_act_and_mul(
        self,
        x: Tensor,
        weight: PackedWeight | QuantizedWeight,
        bias: Tensor | None,
        activation: Gate,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return `act_and_mul` of `linear`: [T, K] to [T, N / 2], with the same bits."""
        ...

    def linear_act(
        self,
        x: Tensor,
        weight: PackedWeight | QuantizedWeight,
        bias: Tensor | None,
        activation: Activation,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return `activate` of `linear`: [T, K] to [T, N], with the same bits."""
        ...

    def gelu(self, x: Tensor, approximate: Gelu, out: Tensor | None = None) -> Tensor:
        """Apply GELU to a dense x (Hendrycks and Gimpel); `out` as in `linear`."""
        ...

    def silu(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return x / (1 + e ** -x) of a dense x; `out` as in `linear`."""
        ...

    def relu(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return max(x, 0) of a dense x; `out` as in `linear`."""
        ...

    def sigmoid(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return 1 / (1 + e ** -x) of a dense x; `out` as in `linear`."""
        ...

    def xielu(self, x: Tensor, alphas: Tensor, out: Tensor | None = None) -> Tensor:
        """Apply xIELU to a dense x (Huang and Schlag, arXiv 2411.13010); `out` as in `linear`.

        With a = softplus(alphas[0]) and b = 1/2 + softplus(alphas[1]) it is a x^2 + x/2 for x > 0,
        otherwise b (e^y - 1 - x) + x/2 with y = min(x, -1e-6).

        Args:
            x: [T, D].
            alphas: [2] in the dtype of x.
            out: the result.
        """
        ...

    def add(self, x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        """Return x + y, both [T, D], or y [D] for all tokens; `out` as in `linear`."""
        ...

    def multiply(
        self,
        x: Tensor,
        factor: Tensor,
        activation: Gate | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return x * act(factor); act(factor) is rounded to the dtype before the product.

        Args:
            x: [T, D] or [T, H, D], any strides of tokens and heads.
            factor: of the shape of x, any strides; or [D] for all tokens, [T, 1], [T, H, 1], or [1]
                for all.
            activation: None: x * factor.
            out: as in `rms_norm`.
        """
        ...

    def sum_parts(
        self,
        x: Tensor,
        parts: int,
        bias: Tensor | None,
        out_dtype: str,
        out: Tensor | None = None,
    ) -> Tensor:
        """Sum the parts of float32 [T, parts * N], one after the other, then the bias [N]: [T, N].

        The bias has the result's dtype. Sums run in float32 and are rounded once. `out` as in
        `linear`.
        """
        ...

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Return a dense x times a number."""
        ...

    def scale_(self, x: Tensor, factor: float) -> None:
        """Multiply a dense x by a number, in place."""
        ...

    def clamp_(self, x: Tensor, bound: float) -> None:
        """Clamp a dense x to [-bound, bound], in place."""
        ...

    def clip(self, x: Tensor, bounds: Tensor, out: Tensor | None = None) -> Tensor:
        """Return x [T, N] with its numbers clamped to bounds: float32 [2], least and largest.

        `out` as in `linear`; it may be x.
        """
        ...

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        """Return an uninitialized tensor for a result, with the dtype and device of `like`."""
        ...

    def call(self, function: Callable[[int, int], object], tokens: int, requests: int) -> None:
        """Run Python code as a part of a step.

        A captured step calls `function(tokens, requests)` each time it runs, with the sizes of the
        step; arrays that were recorded have room for more. Such code is slow: it is for blocks that
        have no kernels yet.

        Raises:
            ConfigError: the device replays kernels only.
        """
        ...

    def soft_cap_(self, x: Tensor, cap: float) -> None:
        """Set a dense x to cap * tanh(x / cap) (Gemma 2), in place."""
        ...

    def exp(self, x: Tensor) -> Tensor:
        """Return e ** x of a dense x."""
        ...

    def log(self, x: Tensor) -> Tensor:
        """Return the natural logarithm of a dense x."""
        ...

    def rotary_embedding(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        cos_sin_cache: Tensor,
        is_neox: bool = True,
    ) -> None:
        """Rotate the first rotary_dim dimensions of each head, in place.

        Su et al., "RoFormer", section 3.4.

        Args:
            positions: [T] int64, each below max_position.
            query: [T, H, D], any strides of tokens and heads.
            key: [T, KVH, D], any strides of tokens and heads; KVH may be 0.
            cos_sin_cache: float32 [max_position, rotary_dim]: cosines, then sines. rotary_dim is
                even and at most D.
            is_neox: pairs are (i, i + rotary_dim / 2); otherwise (2 i, 2 i + 1).
        """
        ...

    def change_rows(self, x: Tensor, rows: LongArray, change: Callable[[Ops, Any], object]) -> None:
        """Have a plug-in change rows of float32 x [M, V].

        Args:
            x: logits.
            rows: int64 [A], without duplicates.
            change: called with operations on torch's tensors, and a copy of the rows, a
                torch.Tensor, which it changes in place.
        """
        ...

    def embedding(
        self,
        weight: Tensor | PackedWeight | QuantizedWeight,
        ids: Tensor,
        dtype: str | None = None,
    ) -> Tensor:
        """Return rows `ids` [T] int64 of weight [V, D], packed or plain, also of int32: [T, D].

        Rows of blocks are rounded to `dtype`; other quantized weights are not supported.
        """
        ...


def activate(ops: Ops, x: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
    """Apply an activation to a dense x; `out` as in `Ops.linear`."""
    match activation:
        case "gelu":
            return ops.gelu(x, "none", out)
        case "gelu_tanh":
            return ops.gelu(x, "tanh", out)
        case "relu":
            return ops.relu(x, out)
        case "silu":
            return ops.silu(x, out)
