"""Packed weights, and the encodings of quantized ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo._native import ExpertLayer
from octavo.system.tensor import Tensor


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
