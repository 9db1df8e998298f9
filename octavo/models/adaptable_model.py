"""Modules of a model's checkpoint that adapters may change or replace."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from octavo.checkpoints.adapter import AdapterFile
from octavo.checkpoints.base import Source, shorten_names
from octavo.config.lora import LoRAConfig
from octavo.errors import ConfigError
from octavo.kernels.lora import ExpertPart
from octavo.layers.adapter import Adapters, is_replaceable
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.expert_adapters import AllFusedExperts, container_of
from octavo.models.forms import without_forms
from octavo.models.loader import rows_of
from octavo.models.spec import ModelSpec
from octavo.models.weights import Weight
from octavo.quantization.base import IntArray
from octavo.quantization.plain import PLAIN

EMBED = "embed."
"""Name of the embedding of tokens, as `SliceShape.layer`."""
TOKEN_TYPES = "embed.token_types"
"""Name of the vectors of token types, as `SliceShape.layer`."""
LM_HEAD = "lm_head."
"""Name of the LM head, as `SliceShape.layer`."""
_TIED_HEAD = "lm_head"
"""Module of an LM head that is tied to the embedding: adapters distinguish the two."""
MOVING = "experts that engines on several machines divide"
"""Kind of modules that adapters cannot change, for an error message."""
UNTARGETED = "modules that lora_target_modules leaves out"
"""Kind of modules that adapters may not change, for an error message."""
_OTHERS = "other layers than the decoder's"
_ENCODERS = "encoders of pictures and sound"
_STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules that vLLM computes as one, by its name of them."""
_NOT_LINEAR = "norms, other embeddings than that of tokens, and weights with several uses"


@dataclass(frozen=True)
class SliceShape:
    """Place and size of a slice that an adapter may have."""

    layer: str
    """Prefix of the names of the linear layer's weights, e.g. layers.0.qkv_proj."""
    begin: int
    end: int
    inputs: int


@dataclass(frozen=True)
class ModuleUse:
    """Use of a module by a linear layer."""

    shape: SliceShape
    rows: tuple[slice | IntArray, ...]
    columns: slice


@dataclass(frozen=True)
class AdaptableModule:
    """Module of a checkpoint that adapters may change."""

    name: str
    source: Source
    outputs: int
    inputs: int
    uses: tuple[ModuleUse, ...]
    """Uses by layers; a rank may have none."""
    is_embedding: bool = False
    """True for the embedding of tokens: the inputs are tokens."""

    @property
    def weight_shape(self) -> tuple[int, int]:
        """Shape of the weight, which has a row for each token if it is an embedding."""
        shape = self.outputs, self.inputs
        return shape[::-1] if self.is_embedding else shape


@dataclass(frozen=True)
class ReplaceableModule:
    """Module in whose place adapters may have their own."""

    uses: tuple[tuple[str, tuple[slice | IntArray, ...]], ...]
    """Layers that it is, as `SliceShape.layer`, and the rows that the rank needs of it."""
    shapes: dict[str, tuple[int, ...]]
    """Shapes of its tensors: weight, and bias if it has one."""


