"""FP4: codes of type e2m1 with a scale for 16 inputs (NVFP4) or 32 (MXFP4); 8-bit activations.

Rouhani et al., "Microscaling Data Formats for Deep Learning", for MXFP4. NVFP4 has two levels of
scales: e4m3 for 16 inputs, and float32 for a tensor. Activations are quantized as with GGUF.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Source
from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError
from octavo.quantization.base import Groups, IntArray, Part, TensorError
from octavo.quantization.packed import PackedBlocks
from octavo.system.block_types import BLOCK_TYPES

if TYPE_CHECKING:
    from octavo.system.tensor import HostTensor

_BLOCK = 32
"""Inputs of a block of both types."""
UNUSED_SCALES = ("input_scale", "input_global_scale", "k_scale", "v_scale")
"""Names of scales of activations and of a KV cache, which are not used."""


@dataclass(frozen=True)
class FP4(PackedBlocks):
    """Weights code * scale, with NVFP4 times or divided by a factor of the tensor."""

    block_type: Literal["mxfp4", "nvfp4"]
    codes: str = "weight_packed"
    """Last part of the name of the tensor of codes: two in a byte, the first in its low half."""
    factor: str | None = None
    """Last part of the name of the factor; with nvfp4 only."""
    divides: bool = False
    """True if the stored factor divides."""

    num_tensors: ClassVar[int] = 3 + len(UNUSED_SCALES)
    max_inputs: ClassVar[int | None] = None

    @property
    def name(self) -> str:
        """Implement `WeightForm`."""
        return f"{self.block_type}-{self.factor}"

    @property
    def group_size(self) -> int:
        """Number of inputs that share a scale."""
        return 16 if self.block_type == "nvfp4" else 32

    def sources(self, module: str, rows: int, inputs: int) -> tuple[Source, ...]:
        """Return the codes, scales and the factor, then scales that are not used.

        Raises:
            ModelError: blocks do not divide the inputs.
        """
        if inputs % _BLOCK:
            raise ModelError(
                f"{module}.{self.codes} has {inputs} inputs, which is not a multiple of {_BLOCK}; "
                f"{self.block_type} is supported with such only."
            )
        kinds = ("float8_e4m3fn",) if self.block_type == "nvfp4" else ("uint8",)
        one: dict[str, Any] = {"other_shapes": ((1,),), "dtypes": ("float32",)}
        unused: dict[str, Any] = one | {"dtypes": ("float32", "bfloat16", "float16")}
        return (
            Source(f"{module}.{self.codes}", (rows, inputs // 2), dtypes=("uint8",)),
            Source(f"{module}.weight_scale", (rows, inputs // self.group_size), dtypes=kinds),
            Source(f"{module}.{self.factor}", (), optional=self.factor is None, **one),
            *(Source(f"{module}.{name}", (), optional=True, **unused) for name in UNUSED_SCALES),
        )

    def cut(
        self,
        tensors: Sequence[HostTensor],
        rows: Sequence[slice | IntArray],
        columns: tuple[int, int] | None,
    ) -> list[Part]:
        """Implement `WeightForm`; a part has blocks, uint8 [rows, bytes]."""
        from octavo.system.tensor import from_numpy

        codes, scales = tensors[0].numpy(), tensors[1].view("uint8").numpy()
        damaged = scales & 0x7F == 0x7F if self.block_type == "nvfp4" else scales == 0xFF
        if damaged.any():
            raise TensorError("weight_scale", "has numbers that are NaN; download the file again.")
        factor = self._read_factor(tensors[2])
        if columns is not None:
            begin, end = columns
            if begin % _BLOCK or end % _BLOCK:
                raise TensorError(
                    self.codes,
                    f"has blocks of {_BLOCK} inputs, which a part from {begin} to {end} would "
                    "divide; lower tensor_parallel_size.",
                )
            codes = codes[:, begin // 2 : end // 2]
            scales = scales[:, begin // self.group_size : end // self.group_size]
        return [(from_numpy(self._blocks(codes[part], scales[part], factor)),) for part in rows]

    def _read_factor(self, tensor: HostTensor) -> np.float32:
        """Return the number that all scales are multiplied by.

        Raises:
            TensorError: it is impossible.
        """
        if self.factor is None:
            return np.float32(1)
        number = tensor.numpy().reshape(())
        with np.errstate(divide="ignore", over="ignore"):
            factor = np.float32(1) / number if self.divides else number
        if not np.isfinite([number, factor]).all():
            raise TensorError(
                self.factor, f"is {number}, which cannot scale; download the file again."
            )
        return np.float32(factor)

    def _blocks(
        self, codes: NDArray[np.uint8], scales: NDArray[np.uint8], factor: np.float32
    ) -> NDArray[np.uint8]:
        """Return the blocks of some rows, as `BLOCK_TYPES` describes them."""
        rows, count = len(codes), codes.shape[1] * 2 // _BLOCK
        halves = codes.reshape(rows, count, 2, 8)  # inputs 0 to 15 and 16 to 31
        first, second = halves[:, :, 0], halves[:, :, 1]
        blocks = np.empty((rows, count, BLOCK_TYPES[self.block_type].nbytes), np.uint8)
        if self.block_type == "nvfp4":
            blocks[..., :4] = np.asarray(factor, np.float32).reshape(1).view(np.uint8)
        blocks[..., -16 - scales.shape[1] // count : -16] = scales.reshape(rows, count, -1)
        blocks[..., -16::2] = (first & 15) | (second & 15) << 4
        blocks[..., -15::2] = first >> 4 | (second & 0xF0)
        return blocks.reshape(rows, -1)


@dataclass(frozen=True)
class StackedMXFP4(FP4):
    """MXFP4 of all experts in one tensor, as in gpt-oss: blocks [rows, blocks, 16 bytes]."""

    block_type: Literal["mxfp4", "nvfp4"] = "mxfp4"

    num_tensors: ClassVar[int] = 2

    def sources(self, module: str, rows: int, inputs: int) -> tuple[Source, ...]:
        """Return the blocks and their scales.

        Raises:
            ModelError: blocks do not divide the inputs.
        """
        if inputs % _BLOCK:
            raise ModelError(
                f"{module}_blocks has {inputs} inputs, which is not a multiple of {_BLOCK}; mxfp4 "
                "is supported with such only."
            )
        return (
            Source(f"{module}_blocks", (rows, inputs // _BLOCK, 16), dtypes=("uint8",)),
            Source(f"{module}_scales", (rows, inputs // _BLOCK), dtypes=("uint8",)),
        )

    def cut(
        self,
        tensors: Sequence[HostTensor],
        rows: Sequence[slice | IntArray],
        columns: tuple[int, int] | None,
    ) -> list[Part]:
        """Implement `WeightForm`; see `FP4`."""
        from octavo.system.tensor import empty

        blocks, scales = tensors
        codes = blocks.view((blocks.shape[0], -1))
        return super().cut((codes, scales, empty(0, dtype="float32")), rows, columns)


def read_mxfp4(config: ConfigJson) -> Groups:
    """Read gpt-oss: the experts are in MXFP4, all else is plain."""
    return [([r"re:.*\.experts\."], StackedMXFP4())]
