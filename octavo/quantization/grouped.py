"""Common part of checkpoints with integer codes: one scale for each output and group of inputs.

Codes, zero points and scales are kept exactly; activations have 8 bits, as with int4.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Source
from octavo.checkpoints.config_json import ConfigJson
from octavo.quantization.base import IntArray, PackedShape, Part, TensorError
from octavo.quantization.packed import Packed

if TYPE_CHECKING:
    from octavo.kernels.base import Ops
    from octavo.kernels.weights import Codes, QuantFormat, QuantizedWeight
    from octavo.system.tensor import HostTensor

_KERNEL_GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class Numbers:
    """Numbers of a module."""

    codes: NDArray[np.uint8]
    """[outputs, inputs]."""
    scales: NDArray[Any]
    """[outputs, groups], of any floating type."""
    zeros: NDArray[np.uint8] | None = None
    """[outputs, groups]; None: all are half the number of codes."""
    order: NDArray[np.int32] | None = None
    """[inputs]: the inputs, group by group; None: groups are consecutive inputs."""


@dataclass(frozen=True)
class Grouped(Packed):
    """Weights scale * (code - zero).

    A part has codes, scales, then zeros unless the form is symmetric, then the order of inputs if
    the form is ordered.
    """

    group_size: int
    """Number of inputs that share a scale; 0: all."""
    symmetric: bool
    """True if all zeros are half the number of codes."""
    bits: int = 4
    """Bits of a code: 4 or 8."""
    ordered: bool = False
    """True if groups are not consecutive inputs (act-order)."""

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
        more = ("" if self.symmetric else "-zeros") + ("-ordered" if self.ordered else "")
        return f"{self.method}-{self.bits}-{self.group_size}{more}"

    @property
    @abstractmethod
    def num_tensors(self) -> int:
        """Implement `WeightForm`."""

    @abstractmethod
    def sources(self, module: str, rows: int, inputs: int) -> tuple[Source, ...]:
        """Implement `WeightForm`."""

    @abstractmethod
    def read(self, tensors: Sequence[NDArray[Any]]) -> Numbers:
        """Return the numbers in the tensors of `sources`; an order if the form is ordered.

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
        codes, scales, zeros = numbers.codes, self._check_scales(numbers.scales), numbers.zeros
        half = 2 ** (self.bits - 1)
        if self.symmetric and zeros is not None:
            if (zeros != half).any():
                raise TensorError(
                    self.zeros,
                    f"has other zero points than {half}, but the config says that weights are "
                    "symmetric; correct its field, or download the model again.",
                )
            zeros = None
        if columns is not None:
            groups = self._cut_groups(*columns, codes.shape[1])
            codes, scales = codes[:, slice(*columns)], scales[:, groups]
            zeros = None if zeros is None else zeros[:, groups]
        whole = [array for array in (codes, scales, zeros) if array is not None]
        order = () if numbers.order is None else (from_numpy(numbers.order),)
        return [
            (*(from_numpy(np.ascontiguousarray(array[selected])) for array in whole), *order)
            for selected in rows
        ]

    def _check_scales(self, scales: NDArray[Any]) -> NDArray[np.float32]:
        """Return scales in float32.

        Raises:
            TensorError: the kernel cannot hold some of them exactly, or they are not finite.
        """
        wide: NDArray[np.float32] = scales.astype(np.float32)
        if not np.isfinite(wide).all():
            raise TensorError(
                self.scales, "has numbers that are not finite; download the file again."
            )
        with np.errstate(all="ignore"):
            exact = (wide.astype(np.float16).astype(np.float32) == wide).all()
        if not exact and self.format(wide.shape[1])[0] in ("int4", "int4_zeros"):
            raise TensorError(
                self.scales,
                "has numbers that float16 does not hold exactly; quantize the model with scales "
                "in float16.",
            )
        return wide

    def _cut_groups(self, begin: int, end: int, inputs: int) -> slice:
        """Return the groups of the inputs [begin, end).

        Raises:
            TensorError: the inputs divide a group.
        """
        if not self.group_size:
            return slice(None)
        if self.ordered:
            raise TensorError(
                "g_idx",
                "has groups of inputs from all over (act-order), which ranks cannot divide; leave "
                "out tensor_parallel_mode.",
            )
        if begin % self.group_size or (end % self.group_size and end != inputs):
            raise TensorError(
                self.scales,
                f"has groups of {self.group_size} inputs, which a part from {begin} to {end} would "
                "divide; lower tensor_parallel_size.",
            )
        return slice(begin // self.group_size, -(-end // self.group_size))

    def kernel_format(self, shape: PackedShape) -> tuple[QuantFormat, int]:
        """Implement `Packed`."""
        return self.format(shape.k)

    def pack(
        self, ops: Ops, parts: Sequence[Part], shape: PackedShape, out: HostTensor | None = None
    ) -> QuantizedWeight:
        """Implement `WeightForm`."""
        order = None
        if self.ordered:
            parts, orders = [part[:-1] for part in parts], [part[-1].numpy() for part in parts]
            order = orders[0]
            if any((other != order).any() for other in orders):
                raise TensorError(
                    "g_idx",
                    "differs from that of another module with the same inputs (q_proj, k_proj and "
                    "v_proj; gate_proj and up_proj), which is not supported; quantize the model "
                    "without act-order.",
                )
        shapes = [part[0].shape for part in parts]
        if sum(rows for rows, _ in shapes) != shape.n or any(k != shape.k for _, k in shapes):
            raise TensorError(
                "weight",
                f"or a module with the same inputs has another shape than config.json requires: "
                f"{shapes}; download the model again.",
            )
        codes = (self._codes(ops, part, shape.k) for part in parts)
        return ops.pack_quantized(shape.n, shape.k, *self.format(shape.k), codes, out, order)

    def _codes(self, ops: Ops, part: Part, k: int) -> Codes:
        """Return a part with a scale and a zero for each group of the kernel's format."""
        from octavo.kernels.weights import Codes
        from octavo.system.tensor import from_numpy

        format, group = self.format(k)
        codes, *others = part
        if format == "int8_groups" and self.symmetric:
            others.append(from_numpy(np.full(others[0].shape, 128, np.uint8)))
        if group:
            groups = -(-k // group)
            each = min(self.group_size // group, groups) if self.group_size else groups
            others = [
                from_numpy(np.ascontiguousarray(other.numpy().repeat(each, 1)[:, :groups]))
                for other in others
            ]
        return Codes(ops.to_device(codes), *map(ops.to_device, others))

    def format(self, k: int) -> tuple[QuantFormat, int]:
        """Return the kernel's format of a weight with k inputs, and its groups.

        A scale of more inputs than a group of the kernel is repeated.
        """
        size = self.group_size or k
        group = next((group for group in _KERNEL_GROUPS if size % group == 0), _KERNEL_GROUPS[-1])
        if self.bits == 8:
            return "int8_groups", group
        return "int4" if self.symmetric else "int4_zeros", group


def read_group_size(config: ConfigJson, *fields: str) -> int:
    """Return the number of inputs that share a scale; 0: all.

    Raises:
        ModelError: the kernels do not support the number.
    """
    size = config.integer(*fields, least=-1)
    if size == -1:
        return 0
    if size == 0 or size % _KERNEL_GROUPS[-1]:
        field = next(field for field in fields if config.has(field))
        raise config.error(field, "supported: multiples of 32, and -1 for all inputs")
    return size


def unpack(
    words: NDArray[np.int32], bits: int, order: Sequence[int] | None = None, *, rows: bool = False
) -> NDArray[np.uint8]:
    """Return the codes in words [M, N]: [M, 32 / bits * N], or [32 / bits * M, N] of several rows.

    Args:
        words: the words.
        bits: bits of a code.
        order: index of the code in each place of a word, from its lowest bits on; None: in order.
        rows: True if the codes of a word are of one column and several rows.
    """
    dense = np.ascontiguousarray(words).view(np.uint32)
    (m, n), count, mask = dense.shape, 32 // bits, np.uint32(2**bits - 1)
    codes = np.empty((m, count, n) if rows else (m, n, count), np.uint8)
    for place, index in enumerate(order or range(count)):
        codes[(slice(None), index) if rows else (..., index)] = dense >> (bits * place) & mask
    return codes.reshape((m * count, n) if rows else (m, n * count))


def sort_inputs(g_idx: NDArray[Any], group_size: int, name: str) -> NDArray[np.int32]:
    """Return the inputs, group by group.

    Args:
        g_idx: the group of each input.
        group_size: inputs of each group.
        name: the tensor's name, for error messages.

    Raises:
        TensorError: groups have other sizes, or the tensor is missing.
    """
    if not len(g_idx):
        raise TensorError(
            name, "is missing, but the config says act-order; download the model again."
        )
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    require_groups(g_idx[order], group_size, name)
    return order


def require_groups(g_idx: NDArray[Any], group_size: int, name: str) -> None:
    """Check that groups are consecutive inputs.

    Raises:
        TensorError: they are not.
    """
    inputs = len(g_idx)
    if (g_idx != np.arange(inputs) // (group_size or inputs)).any():
        raise TensorError(
            name,
            f"contradicts groups of {group_size or inputs} inputs, or the config does not say "
            "act-order; correct its fields, or download the model again.",
        )
