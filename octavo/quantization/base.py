"""What a form of quantized weights offers, and which one is used. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.base import Codes, Ops, QuantizedWeight

# Rows quantized at a time: what is held beside the packed weight is a small part of it.
_ROWS = 1024


class Quantization(Protocol):
    """How the linear weights of a model are held.

    Every linear layer is quantized; norms, biases and embeddings stay as they are.
    """

    name: str

    def nbytes(self, n: int, k: int) -> int:
        """Bytes of a packed weight.

        Args:
            n: outputs.
            k: inputs.
        """
        ...

    def pack(self, ops: Ops, parts: Sequence[Tensor]) -> QuantizedWeight:
        """Quantizes and packs a weight.

        Args:
            ops: the table of operations that will use it.
            parts: [N_i, K] each, of any floating-point type; stacked along N.
        """
        ...


def get_quantization(name: str | None) -> Quantization | None:
    """The form that the `quantization` setting names; None: weights keep the model's dtype."""
    from octavo.quantization.int4 import Int4
    from octavo.quantization.int8 import Int8

    forms: dict[str, Quantization] = {"int8": Int8(), "int4": Int4()}
    return None if name is None else forms[name]


def quantize(
    ops: Ops, parts: Sequence[Tensor], format: Literal["int8", "int4_levels"], group_size: int
) -> QuantizedWeight:
    """Quantizes and packs a weight some rows at a time; see `Ops.quantize_weight`."""

    def codes() -> Iterator[Codes]:
        for part in parts:
            for rows in part.split(_ROWS):
                yield ops.quantize_weight(rows.contiguous(), format, group_size)

    n, k = sum(part.shape[0] for part in parts), parts[0].shape[1]
    return ops.pack_quantized(n, k, format, group_size, codes())
