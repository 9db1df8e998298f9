"""GPTQ checkpoints: codes of several inputs in each 32-bit word.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Source
from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError
from octavo.quantization.base import Groups, WeightForm
from octavo.quantization.grouped import (
    Grouped,
    Numbers,
    read_group_size,
    require_groups,
    sort_inputs,
    unpack,
)
from octavo.quantization.plain import PLAIN


@dataclass(frozen=True)
class GPTQ(Grouped):
    """Weights scale * (code - zero)."""

    minus_one: bool = True
    """True if the stored zeros are one less than the zeros."""

    method: ClassVar[str] = "gptq"
    num_tensors: ClassVar[int] = 4

    @property
    def name(self) -> str:
        """Implement `WeightForm`."""
        return f"{super().name}{'' if self.minus_one else '-v2'}"

    def sources(self, module: str, rows: int, inputs: int) -> tuple[Source, ...]:
        """Implement `WeightForm`.

        Raises:
            ModelError: words do not divide the inputs.
        """
        each, groups = 32 // self.bits, self.groups(inputs)
        if inputs % each:
            raise ModelError(
                f"{module}.qweight has {inputs} inputs, which words of {each} codes do not divide. "
                "Download the model again."
            )
        return (
            Source(f"{module}.qweight", (inputs // each, rows), dtypes=("int32",)),
            Source(f"{module}.scales", (groups, rows)),
            Source(f"{module}.qzeros", (groups, -(-rows // each)), dtypes=("int32",)),
            Source(f"{module}.g_idx", (inputs,), dtypes=("int32", "int64"), optional=True),
        )

    def read(self, tensors: Sequence[NDArray[Any]]) -> Numbers:
        """Implement `Grouped`."""
        qweight, scales, qzeros, g_idx = tensors
        codes, order = unpack(qweight.T, self.bits), None
        if self.ordered:
            order = sort_inputs(g_idx, self.group_size, "g_idx")
            codes = codes.take(order, 1)
        else:
            require_groups(g_idx, self.group_size, "g_idx")
        words = qzeros.view(np.uint32)
        if self.minus_one:  # words, not codes, had been decremented: a zero of 0 borrows
            words = words + np.uint32(sum(1 << bit for bit in range(0, 32, self.bits)))
        zeros = unpack(words.view(np.int32).T, self.bits, rows=True)[: scales.shape[1]]
        return Numbers(codes, scales.T, zeros, order)


def read_gptq(config: ConfigJson) -> Groups:
    """Return the forms of a GPTQ checkpoint's modules.

    Raises:
        ModelError: a field has an unsupported value.
    """
    layout = "checkpoint_format" if config.has("checkpoint_format") else "format"
    minus_one = config.choice(layout, {"gptq": "v1", "gptq_v2": "v2"}, "gptq") == "v1"
    config.refuse("is_marlin_format", False, "convert the checkpoint to checkpoint_format gptq")
    config.refuse("pack_dtype", "int32", "convert the checkpoint to int32")
    quantized = ["Linear"]
    groups: list[tuple[list[str], WeightForm]] = []
    if config.flag("lm_head", False):
        quantized.append("LMHead")
    else:
        groups.append((["LMHead"], PLAIN))
    dynamic = config.section("dynamic")
    for pattern in dynamic.names():
        own = dynamic.section(pattern)
        form = PLAIN if pattern.startswith("-:") else read_form(own.filled_from(config), minus_one)
        groups.append(([f"re:{re.sub('^[-+]:', '', pattern)}"], form))
    if config.has("modules_in_block_to_quantize"):
        quantized = _modules(config, "modules_in_block_to_quantize")
    return [*groups, (quantized, read_form(config, minus_one))]


def read_form(config: ConfigJson, minus_one: bool) -> GPTQ:
    """Return the form that the fields of a description state.

    Args:
        config: the description.
        minus_one: True if the stored zeros are one less than the zeros.

    Raises:
        ModelError: a field has an unsupported value.
    """
    bits = config.integer("bits")
    if bits not in (4, 8):
        raise config.error("bits", "supported: 4, 8")
    group_size = read_group_size(config, "group_size")
    ordered = config.flag("desc_act", False) and group_size > 0
    return GPTQ(group_size, config.flag("sym", True), bits, ordered, minus_one)


def _modules(config: ConfigJson, field: str) -> list[str]:
    """Return the names in a list of lists."""
    lists = config.get(field)
    if not isinstance(lists, list) or not all(isinstance(names, list) for names in lists):
        raise config.error(field, "it must be a list of lists of names of modules")
    names = [name for names in lists for name in names]
    if not all(isinstance(name, str) for name in names):
        raise config.error(field, "it must be a list of lists of names of modules")
    return names
