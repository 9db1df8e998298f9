"""FP8: weights of type float8_e4m3fn, from a checkpoint or made while loading.

Micikevicius et al., "FP8 Formats for Deep Learning". Only weights have 8 bits: activations stay in
the model's type, which is more exact than activations in FP8, and no slower on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import FLOATS, Source
from octavo.checkpoints.config_json import ConfigJson
from octavo.quantization.base import Groups, IntArray, PackedShape, Part, TensorError
from octavo.quantization.packed import PackedCodes
from octavo.quantization.quantized import FromFloatsQuantized

if TYPE_CHECKING:
    from octavo.system.tensor import HostTensor

_GROUPS = (128, 64, 32)
"""Numbers of inputs that can share a scale in a packed weight."""
_SCALES = ("weight_scale", "weight_scale_inv")
"""Names of a weight's scales: the second is the usual one with blocks. Both multiply."""
_UNUSED = ("input_scale", "activation_scale", "k_scale", "v_scale")
"""Names of scales of static activations and of a KV cache, which are not used."""


@dataclass(frozen=True)
class OnlineFP8(FromFloatsQuantized):
    """Weights of floats, made FP8 while loading: the largest of each output becomes 448."""

    name: ClassVar[str] = "fp8"
    max_inputs: ClassVar[int | None] = None

    def format(self, n: int, k: int) -> tuple[Literal["fp8"], int]:
        """Return fp8 with one scale for each output."""
        return "fp8", 0


@dataclass(frozen=True)
class FP8(PackedCodes):
    """Weights number * scale of a checkpoint."""

    block: tuple[int, int] | None = None
    """Number of outputs and of inputs that share a scale; those at the end may be fewer. None: all
    inputs of an output, or the whole tensor."""
    max_inputs: ClassVar[int | None] = None
    num_tensors: ClassVar[int] = 1 + len(_SCALES) + len(_UNUSED)

    @property
    def name(self) -> str:
        """Implement `WeightForm`."""
        block = "outputs" if self.block is None else "x".join(map(str, self.block))
        return f"fp8-{block}"

    @property
    def group_size(self) -> int:
        """Number of inputs that share a scale in memory; 0: all."""
        if self.block is None:
            return 0
        return next(size for size in _GROUPS if self.block[1] % size == 0)

    def sources(self, module: str, rows: int, inputs: int) -> tuple[Source, ...]:
        """Return the weight, then its scales and those of activations, by each of their names."""
        one: tuple[tuple[int, ...], ...] = ((), (1,))
        if self.block is None:
            shapes = *one, (1, 1), (rows,), (rows, 1)
        else:
            shapes = ((-(-rows // self.block[0]), -(-inputs // self.block[1])),)

        def scale(name: str, shapes: tuple[tuple[int, ...], ...]) -> Source:
            return Source(
                f"{module}.{name}",
                shapes[-1],
                other_shapes=shapes[:-1],
                dtypes=(*FLOATS, "uint8"),
                optional=True,
            )

        return (
            Source(f"{module}.weight", (rows, inputs), dtypes=("float8_e4m3fn",)),
            *(scale(name, shapes) for name in _SCALES),
            *(scale(name, (*one, (1, 1))) for name in _UNUSED),
        )

    def cut(
        self,
        tensors: Sequence[HostTensor],
        rows: Sequence[slice | IntArray],
        columns: tuple[int, int] | None,
    ) -> list[Part]:
        """Implement `WeightForm`; a part has codes, and a scale for each output and group."""
        from octavo.system.tensor import from_numpy

        codes = tensors[0].view("uint8").numpy()
        # The codes 0x7f and 0xff are NaN.
        if codes.size and (codes.max() == 0xFF or codes.view(np.int8).max() == 0x7F):
            raise TensorError(
                "weight", "has numbers that are NaN; download the file again, or quantize it again."
            )
        scales = self._scales(tensors[1 : 1 + len(_SCALES)], *codes.shape)
        if columns is not None:
            begin, end = columns
            if group := self.group_size:
                if begin % group or (end % group and end != codes.shape[1]):
                    raise TensorError(
                        "weight",
                        f"has blocks of {group} inputs, which a part from {begin} to {end} would "
                        "divide; lower tensor_parallel_size.",
                    )
                scales = scales[:, begin // group : -(-end // group)]
            codes = codes[:, begin:end]
        return [
            tuple(from_numpy(np.ascontiguousarray(array[part])) for array in (codes, scales))
            for part in rows
        ]

    def _scales(self, tensors: Sequence[HostTensor], rows: int, inputs: int) -> NDArray[np.float32]:
        """Return the scales of each output and group, float32 [rows, groups].

        Args:
            tensors: the tensors of `_SCALES`; those that are absent have no elements.
            rows: number of outputs.
            inputs: number of inputs.
        """
        found = [pair for pair in zip(_SCALES, tensors, strict=True) if pair[1].numel()]
        if len(found) != 1:
            both = " and ".join(_SCALES)
            raise TensorError(
                _SCALES[self.block is not None],
                f"is stored twice, as {both}; remove one of them."
                if found
                else "is missing; download the checkpoint again.",
            )
        name, tensor = found[0]
        scales = _to_float32(tensor)
        if not np.isfinite(scales).all():
            raise TensorError(name, "has numbers that are not finite; download the file again.")
        if self.block is None:
            return np.broadcast_to(scales.reshape(-1, 1), (rows, 1))
        groups = -(-inputs // self.group_size)
        wide = scales.repeat(min(self.block[1] // self.group_size, groups), axis=1)[:, :groups]
        return wide.repeat(min(self.block[0], rows), axis=0)[:rows]

    def kernel_format(self, shape: PackedShape) -> tuple[Literal["fp8"], int]:
        """Implement `Packed`."""
        return "fp8", self.group_size


def _to_float32(scales: HostTensor) -> NDArray[Any]:
    """Return scales in float32; those of one byte are powers of two (e8m0)."""
    numbers: NDArray[Any]
    with np.errstate(over="ignore"):  # of float64, and of 255 (NaN), which becomes infinite
        if scales.itemsize > 1:
            numbers = scales.numpy().astype(np.float32)
        else:
            numbers = np.ldexp(np.float32(1), scales.numpy().astype(np.int32) - 127)
    return numbers


def read_fp8(config: ConfigJson) -> Groups:
    """Return the forms of a checkpoint's modules with `quant_method` fp8.

    Raises:
        ModelError: a field has an unsupported value.
    """
    config.choice("activation_scheme", {"dynamic": "dynamic", "static": "static"}, "dynamic")
    config.refuse("fmt", "e4m3", "supported: e4m3")
    config.refuse("scale_fmt", "ue8m0", "supported: ue8m0")
    blocks = config.has("weight_block_size")
    return [(["Linear"], FP8(read_block(config, "weight_block_size") if blocks else None))]


def read_block(config: ConfigJson, field: str) -> tuple[int, int]:
    """Return the number of outputs and of inputs that share a scale.

    Raises:
        ModelError: the value is not supported.
    """
    block = config.get(field)
    whole = isinstance(block, list) and len(block) == 2 and all(type(size) is int for size in block)
    if not whole or min(block) < 1 or block[1] % _GROUPS[-1]:
        raise config.error(
            field, f"it must be [outputs, inputs], the inputs a multiple of {_GROUPS[-1]}"
        )
    return block[0], block[1]
