"""The table of operations: what every implementation offers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, dtype

Gelu = Literal["none", "tanh"]
Gate = Literal["silu", "gelu", "gelu_tanh"]
"""How GELU is computed: exactly, with erf, or by its tanh approximation."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in the form that `linear` of the same table reads fastest.

    Attributes:
        data: the packed numbers; their layout is the implementation's own business.
        n: outputs.
        k: inputs.
        dtype: of the weight, and so of `linear`'s input.
        panel: columns that the layout keeps together; 0 for plain rows.
    """

    data: Tensor
    n: int
    k: int
    dtype: dtype
    panel: int

    @property
    def nbytes(self) -> int:
        """Bytes held."""
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
"""How to choose a token from a row of logits; SamplingRow in csrc/kernels.h.

- temperature: 0 takes the first of the largest.
- min_p: in [0, 1]; 0 keeps all.
- top_p: in (0, 1]; 1 keeps all.
- seed, position, stream: which random numbers, one for each token of the vocabulary.
- top_k: 0 keeps all.
"""


QuantFormat = Literal["int8", "int4_levels", "int4", "int4_zeros"]
"""How the numbers of a quantized weight are written, as unsigned codes:

- int8: scale * (code - 128), one float32 scale for each output.
- int4_levels: scale * levels[code] / 16 with the 16 uneven levels of csrc/quant.h.
- int4: scale * (code - 8).
- int4_zeros: scale * (code - zero), zeros from 0 to 15.

All but int8 have one float16 scale for each output and each group of 32, 64 or 128 inputs.
"""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight in the form that `linear` of the same table reads fastest.

    Attributes:
        data: the packed codes, scales and zeros.
        n: outputs.
        k: inputs.
        format: how the numbers are written.
        group_size: inputs that share a scale; 0 with int8: all of them.
        panel: columns that the layout keeps together; 0 for plain rows.
    """

    data: Tensor
    n: int
    k: int
    format: QuantFormat
    group_size: int
    panel: int

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.data.nbytes


