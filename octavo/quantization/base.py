"""Interface of quantized weight formats, and the choice of one. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from octavo.kernels.sizes import packed_nbytes

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.base import Ops, QuantizedWeight


MOST_INPUTS = 2**17
"""Maximum number of inputs of a quantized weight: 32-bit sums hold no more products."""


class Quantization(Protocol):
    """Format of the linear weights of a model.

    Every linear layer is quantized, including the LM head; norms, biases and embeddings stay
    unchanged. Any shape is supported: incomplete groups are padded, which adds nothing to a
    product.
    """

    name: str

    def nbytes(self, n: int, k: int, whole: int | None = None) -> int:
        """Return the bytes of a packed weight with n outputs and k inputs.

        `whole`: outputs of the whole weight if this is a part, which has the format of the whole.
        """
        ...

    def wrap(
        self, data: Tensor, n: int, k: int, panel: int, whole: int | None = None
    ) -> QuantizedWeight:
        """Wrap the bytes [`nbytes`] of a weight that was packed before in panels of `panel`."""
        ...

    def pack(
        self,
        ops: Ops,
        parts: Sequence[Tensor],
        out: Tensor | None = None,
        whole: int | None = None,
    ) -> QuantizedWeight:
        """Quantize and pack a weight.

        Args:
            ops: the table of operations that will use it.
            parts: [N_i, K] each, float32, bfloat16 or float16; stacked along N.
            out: memory for the result: uint8 [`nbytes`].
            whole: as for `nbytes`.
        """
        ...


def get_quantization(name: str | None) -> Quantization | None:
    """Return the format that the `quantization` setting names; None: weights keep their dtype."""
    from octavo.quantization.int4 import Int4
    from octavo.quantization.int8 import Int8

    forms: dict[str, Quantization] = {"int8": Int8(), "int4": Int4()}
    return None if name is None else forms[name]


def linear_nbytes(
    n: int, k: int, dtype: str, form: Quantization | None, whole: int | None = None
) -> int:
    """Return the bytes of a packed linear weight with n outputs and k inputs, quantized or not.

    `whole` as in `Quantization.nbytes`.
    """
    return packed_nbytes(n, k, dtype) if form is None else form.nbytes(n, k, whole)
