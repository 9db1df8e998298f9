"""Checkpoints of compressed-tensors: schemes of weights for groups of modules."""

from __future__ import annotations

from collections.abc import Callable

from octavo.checkpoints.config_json import ConfigJson
from octavo.quantization.base import Groups, WeightForm
from octavo.quantization.compressed_floats import read_floats
from octavo.quantization.compressed_ints import read_ints

Read = Callable[[ConfigJson, str], WeightForm]
READERS: dict[str, Read] = {"int": read_ints, "float": read_floats}
"""Readers of a scheme, by the type of its weights. They receive the scheme (`weights`,
`input_activations`) and the format of its tensors."""
_TYPES = {name: name for name in READERS}


def read_compressed_tensors(config: ConfigJson) -> Groups:
    """Return the forms of a checkpoint's modules.

    Names of modules come before regular expressions, and these before classes, as in the library.

    Raises:
        ModelError: a field has an unsupported value.
    """
    _refuse_others(config)
    schemes = config.section("config_groups")
    if not schemes.names():
        raise config.error("config_groups", "it must have the scheme of at least one group")
    exact: list[tuple[list[str], WeightForm]] = []
    patterns, classes = list(exact), list(exact)
    for name in schemes.names():
        scheme = schemes.section(name)
        form = _read_scheme(scheme, scheme.get("format") or config.get("format"))
        for target in _targets(scheme):
            if target == "Linear":
                classes.append((["Linear", "LMHead"], form))
            elif target.startswith("re:"):
                patterns.append(([target], form))
            else:
                exact.append(([target], form))
    return [*exact, *patterns, *classes]


def _read_scheme(scheme: ConfigJson, format: object) -> WeightForm:
    scheme.refuse("output_activations", None, "quantize the model without it")
    kind = scheme.section("weights").choice("type", _TYPES, "int")
    if not isinstance(format, str):
        raise scheme.error("format", "it must be the name of a format, such as pack-quantized")
    return READERS[kind](scheme, format)


def _targets(scheme: ConfigJson) -> list[str]:
    targets = scheme.get("targets")
    if not isinstance(targets, list) or not all(isinstance(text, str) for text in targets):
        raise scheme.error("targets", "it must be a list of names of modules")
    for text in targets:
        if text != "Linear" and text[:1].isupper():
            raise scheme.error("targets", "the only supported class of modules is Linear")
    return targets


def _refuse_others(config: ConfigJson) -> None:
    """Refuse descriptions of more than weights and activations.

    Raises:
        ModelError: there is such a description.
    """
    config.refuse(
        "kv_cache_scheme",
        None,
        "quantize the model without it, and set --kv-cache-dtype for a KV cache of 8 bits",
    )
    config.refuse("transform_config", {}, "quantize the model without transforms")
    config.refuse("quantization_status", "compressed", "save the model compressed")
    sparsity = config.section("sparsity_config")
    sparsity.refuse("format", "dense", "save the model without sparsity")
