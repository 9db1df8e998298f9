"""Checkpoints of bitsandbytes with 8 bits.

Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Source
from octavo.checkpoints.config_json import ConfigJson
from octavo.quantization.base import Groups, TensorError
from octavo.quantization.grouped import Grouped, Numbers
from octavo.quantization.plain import PLAIN


@dataclass(frozen=True)
class LLMInt8(Grouped):
    """Weights SCB / 127 * number, a scale for each output.

    A token's activations have a scale for each 128 inputs, instead of 16 bits for large ones.
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
            raise TensorError("weight_format", f"is {layout}; supported: 0, rows.")
        scales = scb.astype(np.float32)[:, None] / np.float32(127)
        return Numbers(numbers.view(np.uint8) ^ np.uint8(128), scales)


def read_bitsandbytes(config: ConfigJson) -> Groups:
    """Return the forms of a checkpoint's modules.

    Without a list of plain modules, the LM head is plain.

    Raises:
        ModelError: a field has an unsupported value.
    """
    if not config.flag("load_in_8bit", False):
        raise config.error("load_in_8bit", "it must be true")
    plain = config.get("llm_int8_skip_modules")
    if plain is None:
        plain = ["LMHead"]
    elif not isinstance(plain, list) or not all(isinstance(text, str) for text in plain):
        raise config.error("llm_int8_skip_modules", "it must be a list of names of modules")
    return [(plain, PLAIN), (["Linear", "LMHead"], LLMInt8())]
