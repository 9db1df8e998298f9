"""Interface of the table of operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo._native import ExpertLayer
from octavo.kernels.lora import LoraTable, LoraWeight
from octavo.kernels.replaced import ReplacedTable, ReplacedWeight
from octavo.kernels.routing import ExpertActivation, Gate, Routing
from octavo.system.tensor import HostTensor, Tensor

LongArray = NDArray[np.int64]
Gelu = Literal["none", "tanh"]
"""Method of computing GELU: exactly, with erf, or by its tanh approximation."""
Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
"""Activation of the result of a linear layer."""
ConvActivation = Literal["none", "silu"]
"""Activation of a convolution."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weight in the layout that `linear` of the same table reads fastest.

    Attributes:
        data: the packed numbers; their layout is private to the implementation.
        n: outputs.
        k: inputs.
        dtype: dtype of the weight and of `linear`'s input.
        panel: columns that the layout keeps together; 0 for plain rows.
    """

    data: Tensor
    n: int
    k: int
    dtype: str
    panel: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.data.nbytes


SAMPLING_ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("top_p", np.float64),
        ("seed", np.uint64),
        ("position", np.uint32),
        ("stream", np.uint32),
        ("top_k", np.int64),
    ]
)
"""Parameters of sampling a token from a row of logits; SamplingRow in csrc/sampling_args.h.

- temperature: 0 selects the first of the largest.
- min_p: in [0, 1]; 0 keeps all.
- top_p: in (0, 1]; 1 keeps all.
- seed, position, stream: select the random numbers, one for each token of the vocabulary.
- top_k: 0 keeps all.
"""


QuantFormat = Literal[
    "int8",
    "int4_levels",
    "int4",
    "int4_zeros",
    "int8_groups",
    "fp8",
    "nf4",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "iq4_nl",
    "mxfp4",
    "q2_k",
    "q3_k",
    "q4_k",
    "q5_k",
    "q6_k",
    "iq4_xs",
    "iq1_levels",
    "iq2_levels",
    "iq3_xxs_levels",
    "iq3_s_levels",
    "nvfp4",
]
"""Encoding of a quantized weight in unsigned codes:

- int8: scale * (code - 128), one float32 scale for each output.
- int4_levels: scale * levels[code] / 16 with the 16 uneven levels of csrc/quant.h.
- int4: scale * (code - 8).
- int4_zeros: scale * (code - zero), zeros from 0 to 15.
- int8_groups: scale * (code - zero), zeros from 0 to 255.
- nf4: scale * levels[code], the 16 levels of NF4 (Dettmers et al., "QLoRA") times 32767, rounded.
- fp8: scale * (the number of type e4m3 with this code, not NaN); one float32 scale for each output,
  or for each output and group of 32, 64 or 128 inputs.

