"""int8: one scale for each output, symmetric; 8-bit activations, one scale for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from octavo.quantization.quantized import FromFloatsQuantized


@dataclass(frozen=True)
class Int8(FromFloatsQuantized):
    """Weights of 8 bits: the largest magnitude of each output becomes 127."""

    name: ClassVar[str] = "int8"

    def format(self, n: int, k: int) -> tuple[Literal["int8"], int]:
        """Return int8, without groups."""
        return "int8", 0
