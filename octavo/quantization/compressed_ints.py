"""Integer weights of compressed-tensors: packed in 32-bit words, or one in each byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Source
from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError
from octavo.quantization.base import TensorError
from octavo.quantization.grouped import Grouped, Numbers, read_group_size, sort_inputs, unpack

if TYPE_CHECKING:
    from octavo.kernels.weights import QuantFormat

_PACKED = {"pack-quantized": True, "int-quantized": False, "naive-quantized": False}
"""Formats; True if the codes are packed."""
_ORDERS = {"weight": False, "static": False, "group": True, "dynamic": True}
"""Values of actorder; True if groups are not consecutive inputs."""


@dataclass(frozen=True)
class CompressedInts(Grouped):
    """Weights scale * (code - zero); the format's signed numbers are codes minus half."""

    packed: bool = True
    """True if the codes are packed in words."""
    per_token: bool = False
    """True if a token's activations have one scale: with 8 bits and one scale for each output."""

    method: ClassVar[str] = "compressed-tensors"
    scales: ClassVar[str] = "weight_scale"
    zeros: ClassVar[str] = "weight_zero_point"

    @property
    def name(self) -> str:
        """Implement `WeightForm`."""
        return super().name + ("-packed" if self.packed else "") + "-token" * self.per_token

    @property
    def num_tensors(self) -> int:
        """Implement `WeightForm`."""
        return 2 + self.packed + (not self.symmetric) + self.ordered

    def sources(self, module: str, rows: int, inputs: int) -> tuple[Source, ...]:
        """Implement `WeightForm`.

        Raises:
            ModelError: words do not divide the inputs.
        """
        each, groups = 32 // self.bits, self.groups(inputs)
        sources = [Source(f"{module}.weight_scale", (rows, groups))]
        if not self.packed:
            sources.append(Source(f"{module}.weight", (rows, inputs), dtypes=("int8",)))
            if not self.symmetric:
                zeros = Source(f"{module}.weight_zero_point", (rows, groups), dtypes=("int8",))
                sources.append(zeros)
            return tuple(sources)
        if inputs % each:
            raise ModelError(
                f"{module}.weight_packed has {inputs} inputs, which words of {each} codes do not "
                "divide. Download the model again."
            )
        words, integers = ("int32",), ("int64", "int32")
        sources += [
            Source(f"{module}.weight_packed", (rows, inputs // each), dtypes=words),
            Source(f"{module}.weight_shape", (2,), dtypes=integers),
        ]
        if not self.symmetric:
            shape = -(-rows // each), groups
            sources.append(Source(f"{module}.weight_zero_point", shape, dtypes=words))
        if self.ordered:
            sources.append(Source(f"{module}.weight_g_idx", (inputs,), dtypes=integers))
        return tuple(sources)

    def read(self, tensors: Sequence[NDArray[Any]]) -> Numbers:
        """Implement `Grouped`."""
        scales, stored, *others = tensors
        if not self.packed:
            zeros = None if self.symmetric else self._codes_of(others[0], self.zeros)
            return Numbers(self._codes_of(stored, "weight"), scales, zeros)
        shape, *others = others
        codes = unpack(stored, self.bits)
        if tuple(shape) != codes.shape:
            raise TensorError(
                "weight_shape",
                f"is {shape.tolist()}, not {list(codes.shape)}; download the model again.",
            )
        zeros = order = None
        if not self.symmetric:
            words, *others = others
            zeros = unpack(words, self.bits, rows=True)[: len(scales)]
        if self.ordered:
            order = sort_inputs(others[0], self.group_size, "weight_g_idx")
            codes = codes.take(order, 1)
        return Numbers(codes, scales, zeros, order)

    def _codes_of(self, numbers: NDArray[np.int8], tensor: str) -> NDArray[np.uint8]:
        """Return the codes of signed numbers.

        Args:
            numbers: the numbers.
            tensor: last part of their tensor's name, for error messages.

        Raises:
            TensorError: a number has too many bits.
        """
        half = 2 ** (self.bits - 1)
        if (numbers < -half).any() or (numbers >= half).any():
            raise TensorError(
                tensor, f"has numbers of more than {self.bits} bits; download the model again."
            )
        return (numbers.view(np.uint8) + np.uint8(half)) & np.uint8(2 * half - 1)

    def format(self, k: int) -> tuple[QuantFormat, int]:
        """Implement `Grouped`."""
        return ("int8", 0) if self.per_token else super().format(k)


def read_ints(scheme: ConfigJson, format: str) -> CompressedInts:
    """Return the form of a scheme with integer weights.

    Raises:
        ModelError: a field has an unsupported value.
    """
    weights = scheme.section("weights")
    if format not in _PACKED:
        raise scheme.error("format", "supported for integers: " + ", ".join(_PACKED))
    bits = weights.integer("num_bits", default=8)
    if bits not in (4, 8):
        raise weights.error("num_bits", "supported: 4, 8")
    strategies = {"group": "group", "channel": "channel"}
    grouped = weights.choice("strategy", strategies, "group") == "group"
    group_size = read_group_size(weights, "group_size") if grouped else 0
    weights.refuse("dynamic", False, "weights cannot be dynamic")
    order = weights.get("actorder")
    if order not in (None, False) and (not isinstance(order, str) or order not in _ORDERS):
        raise weights.error("actorder", "supported: " + ", ".join(_ORDERS))
    ordered = _ORDERS[order] if isinstance(order, str) and group_size else False
    symmetric, packed = weights.flag("symmetric", True), _PACKED[format]
    if ordered and not packed:
        raise weights.error("actorder", f"{format} has no order of inputs")
    per_token = _has_activations(scheme) and bits == 8 and symmetric and not group_size
    return CompressedInts(group_size, symmetric, bits, ordered, packed, per_token)


def _has_activations(scheme: ConfigJson) -> bool:
    """Return True if the activations are 8-bit integers.

    Octavo computes their scales itself, for each token, so the description's only need be dynamic.

    Raises:
        ModelError: other activations are not supported.
    """
    activations = scheme.section("input_activations")
    if not activations.names():
        return False
    activations.choice("type", {"int": "int"}, "int")
    if activations.integer("num_bits", default=8) != 8:
        raise activations.error("num_bits", "supported: 8")
    if not activations.flag("dynamic", False):
        raise activations.error("dynamic", "quantize the model with dynamic activations")
    return True
