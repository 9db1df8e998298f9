"""Common part of checkpoints with integer codes: one scale for each output and group of inputs.

Codes, zero points and scales are kept exactly; activations have 8 bits, as with int4.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Source
from octavo.checkpoints.config_json import ConfigJson
from octavo.kernels.sizes import quantized_nbytes
from octavo.quantization.base import IntArray, PackedShape, Part, TensorError

if TYPE_CHECKING:
    from octavo.kernels.base import Ops, QuantFormat, QuantizedWeight
    from octavo.system.tensor import HostTensor

_KERNEL_GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class Numbers:
    """Numbers of a module."""

    codes: NDArray[np.uint8]
    """[outputs, inputs]."""
    scales: NDArray[Any]
    """[outputs, groups], of any floating type."""
    zeros: NDArray[np.uint8] | None
    """[outputs, groups]; None: all are half the number of codes."""


@dataclass(frozen=True)
class Grouped(ABC):
    """Weights scale * (code - zero); a part has codes, scales and zeros."""

    group_size: int
    """Number of inputs that share a scale; 0: all."""
    symmetric: bool
    """True if all zeros are half the number of codes."""

    max_inputs: ClassVar[int | None] = 2**17
    method: ClassVar[str]
    """Name of the method."""
    scales: ClassVar[str] = "scales"
    """Last part of the name of the tensor of scales."""
    zeros: ClassVar[str] = "qzeros"
    """Last part of the name of the tensor of zeros."""

    @property
    def name(self) -> str:
        """Implement `WeightForm`."""
        return f"{self.method}-{self.group_size}{'' if self.symmetric else '-zeros'}"

    @property
    @abstractmethod
    def num_tensors(self) -> int:
        """Implement `WeightForm`."""

    @abstractmethod
    def sources(self, module: str, rows: int, inputs: int) -> tuple[Source, ...]:
        """Implement `WeightForm`."""

    @abstractmethod
    def read(self, tensors: Sequence[NDArray[Any]]) -> Numbers:
        """Return the numbers in the tensors of `sources`.

        Raises:
            TensorError: the numbers of a tensor are impossible.
        """

    def groups(self, inputs: int) -> int:
        """Return the number of groups of a row."""
        return -(-inputs // self.group_size) if self.group_size else 1

    def cut(
        self,
        tensors: Sequence[HostTensor],
        rows: Sequence[slice | IntArray],
        columns: tuple[int, int] | None,
    ) -> list[Part]:
        """Implement `WeightForm`."""
        from octavo.system.tensor import from_numpy

        numbers = self.read([tensor.numpy() for tensor in tensors])
        codes, scales, zeros = numbers.codes, _exact(numbers.scales, self.scales), numbers.zeros
        if self.symmetric and zeros is not None:
            if (zeros != 8).any():
                raise TensorError(
                    self.zeros,
                    "has other zero points than 8, but the config says that weights are "
                    "symmetric; correct its field, or download the model again.",
                )
            zeros = None
        if columns is not None:
            begin, end = columns
            codes = codes[:, begin:end]
            if self.group_size:
                groups = self._cut_groups(begin, end, numbers.codes.shape[1])
                scales, zeros = scales[:, groups], None if zeros is None else zeros[:, groups]
        whole: list[NDArray[Any]] = [codes, scales] if zeros is None else [codes, scales, zeros]
        return [
            tuple(from_numpy(np.ascontiguousarray(array[selected])) for array in whole)
            for selected in rows
        ]

    def _cut_groups(self, begin: int, end: int, inputs: int) -> slice:
        if begin % self.group_size or (end % self.group_size and end != inputs):
            raise TensorError(
                self.scales,
                f"has groups of {self.group_size} inputs, which a part from {begin} to {end} would "
                "divide; lower tensor_parallel_size.",
            )
        return slice(begin // self.group_size, -(-end // self.group_size))

    def nbytes(self, shape: PackedShape) -> int:
        """Implement `WeightForm`."""
        return quantized_nbytes(shape.n, shape.k, *self._format(shape.k))

    def pack(
        self, ops: Ops, parts: Sequence[Part], shape: PackedShape, out: HostTensor | None = None
    ) -> QuantizedWeight:
        """Implement `WeightForm`."""
        from octavo.kernels.base import Codes
        from octavo.system.tensor import from_numpy

        format, group = self._format(shape.k)
        groups = -(-shape.k // group)
        each = self.group_size // group if self.group_size else groups

        def spread(tensor: HostTensor) -> HostTensor:
            """Return a scale or zero for each group of the kernel."""
            if each == 1:
                return tensor
            return from_numpy(np.ascontiguousarray(tensor.numpy().repeat(each, 1)[:, :groups]))

        codes = (
            Codes(ops.to_device(codes), *(ops.to_device(spread(tensor)) for tensor in others))
            for codes, *others in parts
        )
        return ops.pack_quantized(shape.n, shape.k, format, group, codes, out)

    def wrap(self, data: HostTensor, shape: PackedShape) -> QuantizedWeight:
        """Implement `WeightForm`."""
        from octavo import _native
        from octavo.kernels.base import QuantizedWeight

        format, group = self._format(shape.k)
        return QuantizedWeight(data, shape.n, shape.k, format, group, _native.panel())

    def _format(self, k: int) -> tuple[QuantFormat, int]:
        """Return the kernel's format of a weight with k inputs, and its groups."""
        size = self.group_size or k
        group = next((group for group in _KERNEL_GROUPS if size % group == 0), _KERNEL_GROUPS[-1])
        return "int4" if self.symmetric else "int4_zeros", group


def read_group_size(config: ConfigJson, field: str) -> int:
    """Return the number of inputs that share a scale; 0: all.

    Raises:
        ModelError: the kernels do not support the number.
    """
    size = config.integer(field, least=-1)
    if size == -1:
        return 0
    if size == 0 or size % _KERNEL_GROUPS[-1]:
        raise config.error(field, "supported: multiples of 32, and -1 for all inputs")
    return size


def unpack(
    words: NDArray[np.int32], bits: int, order: Sequence[int] | None = None
) -> NDArray[np.uint8]:
    """Return the codes [M, 32 / bits * N] in words [M, N].

    Args:
        words: the words.
        bits: bits of a code.
        order: index of the code in each place of a word, from its lowest bits on; None: in order.
    """
    count = 32 // bits
    codes = np.empty((*words.shape, count), np.uint8)
    for place, index in enumerate(order or range(count)):
        codes[..., index] = (words.view(np.uint32) >> np.uint32(bits * place)) & (2**bits - 1)
    return codes.reshape(len(words), -1)


def _exact(scales: NDArray[Any], name: str) -> NDArray[np.float32]:
    """Return scales in float32.

    Raises:
        TensorError: float16 does not hold some of them, or they are not finite.
    """
    wide: NDArray[np.float32] = scales.astype(np.float32)
    with np.errstate(all="ignore"):
        exact = wide.astype(np.float16).astype(np.float32) == wide
    if not (exact & np.isfinite(wide)).all():
        raise TensorError(
            name,
            "has numbers that float16 does not hold exactly, or that are not finite; "
            "quantize the model with scales in float16, or download the file again.",
        )
    return wide