class AdaptableModel:
    """Modules of a model's checkpoint, and the linear layers that compute with them.

    Args:
        spec: the model, or a rank's or a stage's part of it, with weights of any form.
        layers: linear layers that adapters may change, as `SliceShape.layer`; None: all.
        modules_to_save: `lora_modules_to_save`.
        targets: `lora_target_modules`; empty: all.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: Collection[str] | None = None,
        modules_to_save: Collection[str] = (),
        targets: Collection[str] = (),
    ) -> None:
        spec = without_forms(spec).for_adapters()
        self.architecture, self.vocab_size = spec.architecture, spec.vocab_size
        self.expected = spec.expected
        self.elsewhere = [
            name.removesuffix(".weight") for name in spec.elsewhere if name.endswith(".weight")
        ]
        """Modules that only other stages need."""
        self._elsewhere = spec.elsewhere
        self._left_out = [re.compile(pattern) for pattern in self.expected.ignored]
        self.head_size = next(
            (
                block.head_size
                for layer in spec.distinct_layers
                for block in layer.blocks
                if isinstance(block, AttentionSpec)
            ),
            0,
        )
        self.modules: dict[str, AdaptableModule] = {}
        """Modules that adapters may change, by their names."""
        self.others: dict[str, str] = {}
        """Other modules, and their kind for an error message."""
        self.replaceable: dict[str, ReplaceableModule] = {}
        """Modules in whose place adapters may have their own, by their names."""
        self._modules_to_save = modules_to_save
        if spec.has_embed:
            self._add_embedding(spec.embed)
        elif spec.tied:
            self.elsewhere.append(spec.embed.module)
        if spec.tied and not spec.has_head:
            self.elsewhere.append(_TIED_HEAD)
        self.fused = AllFusedExperts()
        for weight in spec.weights():
            self._add(weight, spec.embed.module)
        experts = self.fused.modules
        if targets:
            named = {part for name in targets for part in (name, *_STACKED.get(name, ()))}
            for name in self.modules:
                if named.isdisjoint(_target_names(name, name in experts)):
                    self.others[name] = UNTARGETED
        if layers is not None:
            for name, module in self.modules.items():
                if any(use.shape.layer.startswith("encoders.") for use in module.uses):
                    self.others[name] = _ENCODERS
                elif any(use.shape.layer not in layers for use in module.uses):
                    self.others.setdefault(name, MOVING if name in experts else _OTHERS)
            for name, whole in list(self.replaceable.items()):
                if any(layer not in layers for layer, _ in whole.uses):
                    del self.replaceable[name]
        for name in self.others:
            self.modules.pop(name, None)
        self._by_stored: dict[str, dict[str, str]] = {}
        self._containers: dict[str, dict[str, str]] = {}

    def targets(self) -> set[str]:
        """Return the names that `lora_target_modules` may have."""
        experts = self.fused.modules
        names = {name for it in self.modules for name in _target_names(it, it in experts)}
        return names | {name for name, parts in _STACKED.items() if names.intersection(parts)}

    def layers(self) -> set[str]:
        """Return the layers that adapters may change or replace, as `SliceShape.layer`."""
        replaced = (layer for whole in self.replaceable.values() for layer, _ in whole.uses)
        return {*(it.layer for it in self.slices), *replaced}

    def slot_nbytes(self, adapters: Adapters, dtype: str) -> int:
        """Return the bytes of an adapter of the largest rank that changes and replaces all.

        Its outputs have gains and offsets, except for those of experts.

        Args:
            adapters: the live adapters of the model.
            dtype: type of the packed weights.
        """
        nbytes = sum(it.nbytes(dtype) for it in adapters.replaced.values())
        for it in self.slices:
            table = adapters.layers[it.layer]
            module, affine = table.module_of(it.begin, it.end), not isinstance(table, ExpertPart)
            nbytes += table.weight_nbytes(module, table.max_rank, dtype, affine=affine)
        return nbytes

    def leaves_out(self, name: str) -> bool:
        """Return True for a module of a part that Octavo does not compute, such as a tower."""
        return any(pattern.fullmatch(f"{name}.weight") for pattern in self._left_out)

    def by_stored(self, file: AdapterFile) -> dict[str, str]:
        """Return the modules by the names that they may have in an adapter's file."""
        if file.naming not in self._by_stored:
            self._by_stored[file.naming] = {
                stored: name
                for name in (*self.modules, *self.others, *self.elsewhere)
                for stored in file.names(name, self.expected)
            }
        return self._by_stored[file.naming]

    def _add_replaceable(
        self, name: str, source: Source, layer: str, rows: tuple[slice | IntArray, ...]
    ) -> None:
        known = self.replaceable.get(name, ReplaceableModule((), {"weight": source.shape}))
        self.replaceable[name] = replace(known, uses=(*known.uses, (layer, rows)))

    def _add_embedding(self, spec: EmbedSpec) -> None:
        """Add the embedding of tokens; its inputs are tokens."""
        shape = SliceShape(EMBED, 0, spec.size, spec.vocab_size)
        use = ModuleUse(shape, (slice(None),), slice(None))
        source = Source(f"{spec.module}.weight", (spec.vocab_size, spec.size))
        self.modules[spec.module] = AdaptableModule(
            spec.module, source, spec.size, spec.vocab_size, (use,), is_embedding=True
        )
        if "embed_tokens" in self._modules_to_save:
            self._add_replaceable(spec.module, source, EMBED, use.rows)
        if (types := spec.token_types) is not None:
            size = spec.size if spec.projects_sum else spec.hidden_size
            use = replace(use, shape=SliceShape(TOKEN_TYPES, 0, size, types.rows))
            source = Source(f"{types.module}.weight", (types.rows, size))
            self.modules[types.module] = AdaptableModule(
                types.module, source, size, types.rows, (use,), is_embedding=True
            )

    def containers(self, file: AdapterFile) -> dict[str, str]:
        """Return the modules that have fused experts, by their names in an adapter's file."""
        if file.naming not in self._containers:
            found = map(container_of, sorted(self._elsewhere))
            self._containers[file.naming] = {
                stored: name
                for name in dict.fromkeys([*found, *self.fused.containers])
                for stored in file.names(name, self.expected)
            }
        return self._containers[file.naming]

    def _add(self, weight: Weight, embedding: str) -> None:
        """Add a weight; an adapter of the embedding of tokens changes no weight tied to it."""
        begin = 0
        for source in weight.sources:
            name = source.name.removesuffix(".weight")
            if weight.name == TOKEN_TYPES:
                continue
            if name == embedding:
                if weight.name != f"{LM_HEAD}weight":
                    continue
                name = _TIED_HEAD
            if weight.expert is not None and weight.kind == "linear" and weight.form == PLAIN:
                module = name if source.index is None else f"{name}.{source.index}"
                begin = self._use(module, source, weight, begin)
                made = self.modules[module]
                self.fused.add(source, weight, module, made.outputs, made.inputs)
            elif source.index is not None:
                self.others[name] = "experts"
            elif weight.kind == "linear" and weight.form == PLAIN:
                begin = self._use(name, source, weight, begin)
                layer = weight.name.removesuffix("weight")
                # Some rerankers have rows of the LM head in place of a head of their own.
                is_rows = layer.startswith("poolers.") and source.parts is not None
                if is_replaceable(layer, self._modules_to_save) and not is_rows:
                    self._add_replaceable(name, source, layer, tuple(rows_of(source, weight)))
            elif source.name.endswith(".weight"):
                self.others[name] = _NOT_LINEAR
            elif (module := source.name.removesuffix(".bias")) in self.replaceable:
                self.replaceable[module].shapes["bias"] = source.shape

    def _use(self, name: str, source: Source, weight: Weight, begin: int) -> int:
        """Add the use of a module from a linear layer's output `begin` on; return its end."""
        turned = source.transform in ("transpose", "swap")
        stored = source.shape[-2:]  # without that of the experts
        outputs, inputs = stored[::-1] if turned else stored
        rows = tuple(rows_of(source, weight))
        end = begin + sum(len(np.arange(outputs)[part]) for part in rows)
        columns = slice(*(source.columns or (0, inputs)))
        layer = weight.name.removesuffix("weight")
        known = self.modules.get(name)
        uses = () if known is None else known.uses
        if begin < end:
            shape = SliceShape(layer, begin, end, columns.stop - columns.start)
            uses = (*uses, ModuleUse(shape, rows, columns))
        self.modules[name] = AdaptableModule(name, source, outputs, inputs, uses)
        return end

    @property
    def slices(self) -> list[SliceShape]:
        """Slices of an adapter that changes all modules."""
        return [use.shape for module in self.modules.values() for use in module.uses]


