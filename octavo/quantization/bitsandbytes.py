"""Checkpoints of bitsandbytes, with 8 bits and with the 4 bits of NF4.

Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale" and "QLoRA:
Efficient Finetuning of Quantized LLMs".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Source
from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError
from octavo.kernels.dequantize import NF4_LEVELS
from octavo.quantization.base import Groups, TensorError, WeightForm
from octavo.quantization.grouped import Grouped, Numbers
from octavo.quantization.plain import PLAIN

if TYPE_CHECKING:
    from octavo.kernels.weights import QuantFormat

_BLOCK, _NESTED_BLOCK = 64, 256
"""Numbers that share a scale, and scales that share a scale."""
_MOST_STATE = 4096
"""Limit of the bytes of a description in a tensor."""


@dataclass(frozen=True)
class LLMInt8(Grouped):
    """Weights SCB / 127 * number, a scale for each output.

    LLM.int8() computes inputs with large activations in 16 bits. Here a token's activations have 8
    bits, with a scale for each 128 inputs.
    """

    group_size: int = 0
    symmetric: bool = True
    bits: int = 8

    method: ClassVar[str] = "bitsandbytes"
    scales: ClassVar[str] = "SCB"
    num_tensors: ClassVar[int] = 3

    def sources(self, module: str, rows: int, inputs: int) -> tuple[Source, ...]:
        """Implement `WeightForm`."""
        return (
            Source(f"{module}.weight", (rows, inputs), dtypes=("int8",)),
            Source(f"{module}.SCB", (rows,)),
            Source(f"{module}.weight_format", (), dtypes=("uint8",), optional=True),
        )

    def read(self, tensors: Sequence[NDArray[Any]]) -> Numbers:
        """Implement `Grouped`."""
        numbers, scb, layout = tensors
        if layout.any():
            raise TensorError(
                "weight_format", f"is {layout}; supported: 0 (rows); download the model again."
            )
        scales = scb.astype(np.float32)[:, None] / np.float32(127)
        return Numbers(numbers.view(np.uint8) ^ np.uint8(128), scales)


@dataclass(frozen=True)
class NF4(Grouped):
    """Weights absmax * level, an absmax for each output and 64 inputs; levels have 16 bits."""

    group_size: int = _BLOCK
    symmetric: bool = True
    nested: bool = False
    """True if an absmax is stored in 8 bits, with a scale for 256 of them."""

    method: ClassVar[str] = "bitsandbytes-nf4"
    scales: ClassVar[str] = "weight.absmax"

    @property
    def name(self) -> str:
        """Implement `WeightForm`."""
        return super().name + ("-nested" if self.nested else "")

    @property
    def num_tensors(self) -> int:
        """Implement `WeightForm`."""
        return 6 if self.nested else 4

    def sources(self, module: str, rows: int, inputs: int) -> tuple[Source, ...]:
        """Implement `WeightForm`.

        Raises:
            ModelError: blocks do not divide the inputs.
        """
        if inputs % _BLOCK:
            raise ModelError(
                f"{module}.weight has {inputs} inputs, which blocks of {_BLOCK} do not divide; use "
                "the unquantized model with --quantization int4."
            )
        name, blocks = f"{module}.weight", rows * inputs // _BLOCK
        scales = ("uint8",) if self.nested else ("float32",)
        sources = (
            Source(name, (rows * inputs // 2, 1), dtypes=("uint8",)),
            Source(f"{name}.absmax", (blocks,), dtypes=scales),
            Source(f"{name}.quant_map", (16,), dtypes=("float32",)),
            Source(f"{name}.quant_state.bitsandbytes__nf4", (-1,), dtypes=("uint8",)),
        )
        if not self.nested:
            return sources
        return (
            *sources,
            Source(f"{name}.nested_absmax", (-(-blocks // _NESTED_BLOCK),), dtypes=("float32",)),
            Source(f"{name}.nested_quant_map", (256,), dtypes=("float32",)),
        )

    def read(self, tensors: Sequence[NDArray[Any]]) -> Numbers:
        """Implement `Grouped`."""
        stored, absmax, levels, state, *nested = tensors
        described = _read_state(state)
        inputs = described.inputs
        if stored.size * 2 != described.rows * inputs or inputs < 1 or inputs % _BLOCK:
            raise _wrong_state("the shape is not that of the weight")
        with np.errstate(all="ignore"):
            if not np.array_equal(np.rint(levels * np.float32(32767)), NF4_LEVELS):
                raise TensorError(
                    "weight.quant_map", "does not have the levels of NF4; download the model again."
                )
            if nested:
                scales, table = nested
                for name, array in ("nested_absmax", scales), ("nested_quant_map", table):
                    if not np.isfinite(array).all():
                        raise TensorError(
                            f"weight.{name}",
                            "has numbers that are not finite; download the file again.",
                        )
                each = scales.repeat(_NESTED_BLOCK)[: len(absmax)]
                absmax = table[absmax] * each + np.float32(described.offset)
        codes = np.stack([stored[:, 0] >> 4, stored[:, 0] & 15], 1)
        return Numbers(
            codes.reshape(-1, inputs), absmax.reshape(-1, inputs // _BLOCK) / np.float32(32767)
        )

    def format(self, k: int) -> tuple[QuantFormat, int]:
        """Implement `Grouped`."""
        return "nf4", _BLOCK


@dataclass(frozen=True)
class _State:
    """Description of a weight."""

    rows: int
    inputs: int
    offset: float


def _read_state(tensor: NDArray[np.uint8]) -> _State:
    """Return the description in a tensor.

    Raises:
        TensorError: it is damaged, or not supported.
    """
    try:
        fields = json.loads(tensor[:_MOST_STATE].tobytes())
        state = ConfigJson(fields if isinstance(fields, dict) else {}, "JSON")
        state.choice("quant_type", {"nf4": "nf4"})
        if state.integer("blocksize") != _BLOCK:
            raise state.error("blocksize", f"supported: {_BLOCK}")
        if state.integer("nested_blocksize", default=_NESTED_BLOCK) != _NESTED_BLOCK:
            raise state.error("nested_blocksize", f"supported: {_NESTED_BLOCK}")
        rows, inputs = state.numbers("shape", 2)
        return _State(int(rows), int(inputs), state.number("nested_offset", default=0.0))
    except (ValueError, RecursionError, ModelError) as error:
        raise _wrong_state(str(error)) from None


def _wrong_state(reason: str) -> TensorError:
    return TensorError(
        "weight.quant_state.bitsandbytes__nf4",
        f"is damaged or not supported ({reason}); download the model again.",
    )


def read_bitsandbytes(config: ConfigJson) -> Groups:
    """Return the forms of a checkpoint's modules.

    Without a list of plain modules, the LM head is plain.

    Raises:
        ModelError: a field has an unsupported value.
    """
    plain = config.get("llm_int8_skip_modules")
    if plain is None:
        plain = ["LMHead"]
    elif not isinstance(plain, list) or not all(isinstance(text, str) for text in plain):
        raise config.error("llm_int8_skip_modules", "it must be a list of names of modules")
    form: WeightForm = LLMInt8()
    if config.flag("load_in_4bit", False):
        config.choice("bnb_4bit_quant_type", {"nf4": "nf4"}, "fp4")
        config.refuse("bnb_4bit_quant_storage", "uint8", "save the model with uint8")
        form = NF4(nested=config.flag("bnb_4bit_use_double_quant", False))
    elif not config.flag("load_in_8bit", False):
        raise config.error("load_in_8bit", "this or load_in_4bit must be true")
    return [(plain, PLAIN), (["Linear", "LMHead"], form)]
