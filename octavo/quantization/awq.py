"""AWQ checkpoints in the gemm packing: 4-bit codes of eight outputs in each 32-bit word.

Lin et al., "AWQ: Activation-aware Weight Quantization". Codes, zero points and scales are kept
exactly; activations have 8 bits, as with int4.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Source
from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.sizes import quantized_nbytes
from octavo.quantization.base import Groups, IntArray, PackedShape, Part, TensorError
from octavo.quantization.plain import PLAIN

if TYPE_CHECKING:
    from octavo.kernels.base import Ops, QuantizedWeight
    from octavo.system.tensor import HostTensor

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Outputs in a word, from its lowest four bits on."""
_SHIFTS = np.array([4 * _ORDER.index(output) for output in range(8)], np.uint32)
_GROUP_SIZES = (32, 64, 128)
_FORMAT: Literal["int4_zeros"] = "int4_zeros"


@dataclass(frozen=True)
class AWQ:
    """Weights scale * (code - zero).

    A checkpoint without zero points stores them, too: they are all 8.
    """

    group_size: int
    """Number of inputs that share a scale."""
    max_inputs: ClassVar[int | None] = 2**17
    num_tensors: ClassVar[int] = 3

    @property
    def name(self) -> str:
        """Implement `WeightForm`."""
        return f"awq-{self.group_size}"

    def sources(self, module: str, rows: int, inputs: int) -> tuple[Source, ...]:
        """Implement `WeightForm`."""
        groups, words = -(-inputs // self.group_size), -(-rows // 8)
        return (
            Source(f"{module}.qweight", (inputs, words), dtypes=("int32",)),
            Source(f"{module}.scales", (groups, rows)),
            Source(f"{module}.qzeros", (groups, words), dtypes=("int32",)),
        )

    def cut(
        self,
        tensors: Sequence[HostTensor],
        rows: Sequence[slice | IntArray],
        columns: tuple[int, int] | None,
    ) -> list[Part]:
        """Implement `WeightForm`; a part has codes, scales and zeros."""
        from octavo.system.tensor import from_numpy

        arrays = [tensor.numpy() for tensor in tensors]
        if columns is not None:
            begin, end = columns
            if begin % self.group_size or (end % self.group_size and end != len(arrays[0])):
                raise TensorError(
                    "qweight",
                    f"has groups of {self.group_size} inputs, which a part from {begin} to {end} "
                    "would divide; lower tensor_parallel_size.",
                )
            groups = slice(begin // self.group_size, -(-end // self.group_size))
            arrays = [arrays[0][begin:end], *(array[groups] for array in arrays[1:])]
        wide = arrays[1].astype(np.float32)
        with np.errstate(all="ignore"):
            exact = wide.astype(np.float16).astype(np.float32) == wide
        if not (exact & np.isfinite(wide)).all():
            raise TensorError(
                "scales",
                "has numbers that float16 does not hold exactly, or that are not finite; "
                "quantize the model with scales in float16, or download the file again.",
            )
        count = wide.shape[1]
        whole = _unpack(arrays[0])[:, :count], wide, _unpack(arrays[2])[:, :count]
        return [
            tuple(from_numpy(np.ascontiguousarray(array.T[selected])) for array in whole)
            for selected in rows
        ]

    def nbytes(self, shape: PackedShape) -> int:
        """Implement `WeightForm`."""
        return quantized_nbytes(shape.n, shape.k, _FORMAT, self.group_size)

    def pack(
        self, ops: Ops, parts: Sequence[Part], shape: PackedShape, out: HostTensor | None = None
    ) -> QuantizedWeight:
        """Implement `WeightForm`."""
        from octavo.kernels.base import Codes

        codes = (
            Codes(ops.to_device(codes), ops.to_device(scales), ops.to_device(zeros))
            for codes, scales, zeros in parts
        )
        return ops.pack_quantized(shape.n, shape.k, _FORMAT, self.group_size, codes, out)

    def wrap(self, data: HostTensor, shape: PackedShape) -> QuantizedWeight:
        """Implement `WeightForm`."""
        from octavo import _native
        from octavo.kernels.base import QuantizedWeight

        panel = _native.panel()
        return QuantizedWeight(data, shape.n, shape.k, _FORMAT, self.group_size, panel)


def _unpack(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return the codes [M, 8 N] in words [M, N]."""
    codes = np.empty((*words.shape, 8), np.uint8)
    for output, shift in enumerate(_SHIFTS):
        codes[..., output] = (words.view(np.uint32) >> shift) & 15
    return codes.reshape(len(words), -1)


def read_awq(config: ConfigJson) -> Groups:
    """Return the forms of an AWQ checkpoint's modules.

    Raises:
        ModelError: a field has an unsupported value.
    """
    bits = "bits" if config.has("bits") else "w_bit"
    if config.integer(bits, least=0) != 4:
        raise config.error(bits, "AWQ has 4 bits")
    size = "group_size" if config.has("group_size") else "q_group_size"
    group_size = config.integer(size, least=-1)
    if group_size not in _GROUP_SIZES:
        raise config.error(size, "supported: 32, 64, 128")
    version = config.get("version")
    if version is not None and (not isinstance(version, str) or version.lower() != "gemm"):
        raise config.error("version", "supported: gemm; convert the checkpoint to it")
    plain = config.get("modules_to_not_convert") or []
    if not isinstance(plain, list) or not all(isinstance(text, str) for text in plain):
        raise config.error("modules_to_not_convert", "it must be a list of names of modules")
    config.flag("zero_point", True)
    return [
        ([f"re:.*{re.escape(text)}" for text in plain], PLAIN),
        (["Linear"], AWQ(group_size)),
    ]