int4_levels, int4 and int4_zeros have one float16 scale for each output and each group of 32, 64 or
128 inputs, int8_groups and nf4 a float32 scale. The others are the block types of
`octavo.system.block_types`.
"""


OnlineFormat = Literal["int8", "int4_levels", "fp8"]
"""Formats to which weights of floats are quantized while they are loaded."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Quantized weight in the layout that `linear` of the same table reads fastest.

    Attributes:
        data: the packed codes, scales and zeros.
        n: outputs.
        k: inputs.
        format: encoding of the numbers.
        group_size: inputs that share a scale; 0: all of them, or a block type.
        panel: columns that the layout keeps together; 0 for plain rows.
        order: int32 [K], the last bytes of `data`: the column of x for each packed input; None: the
            inputs are in order.
    """

    data: Tensor
    n: int
    k: int
    format: QuantFormat
    group_size: int
    panel: int
    order: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.data.nbytes


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows of a quantized weight before packing.

    Attributes:
        codes: uint8 [rows, K].
        scales: float32: [rows, 1] with a group size of 0, else [rows, ceil(K / group_size)];
            with int4_levels, int4 and int4_zeros, float16 can represent each.
        zeros: uint8 of the scales' shape; with int4_zeros and int8_groups only.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """Weights of one product of all experts of a layer.

    Attributes:
        weights: weight of each expert, all of one shape and form; None: another rank has it.
        bias: [experts, n] in the model's dtype; None: no bias.
        addresses: int64 [experts]: the addresses of the packed weights; 0: none.
        cached: the layer of an expert cache that has the weights; None: all are in memory.
    """

    weights: tuple[PackedWeight | QuantizedWeight | None, ...]
    bias: Tensor | None
    addresses: Tensor
    cached: ExpertLayer | None = None

    @property
    def first(self) -> PackedWeight | QuantizedWeight:
        """The first weight, which has the shape and the form of all."""
        return next(weight for weight in self.weights if weight is not None)


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


class Ops(Protocol):
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

    def pack_lora(
        self,
        a: HostTensor,
        b: HostTensor,
        scale: float,
        dtype: str,
        out: Tensor | None = None,
        affine: HostTensor | None = None,
    ) -> LoraWeight:
        """Pack an adapter's matrices A [rank, K] and B [N, rank] for `add_lora`.

        Args:
            a: A.
            b: B.
            scale: factor of the product.
            dtype: type of the result.
            out: memory for the result: uint8 [`kernels.sizes.lora_nbytes`].
            affine: gains and offsets of the outputs, float32 [2, N]; None: none.
        """
        ...

    def put_adapter_tables(self, tables: Sequence[LoraTable | ReplacedTable]) -> None:
        """Copy all tables of a model to the device, after the steps that were launched before.

        The operations of adapters read the copies. On a CPU nothing is copied.
        """
        ...

    def add_lora(self, out: Tensor, x: Tensor, slots: Tensor, table: LoraTable) -> None:
        """Add each row's scale * (x A^T) B^T to the results of a linear layer: out [T, N].

        With gains and offsets, the sum y becomes gain * y + offset (Liu et al., "DoRA:
        Weight-Decomposed Low-Rank Adaptation").
        Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models"; Chen et al., "Punica:
        Multi-Tenant LoRA Serving". The product is a float32 number, and the sum is rounded once.
        Rows without an adapter keep their bits.

        Args:
            out: results of the type of x or float32, in rows of any stride; changed in place.
            x: inputs [T, K].
            slots: int32 [T], the slot of each row's adapter; -1: none.
            table: the adapters.
        """
        ...

    def add_lora_embedding(self, out: Tensor, ids: Tensor, slots: Tensor, table: LoraTable) -> None:
        """Add each row's scale * A^T[id] B^T to rows of an embedding: out [T, N].

        The product is a float32 number, and the sum is rounded once. Rows without an adapter, and
        those whose id is outside of the table, keep their bits.

        Args:
            out: embeddings of the model's type, in rows of any stride; changed in place.
            ids: int64 [T], tokens.
            slots: int32 [T], the slot of each row's adapter; -1: none.
            table: the adapters, of one module with a token for each input.
        """
        ...

    def pack_replaced(
        self,
        weight: HostTensor,
        bias: HostTensor | None,
        dtype: str,
        table: ReplacedTable,
        out: Tensor | None = None,
    ) -> ReplacedWeight:
        """Pack an adapter's layer for `replace_linear` or `replace_embedding`.

        Args:
            weight: weight, of the table's shape.
            bias: bias, if the layer has one.
            dtype: type of the result.
            table: the layer that is replaced.
            out: memory for the result: uint8 [`table.nbytes`].
        """
        ...

    def replace_linear(self, out: Tensor, x: Tensor, slots: Tensor, table: ReplacedTable) -> None:
        """Set rows of a linear layer's results to x W^T + b of each row's adapter: out [T, N].

        The products are added in float32, in the order of the inputs. Other rows keep their bits.

        Args:
            out: results of the type of x or float32, in rows of any stride; changed in place.
            x: inputs [T, K].
            slots: int32 [T], the slot of each row's adapter; -1: none.
            table: the adapters' layers.
        """
        ...

    def replace_embedding(
        self, out: Tensor, ids: Tensor, slots: Tensor, table: ReplacedTable
    ) -> None:
        """Set rows of an embedding to those of each row's adapter: out [T, N].

        Rows of other adapters, and those whose id is outside of the table, keep their bits.

        Args:
            out: embeddings of the model's type, in rows of any stride; changed in place.
            ids: int64 [T], tokens.
            slots: int32 [T], the slot of each row's adapter; -1: none.
            table: the adapters' tables.
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

    def softmax(self, x: Tensor) -> Tensor:
        """Return the softmax of float32 rows [M, V]."""
        ...

    def log_softmax(self, x: Tensor) -> Tensor:
        """Return the logarithm of the softmax of float32 rows [M, V]."""
        ...

    def argmax(self, x: Tensor) -> Tensor:
        """Return the index of the largest number of each float32 row [M, V]: int64 [M].

        Among equals this is the lowest index. NaN is ignored; a row of NaN yields 0.
        """
        ...

    def row_max(self, x: Tensor) -> Tensor:
        """Return the maximum of each float32 row [M, V]: float32 [M]; NaN where a row has one."""
        ...

    def sample(self, x: Tensor, params: NDArray[np.void]) -> Tensor:
        """Sample one token from each float32 row [M, V]: int64 [M]; -1 without a finite maximum.

        `params`: `SAMPLING_ROW` [M], dense.

        Each token that the filters keep arrives at -log(u) / weight, u being the token's random
        number (`reference.token_numbers`). The result is the first to arrive, the lowest id among
        equals. So each token is drawn with a probability proportional to its weight. Where two
        distributions are alike, the same numbers mostly draw the same token (the Gumbel-max trick:
        C. J. Maddison, D. Tarlow, T. Minka, "A* sampling", 2014, section 2).

        A token's weight is the integer floor(2**40 * exp((logit - max) / temperature)), so that
        sums are exact in any order. The filters are min-p, then top-k, then top-p of the rest, as
        in vLLM. They rank tokens by value descending, then by id ascending, and each keeps a prefix
        of the ranking.
        """
        ...

    def apply_bitmask_(self, x: Tensor, bitmask: Tensor, rows: Tensor) -> None:
        """Set the logits of tokens that the bitmask forbids to -inf, in place.

        Args:
            x: float32 [M, V], dense.
            bitmask: int32 [G, ceil(V / 32)]; bit b of word w is 1 if token 32 w + b is allowed.
            rows: int64 [G], the row of x for each row of the bitmask; no duplicates.
        """
        ...

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest of each float32 row [M, V] in order: values, int64 indices [M, k].

        Fast if k is small.

        Equals are ordered by index; NaN counts as -inf.
        """
        ...

    def gather(self, x: Tensor, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the numbers of x, float32 [M, V], at `ids` [M, k] of each row: float32 [M, k]."""
        ...

    def ranks(self, x: Tensor, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place of number `ids` [M] in each float32 row [M, V]: int64 [M], from 1 on.

        Rows are ranked by value descending, then by index ascending.
        """
        ...

    def set_at_(self, x: Tensor, rows: LongArray, columns: LongArray | None, value: float) -> None:
        """Set elements (rows[i], columns[i]) of x [M, V], or whole rows, to a number."""
        ...

    def add_at_(
        self, x: Tensor, rows: LongArray, columns: LongArray, values: NDArray[np.float32]
    ) -> None:
        """Add values [E] to elements (rows[i], columns[i]) of float32 x [M, V], all distinct."""
        ...

    def penalize_(
        self,
        x: Tensor,
        rows: LongArray,
        columns: LongArray,
        counts: NDArray[np.float32],
        penalties: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]],
    ) -> None:
        """Apply penalties to elements (rows[i], columns[i]) of float32 x [M, V], all distinct.

        Args:
            x: logits.
            rows: int64 [E].
            columns: int64 [E].
            counts: float32 [E], number of times that the token was generated.
            penalties: float32 [E] each: repetition (divides positive logits, multiplies others),
                frequency (subtracted for each count), and presence (subtracted if the count is
                above 0).
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
