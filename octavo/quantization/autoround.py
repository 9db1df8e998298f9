"""AutoRound's checkpoints, which have the tensors of GPTQ or AWQ.

Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs".
"""

from __future__ import annotations

import re

from octavo.checkpoints.config_json import ConfigJson
from octavo.quantization.awq import read_form as read_awq_form
from octavo.quantization.base import Groups, WeightForm
from octavo.quantization.gptq import read_form as read_gptq_form
from octavo.quantization.plain import PLAIN

_PACKINGS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round": "gptq_v2",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}
_PLAIN_BITS = (16, 32)


def read_autoround(config: ConfigJson) -> Groups:
    """Return the forms of an AutoRound checkpoint's modules.

    `block_name_to_quantize` is not needed: all linear modules of a decoder are in its blocks.

    Raises:
        ModelError: a field has an unsupported value.
    """
    own = config.section("extra_config")
    exact, patterns = [], []
    for name in own.names():
        form = _read_form(own.section(name).filled_from(config))
        if re.search(r"[*+?^$()\[\]{}|\\]", name):
            patterns.append(([f"re:.*(?:{name})"], form))
        else:
            exact.append(([name], form))
    return [*exact, *patterns, (["Linear"], _read_form(config))]


def _read_form(config: ConfigJson) -> WeightForm:
    if config.integer("bits") in _PLAIN_BITS:
        return PLAIN
    config.choice("data_type", {"int": "int"}, "int")
    config.refuse("act_bits", 16, "supported: 16, activations without quantization")
    packing = config.choice("packing_format", _PACKINGS, "auto_round:auto_gptq")
    if packing == "awq":
        return read_awq_form(config)
    return read_gptq_form(config, packing == "gptq")
