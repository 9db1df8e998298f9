"""Checkpoints of NVIDIA's Model Optimizer: FP8 with a scale for each tensor, and NVFP4."""

from __future__ import annotations

import re

from octavo.checkpoints.config_json import ConfigJson
from octavo.quantization.base import Groups, WeightForm
from octavo.quantization.fp4 import FP4
from octavo.quantization.fp8 import FP8
from octavo.quantization.plain import PLAIN

_FORMS: dict[str, WeightForm] = {
    "FP8": FP8(),
    "NVFP4": FP4("nvfp4", codes="weight", factor="weight_scale_2"),
}
_LEFT_OUT = ("ignore", "exclude_modules")
"""Fields that list modules without quantization; * matches any text."""


def read_modelopt(config: ConfigJson) -> Groups:
    """Return the forms of a checkpoint's modules with `quant_method` modelopt.

    Raises:
        ModelError: a field has an unsupported value.
    """
    names = {name: name for name in _FORMS}
    form = _FORMS[config.choice("quant_algo", names)]
    plain = []
    for field in _LEFT_OUT:
        patterns = config.get(field) or []
        if not isinstance(patterns, list) or not all(isinstance(text, str) for text in patterns):
            raise config.error(field, "it must be a list of names of modules")
        plain += [_to_pattern(text) if "*" in text else text for text in patterns]
    return [(plain, PLAIN), (["Linear"], form)]


def _to_pattern(text: str) -> str:
    """Return the regular expression for a name in which * matches any text."""
    return "re:" + ".*".join(map(re.escape, text.split("*"))) + "$"
