"""BitNet's weights: -1, 0 or 1, times one scale for each module (Ma et al., arXiv 2402.17764).

In memory they are weights of 8 bits with these codes, exactly. Activations have 8 bits and one
scale for each token, as in BitNet's training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Source
from octavo.checkpoints.config_json import ConfigJson
from octavo.quantization.base import Groups, IntArray, PackedShape, Part, TensorError
from octavo.quantization.packed import PackedCodes

if TYPE_CHECKING:
    from octavo.system.tensor import HostTensor

_ZERO = 128
"""Code of zero in the format."""


@dataclass(frozen=True)
class BitNet(PackedCodes):
    """Ternary weights."""

    kind: Literal["factor", "divisor", "floats"]
    """Contents of the checkpoint. factor, divisor: four codes in each byte, and a number by which
    the codes are multiplied or divided. floats: weights that are rounded here."""
    max_inputs: ClassVar[int | None] = 2**17

    @property
    def name(self) -> str:
        """Implement `WeightForm`."""
        return f"bitnet-{self.kind}"

    @property
    def num_tensors(self) -> int:
        """Implement `WeightForm`."""
        return 1 if self.kind == "floats" else 2

    def sources(self, module: str, rows: int, inputs: int) -> tuple[Source, ...]:
        """Implement `WeightForm`."""
        if self.kind == "floats":
            return (Source(f"{module}.weight", (rows, inputs)),)
        return (
            Source(f"{module}.weight", (-(-rows // 4), inputs), dtypes=("uint8",)),
            Source(f"{module}.weight_scale", (1,)),
        )

    def cut(
        self,
        tensors: Sequence[HostTensor],
        rows: Sequence[slice | IntArray],
        columns: tuple[int, int] | None,
    ) -> list[Part]:
        """Implement `WeightForm`; a part has codes and a scale for each output."""
        from octavo.system.tensor import dense, from_numpy

        if self.kind == "floats":
            codes, scale = _round(dense(tensors[0], "float32").numpy())
        else:
            codes = _unpack(tensors[0].numpy())
            stored = scale = dense(tensors[1], "float32").numpy()[0]
            with np.errstate(divide="ignore", over="ignore"):
                if self.kind == "divisor":
                    scale = np.float32(1) / stored
            if not np.isfinite([stored, scale]).all() or stored <= 0:
                raise TensorError("weight_scale", f"is {stored}; download the file again.")
        if columns is not None:
            codes = codes[:, slice(*columns)]
        parts = [np.ascontiguousarray(codes[selected]) for selected in rows]
        return [
            (from_numpy(part), from_numpy(np.full((len(part), 1), scale, np.float32)))
            for part in parts
        ]

    def kernel_format(self, shape: PackedShape) -> tuple[Literal["int8"], int]:
        """Implement `Packed`."""
        return "int8", 0


def _unpack(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the codes of outputs [4 N, K] in bytes [N, K], the first N in the lowest bits."""
    codes = np.concatenate([packed >> shift & 3 for shift in (0, 2, 4, 6)])
    if (codes == 3).any():
        raise TensorError("weight", "has codes that are not -1, 0 or 1; download the file again.")
    codes += _ZERO - 1
    return codes


def _round(weight: NDArray[np.float32]) -> tuple[NDArray[np.uint8], float]:
    """Return the codes, and the mean magnitude, which is their scale."""
    with np.errstate(invalid="ignore"):
        scale = max(float(np.abs(weight).mean(dtype=np.float64)), 1e-5)
    if not np.isfinite(scale):
        raise TensorError("weight", "has numbers that are not finite; download the file again.")
    return (np.clip(np.rint(weight / np.float32(scale)), -1, 1) + _ZERO).astype(np.uint8), scale


def read_bitnet(config: ConfigJson) -> Groups:
    """Return the forms of a BitNet checkpoint's modules.

    Raises:
        ModelError: a field has an unsupported value.
    """
    config.refuse("use_rms_norm", False, "norms within linear layers are not supported")
    kinds: dict[str, Literal["factor", "divisor"]] = {
        "bitlinear": "divisor",
        "autobitlinear": "factor",
    }
    kind = config.choice("linear_class", kinds, "bitlinear")
    mode = config.choice("quantization_mode", {"offline": "offline", "online": "online"}, "offline")
    return [(["Linear"], BitNet("floats" if (mode, kind) == ("online", "factor") else kind))]
