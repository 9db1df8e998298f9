"""Choice of the form of each linear weight of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

from octavo.checkpoints.config_json import ConfigJson
from octavo.checkpoints.patterns import compile_safely
from octavo.errors import ConfigError, ModelError, reason_of
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.spec import ModelSpec
from octavo.quantization.base import WeightForm
from octavo.quantization.int8 import GroupedInt8
from octavo.quantization.plain import PLAIN
from octavo.quantization.registry import FORMS

_QUANTIZED = ("quantization_config", "compression_config")
"""Fields of config.json that describe a quantized checkpoint."""
_CLASSES = {"Linear", "LMHead"}
"""Texts that stand for all modules of a class."""
_MOST_SHOWN = 100  # characters of a pattern in an error message
_LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore")
"""Fields in a quantization description that list modules without quantization."""
_Spec = TypeVar("_Spec", bound=ModelSpec)


def assign(
    spec: _Spec, setting: str | None, config: ConfigJson, *, dequantize: bool = False
) -> _Spec:
    """Return the spec with the chosen form of each linear weight.

    Args:
        spec: the model.
        setting: the `quantization` setting: the form of all linear weights, LM head included, or
            the checkpoint's own method. None: the checkpoint decides.
        config: contents of config.json. A quantized checkpoint has a quantization_config.
        dequantize: True if quantized weights become numbers of the model's type.

    Raises:
        ConfigError: a setting contradicts the checkpoint.
        ModelError: the checkpoint's method is not supported, or its description is damaged.
    """
    name = next((name for name in _QUANTIZED if config.has(name)), None)
    if name is None:
        if dequantize:
            raise ConfigError("dequantize: the checkpoint is not quantized; leave the setting out.")
        form = FORMS.get(setting)
        if form is None:
            made = ", ".join(str(known) for known in FORMS if known is not None)
            raise ConfigError(
                f"quantization={setting}: the checkpoint is not quantized, and Octavo quantizes to "
                f"{made} only; choose one of these, or leave the setting out."
            )
        if setting == "int8" and spec.sees_all:
            form = GroupedInt8()
        return _with_forms(spec, lambda module: form, choose_exact=lambda module: PLAIN)
    return _assign_described(spec, setting, config.section(name), dequantize=dequantize)


def _assign_described(
    spec: _Spec, setting: str | None, described: ConfigJson, *, dequantize: bool
) -> _Spec:
    """Return the spec with the forms of a quantized checkpoint; see `assign`.

    Args:
        spec: the model.
        setting: the `quantization` setting.
        described: the checkpoint's description of them.
        dequantize: True if quantized weights become numbers of the model's type.
    """
    # Most checkpoints are not quantized, so a start need not wait for the readers of all methods.
    from octavo.quantization.bitnet import read_bitnet
    from octavo.quantization.dequantized import Dequantized
    from octavo.quantization.methods import METHODS, PLAIN_ROUTERS

    method = described.get("quant_method")
    read = METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        known = ", ".join(["checkpoints in float32, float16 or bfloat16", *METHODS])
        raise described.error(
            "quant_method",
            f"supported: {known}; use one of these, or the model's unquantized checkpoint with "
            "--quantization int8, int4 or fp8",
        )
    if setting is not None and METHODS.get(setting) is not read:
        raise ConfigError(
            f"quantization={setting}: the checkpoint is quantized already, by {method}; leave the "
            "setting out."
        )
    if dequantize and read is read_bitnet:
        raise ConfigError(
            "dequantize: BitNet's models are trained with activations of 8 bits; leave the setting "
            "out."
        )

    def loaded(form: WeightForm) -> WeightForm:
        return Dequantized(form) if dequantize and form != PLAIN else form

    groups = read(described)
    if isinstance(groups, Mapping):
        by_name = {module: loaded(form) for module, form in groups.items()}
        return _with_forms(spec, lambda module: by_name.get(module, PLAIN), by_name.get)
    projection = spec.head.lm_head
    lm_head = [] if projection is None else [module for module, _ in projection.modules]
    left_out = [pattern for field in _LEFT_OUT for pattern in _texts(described, field)]
    plain = _Targets(left_out, described)
    targets = [(_Targets(texts, described), loaded(form)) for texts, form in groups]
    # A model may have tens of thousands of modules: their names are divided only if lists need it.
    has_names = plain.has_names or any(target.has_names for target, _ in targets)

    def names_of(module: str) -> tuple[list[str], set[str]]:
        names = [module] + [
            stored + module.removeprefix(own)
            for own, stored in spec.prefixes
            if module.startswith(own)
        ]
        return names, {text for name in names for text in _runs(name)} if has_names else set()

    def choose(module: str) -> WeightForm:
        if spec.tied and module in lm_head:
            return PLAIN
        names, texts = names_of(module)
        texts.add("LMHead" if module in lm_head else "Linear")
        if plain.match(names, texts):
            return PLAIN
        return next((form for target, form in targets if target.match(names, texts)), PLAIN)

    def choose_router(module: str) -> WeightForm:
        """Return the form of the first target that names the router, and not its neighbors too."""
        own, neighbor = names_of(module), names_of(f"{module.rpartition('.')[0]}.up_proj")
        if plain.match(*own):
            return PLAIN
        found = (form for t, form in targets if t.match(*own) and not t.match(*neighbor))
        return next(found, PLAIN)

    return _with_forms(
        spec, choose, choose_exact=choose_router if read in PLAIN_ROUTERS else choose
    )


def without_forms(spec: _Spec) -> _Spec:
    """Return the spec, in which all weights are plain."""
    return _with_forms(spec, lambda module: PLAIN)


def quant_method(config: ConfigJson) -> str | None:
    """Return the method by which a checkpoint is quantized, from config.json; None: it is not."""
    name = next((name for name in _QUANTIZED if config.has(name)), None)
    return None if name is None else str(config.section(name).get("quant_method"))


def _texts(config: ConfigJson, field: str) -> list[str]:
    value = config.get(field) or []
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise config.error(field, "it must be a list of names of modules")
    return value


class _Targets:
    """Modules that a description names; see `Groups`.

    Args:
        texts: names, classes and regular expressions.
        config: the description, for error messages.

    Raises:
        ModelError: a regular expression is not supported.
    """

    def __init__(self, texts: Sequence[str], config: ConfigJson) -> None:
        self._texts = frozenset(texts)
        self.has_names = not self._texts <= _CLASSES
        """True if some of the texts are names of modules."""
        self._patterns = [_pattern(text, config) for text in texts if text.startswith("re:")]

    def match(self, names: Sequence[str], texts: Set[str]) -> bool:
        """Return True if the texts name a module.

        Args:
            names: the names that the module may have in a checkpoint.
            texts: all consecutive parts of these, and the module's class.
        """
        if not self._texts.isdisjoint(texts):
            return True
        return any(pattern.match(name) for pattern in self._patterns for name in names)


def _runs(name: str) -> Iterator[str]:
    """Yield all consecutive parts of a name, joined."""
    parts = name.split(".")
    for begin in range(len(parts)):
        yield from accumulate(parts[begin:], "{}.{}".format)


def _pattern(text: str, config: ConfigJson) -> re.Pattern[str]:
    """Return a compiled regular expression, without re:.

    Raises:
        ModelError: it is not supported.
    """
    try:
        return compile_safely(text.removeprefix("re:"))
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(
            f"{config.where}: {text[:_MOST_SHOWN]!r} is not a regular expression that Octavo "
            f"supports ({reason_of(error)}); name the modules instead."
        ) from None


def _with_forms(
    spec: _Spec,
    choose: Callable[[str], WeightForm],
    choose_table: Callable[[str], WeightForm | None] = lambda module: None,
    *,
    choose_exact: Callable[[str], WeightForm] | None = None,
) -> _Spec:
    """Return the spec, in which each linear weight has the form that `choose` returns for its name.

    Layers that share one object still share it if their forms are equal.

    Args:
        spec: the model.
        choose: returns the form of a module.
        choose_table: returns the form of a table of tokens; None: it stays plain.
        choose_exact: the same for `LinearSpec.exact`; None: `choose`.
    """
    choices = choose, choose_exact or choose
    layers = _replace_layers(spec.layers, [n.checkpoint for n in spec.names_of_layers], *choices)
    encoders = []
    for encoder in spec.encoders:
        names = [encoder.layer_names.format(i) for i in range(len(encoder.layers))]
        own = _replace_layers(encoder.layers, names, *choices)
        rest = _replace(replace(encoder, layers=()), "", *choices)
        encoders.append(replace(rest, layers=own))
    others: _Spec = _replace(replace(spec, layers=(), encoders=()), "", *choices)
    embed = replace(others.embed, form=choose_table(others.embed.module) or PLAIN)
    if (inputs := embed.layer_inputs) is not None:
        inputs = replace(inputs, form=choose_table(inputs.module) or PLAIN)
        embed = replace(embed, layer_inputs=inputs)
    return replace(others, layers=layers, encoders=tuple(encoders), embed=embed)


def _replace_layers(
    layers: Sequence[LayerSpec],
    prefixes: Sequence[str],
    choose: Callable[[str], WeightForm],
    choose_exact: Callable[[str], WeightForm],
) -> tuple[LayerSpec, ...]:
    """Return layers with the forms of all linear weights; `prefixes` are those of their modules.

    Layers that share one object still share it if their forms are equal.
    """
    made: dict[int, list[LayerSpec]] = {}
    found = []
    for layer, prefix in zip(layers, prefixes, strict=True):
        try:
            new = _replace(layer, prefix, choose, choose_exact)
        except ModelError as error:
            raise ModelError(f"{prefix.removesuffix('.')}: {error}") from None
        known = made.setdefault(id(layer), [])
        if new not in known:
            known.append(new)
        found.append(known[known.index(new)])
    return tuple(found)


def _replace(
    value: Any,
    prefix: str,
    choose: Callable[[str], WeightForm],
    choose_exact: Callable[[str], WeightForm],
) -> Any:
    """Return a block, or a tuple of blocks, with the forms of all linear weights within it.

    Args:
        value: any object; an object without linear weights is returned unchanged.
        prefix: prefix of the names of its modules in the checkpoint.
        choose: see `_with_forms`.
        choose_exact: see `_with_forms`.
    """
    if isinstance(value, LinearSpec):
        of_module = choose_exact if value.exact else choose
        forms = tuple(of_module(f"{prefix}{module}") for module in value.weight_modules)
        return replace(value, forms=() if set(forms) == {PLAIN} else forms)
    if isinstance(value, tuple):
        items = [_replace(item, prefix, choose, choose_exact) for item in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else tuple(items)
    if is_dataclass(value) and not isinstance(value, type):
        new = {
            f.name: _replace(getattr(value, f.name), prefix, choose, choose_exact)
            for f in fields(value)
        }
        changed = {name: item for name, item in new.items() if item is not getattr(value, name)}
        return replace(value, **changed) if changed else value
    return value
