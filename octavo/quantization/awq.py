"""AWQ checkpoints in the gemm packing: 4-bit codes of eight outputs in each 32-bit word.

Lin et al., "AWQ: Activation-aware Weight Quantization".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.typing import NDArray

from octavo.checkpoints.base import Source
from octavo.checkpoints.config_json import ConfigJson
from octavo.quantization.base import Groups
from octavo.quantization.grouped import Grouped, Numbers, read_group_size, unpack
from octavo.quantization.plain import PLAIN

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Outputs in a word, from its lowest four bits on."""


@dataclass(frozen=True)
class AWQ(Grouped):
    """Weights scale * (code - zero).

    A checkpoint without zero points stores them, too: they are all 8.
    """

    symmetric: bool = False

    method: ClassVar[str] = "awq"
    num_tensors: ClassVar[int] = 3

    def sources(self, module: str, rows: int, inputs: int) -> tuple[Source, ...]:
        """Implement `WeightForm`."""
        groups, words = self.groups(inputs), -(-rows // 8)
        return (
            Source(f"{module}.qweight", (inputs, words), dtypes=("int32",)),
            Source(f"{module}.scales", (groups, rows)),
            Source(f"{module}.qzeros", (groups, words), dtypes=("int32",)),
        )

    def read(self, tensors: Sequence[NDArray[Any]]) -> Numbers:
        """Implement `Grouped`."""
        qweight, scales, qzeros = tensors
        rows = scales.shape[1]
        codes, zeros = (unpack(t.T, 4, _ORDER, rows=True)[:rows] for t in (qweight, qzeros))
        return Numbers(codes, scales.T, zeros)


def read_awq(config: ConfigJson) -> Groups:
    """Return the forms of an AWQ checkpoint's modules.

    Raises:
        ModelError: a field has an unsupported value.
    """
    version = config.get("version")
    if version is not None and (not isinstance(version, str) or version.lower() != "gemm"):
        raise config.error("version", "supported: gemm; convert the checkpoint to it")
    plain = config.get("modules_to_not_convert") or []
    if not isinstance(plain, list) or not all(isinstance(text, str) for text in plain):
        raise config.error("modules_to_not_convert", "it must be a list of names of modules")
    config.flag("zero_point", True)
    return [
        ([_to_pattern(text) for text in plain], PLAIN),
        (["Linear"], read_form(config)),
    ]


def _to_pattern(text: str) -> str:
    """Return the regular expression for the names that contain a text.

    The text must begin before an expert's number. A text that ends in "gate" must also end a part
    of the name, since it stands for the router, not for projections such as gate_proj.
    """
    text = re.escape(text) + (r"(?!\w)" if text.endswith("gate") else "")
    return rf"re:(?!.*experts\.\d).*{text}|.*(?={text}).*experts\.\d"


def read_form(config: ConfigJson) -> AWQ:
    """Return the form that the fields of a description state.

    Raises:
        ModelError: a field has an unsupported value.
    """
    if config.integer("bits", "w_bit", least=0) != 4:
        raise config.error("bits" if config.has("bits") else "w_bit", "AWQ has 4 bits")
    return AWQ(read_group_size(config, "group_size", "q_group_size"))