@dataclass(frozen=True, slots=True)
class Codes:
    """Some rows of a quantized weight before packing.

    Attributes:
        codes: uint8 [rows, K].
        scales: float32: [rows, 1] with int8, else [rows, ceil(K / group_size)], each a number that
            float16 has.
        zeros: uint8 of the scales' shape; with int4_zeros only.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None


class Ops(Protocol):
    """Operations on tensors of one device.

    T is the number of tokens (0 is fine). Tensors are float32, bfloat16 or float16, all tensors of
    a call alike, unless said otherwise; sums run in float32. Inputs may be views with any row
    stride as long as the last dimension is dense; results are new, dense tensors unless said
    otherwise. Shapes and dtypes are asserted, not reported: callers are the engine's own layers.
    """

    name: str
    packs_weights: bool
    """Whether packed weights are this table's own form, worth to be kept in memory of its own."""

    def pack_weight(
        self,
        weight: Tensor | Sequence[Tensor],
        dtype: dtype | None = None,
        out: Tensor | None = None,
    ) -> PackedWeight:
        """Packs a weight [N, K], or several [N_i, K] stacked along N (fused projections).

        The result is a copy; the sources are no longer needed.

        Args:
            weight: what to pack.
            dtype: of the result; default: the weight's.
            out: memory for the result: uint8 [`kernels.sizes.packed_nbytes`].
        """
        ...

    def linear(
        self,
        x: Tensor,
        weight: PackedWeight | QuantizedWeight,
        bias: Tensor | None = None,
        out_dtype: dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """x [T, K] times the weight transposed, plus bias [N], rounded once: [T, N].

        `out`: where the result goes; its rows may have any stride.

        With a quantized weight x is quantized, too: each row, or with groups each group of a row,
        to -127 ... 127 times a scale that makes its largest number 127 (Dettmers et al.,
        "LLM.int8()", section 2.1, the row-wise half).
        """
        ...

    def quantize_weight(
        self,
        weight: Sequence[Tensor],
        format: Literal["int8", "int4_levels"],
        group_size: int,
        out: Tensor | None = None,
    ) -> QuantizedWeight:
        """Quantizes and packs a weight: parts [N_i, K] of any type, stacked along N.

        int8: the largest magnitude of a row becomes 127. int4_levels: of some scales for a group
        the one with the smallest squared error. The sources are no longer needed. `out` is memory
        for the result: uint8 [`kernels.sizes.quantized_nbytes`].
        """
        ...

    def pack_quantized(
        self, n: int, k: int, format: QuantFormat, group_size: int, parts: Iterable[Codes]
    ) -> QuantizedWeight:
        """Packs the codes of a weight [N, K] that come some rows at a time, from first to last."""
        ...

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        weight_offset: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Root-mean-square norm over the last dimension of x [T, D] or [T, H, D] (any strides).

        Zhang and Sennrich, "Root Mean Square Layer Normalization". With weight_offset 0, as in
        Llama: the normed value is rounded to x's dtype, then multiplied by weight [D]. Otherwise,
        as in Gemma (offset 1): multiplied by weight_offset + weight in float32, rounded once.
        `out` may be x itself.
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
        """(rms_norm(sum), sum) with sum = x + residual, rounded to their dtype; both [T, D].

        `out`: where both go; rows of the sum are as far apart as those of the residual.
        """
        ...

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """Layer norm of x [T, D] with weight and bias [D] (Ba et al., "Layer Normalization").

        `out` as in `linear`.
        """
        ...

    def act_and_mul(self, gate_up: Tensor, activation: Gate, out: Tensor | None = None) -> Tensor:
        """act(gate) * up of gate_up [T, 2 I], gate first: [T, I]; `out` as in `linear`."""
        ...

    def linear_act_and_mul(
        self,
        x: Tensor,
        weight: PackedWeight | QuantizedWeight,
        bias: Tensor | None,
        activation: Gate,
        out: Tensor | None = None,
    ) -> Tensor:
        """`act_and_mul` of `linear`: [T, K] to [T, N / 2], the same bits as one after the other."""
        ...

    def gelu(self, x: Tensor, approximate: Gelu, out: Tensor | None = None) -> Tensor:
        """GELU of a dense x (Hendrycks and Gimpel); `out` as in `linear`."""
        ...

    def relu(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """max(x, 0) of a dense x; `out` as in `linear`."""
        ...

    def add(self, x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        """x + y, both [T, D]; `out` as in `linear`."""
        ...

    def sum_parts(
        self,
        x: Tensor,
        parts: int,
        bias: Tensor | None,
        out_dtype: dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        """float32 [T, parts * N] to [T, N]: one part after the other is added.

        Then the bias [N], of that type, is; in float32, rounded once. `out` as in `linear`.
        """
        ...

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """A dense x times a number."""
        ...

    def scale_(self, x: Tensor, factor: float) -> None:
        """Multiplies a dense x by a number, in place."""
        ...

    def clamp_(self, x: Tensor, bound: float) -> None:
        """Cuts a dense x to [-bound, bound], in place."""
        ...

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        """A tensor for a result, its contents undefined, of a given tensor's dtype and device."""
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
        """cap * tanh(x / cap) of a dense x (Gemma 2), in place."""
        ...

    def exp(self, x: Tensor) -> Tensor:
        """e ** x of a dense x."""
        ...

    def log(self, x: Tensor) -> Tensor:
        """Natural logarithm of a dense x."""
        ...

    def rotary_embedding(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        cos_sin_cache: Tensor,
        is_neox: bool = True,
    ) -> None:
        """Turns the first rotary_dim dimensions of each head, in place.

        Su et al., "RoFormer", section 3.4.

        Args:
            positions: [T] int64, each below max_position.
            query: [T, H, D], any strides of tokens and heads.
            key: [T, KVH, D], likewise.
            cos_sin_cache: float32 [max_position, rotary_dim]: cosines, then sines. rotary_dim is
                even and at most D.
            is_neox: pairs are (i, i + rotary_dim / 2); otherwise (2 i, 2 i + 1).
        """
        ...

    def softmax(self, x: Tensor) -> Tensor:
        """Softmax of float32 rows [M, V]."""
        ...

    def log_softmax(self, x: Tensor) -> Tensor:
        """Logarithm of the softmax of float32 rows [M, V]."""
        ...

    def argmax(self, x: Tensor) -> Tensor:
        """Index of the largest of each float32 row [M, V]: int64 [M].

        The lowest among equals; NaN is passed over; 0 where a row holds nothing else.
        """
        ...

    def row_max(self, x: Tensor) -> Tensor:
        """The largest of each float32 row [M, V]: float32 [M]; NaN where a row has one."""
        ...

    def sample(self, x: Tensor, params: NDArray[np.void]) -> Tensor:
        """One token for each float32 row [M, V]: int64 [M]; -1 without a finite maximum.

        `params`: `SAMPLING_ROW` [M], dense.

        Of the tokens that the filters leave, the first to arrive: at -log(u) / weight, u being the
        token's own random number (`reference.token_numbers`), the lowest id among equals. So each
        is drawn with a probability proportional to its weight, and where two distributions are
        alike, the same numbers mostly draw the same token (the Gumbel-max trick: C. J. Maddison,
        D. Tarlow, T. Minka, "A* sampling", 2014, section 2).

        A token's weight is the integer floor(2**40 * exp((logit - max) / temperature)), so that
        sums are exact in any order. The filters are min-p, then top-k, then top-p of what is left,
        as in vLLM; they rank tokens by value descending, then by id ascending, and each keeps a
        beginning of the ranking.
        """
        ...

    def apply_bitmask_(self, x: Tensor, bitmask: Tensor, rows: Tensor) -> None:
        """Makes logits -inf that a grammar, or `allowed_token_ids`, does not allow, in place.

        Args:
            x: float32 [M, V], dense.
            bitmask: int32 [G, ceil(V / 32)]; bit b of word w is 1 if token 32 w + b is allowed.
            rows: int64 [G], the row of x for each row of the bitmask; none of them twice.
        """
        ...

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest of each float32 row [M, V], largest first: values, int64 indices [M, k].

        Among equals the lower index comes first; NaN counts as -inf.
        """
        ...

    def embedding(self, weight: Tensor | PackedWeight, ids: Tensor) -> Tensor:
        """Rows `ids` [T] int64 of weight [V, D], packed or plain: [T, D]."""
        ...
