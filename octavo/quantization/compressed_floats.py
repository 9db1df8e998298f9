"""Weights of compressed-tensors that are floats of 8 and 4 bits."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.quantization.base import WeightForm
from octavo.quantization.fp4 import FP4
from octavo.quantization.fp8 import FP8, read_block

_FP4 = {
    "nvfp4-pack-quantized": FP4("nvfp4", factor="weight_global_scale", divides=True),
    "mxfp4-pack-quantized": FP4("mxfp4"),
}
"""Forms of the formats of 4 bits."""
_FORMATS = {8: ("float-quantized", "naive-quantized", "mxfp8-quantized"), 4: tuple(_FP4)}
"""Formats by the number of bits."""
_STRATEGIES = {name: name for name in ("tensor", "channel", "block", "group")}


def read_floats(scheme: ConfigJson, format: str) -> WeightForm:
    """Return the form of a scheme whose weights are floats; those of activations do not matter.

    Raises:
        ModelError: a field has an unsupported value.
    """
    weights = scheme.section("weights")
    bits = weights.integer("num_bits", default=8)
    if bits not in _FORMATS:
        raise weights.error("num_bits", "supported for floats: 4, 8")
    if format not in _FORMATS[bits]:
        known = ", ".join(_FORMATS[bits])
        raise weights.error(
            "num_bits", f"floats of {bits} bits have the format {known}, not {format!r:.100}"
        )
    weights.refuse("symmetric", True, "floats have no zero points")
    weights.refuse("dynamic", False, "weights cannot be dynamic")
    if bits == 4:
        form = _FP4[format]
        reason = f"the format {format} has groups of {form.group_size}"
        weights.refuse("group_size", form.group_size, reason)
        return form
    strategy = weights.choice("strategy", _STRATEGIES)
    if strategy == "block":
        return FP8(read_block(weights, "block_structure"))
    if strategy == "group":
        group_size = weights.integer("group_size")
        if group_size % 32:
            raise weights.error("group_size", "it must be a multiple of 32")
        return FP8((1, group_size))
    return FP8()
