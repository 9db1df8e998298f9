"""What a form of quantized weights offers, and which one is used. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from octavo.kernels.sizes import packed_nbytes

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.base import Ops, QuantizedWeight


MOST_INPUTS = 2**17
"""Of a quantized weight: sums of 32 bits hold no more products."""


class Quantization(Protocol):
    """How the linear weights of a model are held.

    Every linear layer is quantized, the LM head, too; norms, biases and embeddings stay as they
    are. Any shape will do: what a group lacks is padding, which adds nothing to a product.
    """

    name: str

    def nbytes(self, n: int, k: int, whole: int | None = None) -> int:
        """Bytes of a packed weight with n outputs and k inputs.

        `whole`: outputs of the weight that these are a part of, which is written as the whole is.
        """
        ...

    def wrap(
        self, data: Tensor, n: int, k: int, panel: int, whole: int | None = None
    ) -> QuantizedWeight:
        """A weight that was packed before, in panels of `panel`, from its bytes [`nbytes`]."""
        ...

    def pack(
        self,
        ops: Ops,
        parts: Sequence[Tensor],
        out: Tensor | None = None,
        whole: int | None = None,
    ) -> QuantizedWeight:
        """Quantizes and packs a weight.

        Args:
            ops: the table of operations that will use it.
            parts: [N_i, K] each, float32, bfloat16 or float16; stacked along N.
            out: memory for the result: uint8 [`nbytes`].
            whole: as for `nbytes`.
        """
        ...


def get_quantization(name: str | None) -> Quantization | None:
    """The form that the `quantization` setting names; None: weights keep the model's dtype."""
    from octavo.quantization.int4 import Int4
    from octavo.quantization.int8 import Int8

    forms: dict[str, Quantization] = {"int8": Int8(), "int4": Int4()}
    return None if name is None else forms[name]


def linear_nbytes(
    n: int, k: int, dtype: str, form: Quantization | None, whole: int | None = None
) -> int:
    """Bytes of a packed linear weight with n outputs and k inputs, quantized or of a dtype.

    `whole` as in `Quantization.nbytes`.
    """
    return packed_nbytes(n, k, dtype) if form is None else form.nbytes(n, k, whole)