def target_of(module: str) -> str:
    """Return the name of a module in `lora_target_modules`: its end, without a number."""
    return next((part for part in reversed(module.split(".")) if not part.isdigit()), module)


def _target_names(module: str, is_expert: bool) -> tuple[str, ...]:
    """Return the names that a module may have in `lora_target_modules`."""
    names = module, target_of(module)
    return (*names, "experts") if is_expert else names


def targeted_layers(spec: ModelSpec, lora: LoRAConfig) -> Collection[str] | None:
    """Return the layers that adapters may change or replace, as `SliceShape.layer`; None: all.

    Args:
        spec: the model, or a rank's or a stage's part of it, with weights of any form.
        lora: the settings.
    """
    if not lora.lora_target_modules:
        return None
    model = AdaptableModel(spec, None, lora.lora_modules_to_save, lora.lora_target_modules)
    return model.layers()


def check_targets(spec: ModelSpec, lora: LoRAConfig) -> None:
    """Check that the model has the modules of `lora_target_modules`.

    Args:
        spec: the whole model.
        lora: the settings.

    Raises:
        ConfigError: it lacks one.
    """
    if not lora.lora_target_modules:
        return
    known = AdaptableModel(spec).targets()
    unknown = [name for name in lora.lora_target_modules if name not in known]
    if unknown:
        ends = sorted(name for name in known if "." not in name)
        raise ConfigError(
            f"lora_target_modules: {spec.architecture} has no {shorten_names(unknown)} that "
            f"adapters can change; choose from {', '.join(ends)}."
        )
