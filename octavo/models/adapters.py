"""Adapters of a model: their factors for each of its linear layers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.adapter import (
    CONFIG,
    MERGE,
    AdapterData,
    AdapterFile,
    PeftFolder,
    adapter_errors,
    check_place,
)
from octavo.checkpoints.base import Source, shorten_names
from octavo.checkpoints.model_files import printable
from octavo.errors import AdapterError
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.expert_adapters import (
    AllFusedExperts,
    FusedMatch,
    bare_module,
    check_single,
    container_of,
)
from octavo.models.forms import without_forms
from octavo.models.loader import rows_of
from octavo.models.spec import ModelSpec
from octavo.models.weights import Weight
from octavo.quantization.base import IntArray
from octavo.quantization.plain import PLAIN
from octavo.system.tensor import HostTensor, from_numpy, numpy_dtype

_MOVING = "experts on a GPU, or that several engines divide, or that enable_eplb moves,"
_NOT_LINEAR = "embeddings, norms, and weights that have other uses, too,"


@dataclass(frozen=True)
class Slice:
    """Change of some outputs of a linear layer: y[:, begin:end] += scale * (x A^T) B^T."""

    begin: int
    """First output of the layer, or of the rank's part of it."""
    end: int
    a: HostTensor
    """A: [rank, inputs] in float32, float16 or bfloat16; the inputs are those of the layer's part.
    All numbers are finite in the model's type, too."""
    b: HostTensor
    """B: [end - begin, rank], of the same types, and finite."""
    scale: float


@dataclass(frozen=True)
class SliceShape:
    """Place and size of a slice that an adapter may have."""

    layer: str
    """Prefix of the names of the linear layer's weights, e.g. layers.0.qkv_proj."""
    begin: int
    end: int
    inputs: int


@dataclass(frozen=True)
class _Use:
    """Use of a module by a linear layer."""

    shape: SliceShape
    rows: tuple[slice | IntArray, ...]
    columns: slice


@dataclass(frozen=True)
class _Module:
    """Module of a checkpoint that adapters may change."""

    name: str
    source: Source
    outputs: int
    inputs: int
    uses: tuple[_Use, ...]
    """Uses by linear layers; a rank may have none."""


class AdaptableModel:
    """Modules of a model's checkpoint, and the linear layers that compute with them.

    Args:
        spec: the model, or a rank's or a stage's part of it, with weights of any form.
        layers: linear layers that adapters may change, as `SliceShape.layer`; None: all.
    """

    def __init__(self, spec: ModelSpec, layers: Collection[str] | None = None) -> None:
        spec = without_forms(spec)
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
        self.modules: dict[str, _Module] = {}
        """Modules that adapters may change, by their names."""
        self.others: dict[str, str] = {}
        """Other modules, and their kind for an error message."""
        self.fused = AllFusedExperts()
        for weight in spec.weights():
            self._add(weight, is_tied_head=spec.tied and weight.name == "lm_head.weight")
        if layers is not None:
            experts = self.fused.modules
            for name, module in self.modules.items():
                if any(use.shape.layer not in layers for use in module.uses):
                    self.others[name] = _MOVING if name in experts else "these layers"
        for name in self.others:
            self.modules.pop(name, None)
        self._by_stored: dict[str, dict[str, str]] = {}
        self._containers: dict[str, dict[str, str]] = {}

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

    def _add(self, weight: Weight, *, is_tied_head: bool) -> None:
        begin = 0
        for source in weight.sources:
            name = source.name.removesuffix(".weight")
            if is_tied_head:  # an adapter changes the head, not the embedding
                self.others[name] = _NOT_LINEAR
                name = "lm_head"
            if weight.expert is not None and weight.kind == "linear" and weight.form == PLAIN:
                module = name if source.index is None else f"{name}.{source.index}"
                begin = self._use(module, source, weight, begin)
                made = self.modules[module]
                self.fused.add(source, weight, module, made.outputs, made.inputs)
            elif source.index is not None:
                self.others[name] = "experts"
            elif weight.kind == "linear" and weight.form == PLAIN:
                begin = self._use(name, source, weight, begin)
            elif source.name.endswith(".weight"):
                self.others[name] = _NOT_LINEAR

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
            uses = (*uses, _Use(shape, rows, columns))
        self.modules[name] = _Module(name, source, outputs, inputs, uses)
        return end

    @property
    def slices(self) -> list[SliceShape]:
        """Slices of an adapter that changes all modules."""
        return [use.shape for module in self.modules.values() for use in module.uses]


class Adapter:
    """Adapter whose description has been read and checked against a model.

    Args:
        file: its files.
        model: the model.
        modules: the name in the file of each module that it changes.
        fused: modules with fused experts that it changes, by other names.
        dtype: type of weights and activations: float32, float16 or bfloat16.
    """

    def __init__(
        self,
        file: AdapterFile,
        model: AdaptableModel,
        modules: Mapping[str, str],
        fused: Mapping[str, FusedMatch],
        dtype: str,
    ) -> None:
        self.file = file
        self._model, self._modules, self._fused, self._dtype = model, modules, fused, dtype
        self._scales = {name: file.scale(stored) for name, stored in modules.items()}
        for match in fused.values():
            if match.fused is not None:
                own = match.fused
                scale = file.scale(match.stored, own.name, own.experts)
                self._scales |= {part.module: scale for part in own.parts}

    @property
    def base(self) -> str | None:
        """Name of the model that it was trained for, or None."""
        return self.file.base

    @property
    def slices(self) -> list[tuple[SliceShape, int]]:
        """Place and rank of each slice that `read` returns."""
        factors = self.file.factors
        ranks = {name: factors[stored].rank for name, stored in self._modules.items()}
        for match in self._fused.values():
            if (own := match.fused) is not None:
                rank = factors[match.stored].rank // own.experts
                ranks |= {part.module: rank for part in own.parts}
        return [
            (use.shape, rank)
            for name, rank in ranks.items()
            if name in self._model.modules
            for use in self._model.modules[name].uses
        ]

    @property
    def identity(self) -> tuple[int, ...]:
        """Device, number, size and times of the file: they change with its contents."""
        return self.file.identity

    def read(self, *, known: bool = False) -> LoadedAdapter:
        """Read the factors.

        Args:
            known: True for a file that was read before and has the same `identity` since: the
                numbers are neither checked nor hashed again.

        Raises:
            AdapterError: a number is not finite, or the file is damaged or has changed.
        """
        found = hashlib.sha256(str(self.file.invocation_tokens or "").encode())
        factors: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
        with adapter_errors(), AdapterData(self.file) as data:
            fused = {name: match.stored for name, match in self._fused.items()}
            for name, module in sorted((*self._modules.items(), *fused.items())):
                stored = self.file.factors[module]
                a, b = data.read(stored.a), data.read(stored.b)
                if not known:
                    # A stage does not know the scales of other stages' experts.
                    scale = self.file.settings if name in fused else self._scales[name].hex()
                    facts = name, scale, a.dtype.name, b.dtype.name, *b.shape
                    found.update(f"{facts} {a.shape}".encode())
                    for array in (a, b):
                        found.update(np.ascontiguousarray(array).view(np.uint8).data)
                    for factor, array in (("A", a), ("B", b)):
                        self._check_finite(array, module, factor)
                if name in fused:
                    parts = self._fused[name].split(self._narrow(a), self._narrow(b))
                    factors |= {part: (first, second) for part, first, second in parts}
                elif name in self._model.modules:
                    factors[name] = self._narrow(a), self._narrow(b)
            data.check()
        return LoadedAdapter(None if known else found.hexdigest(), self._slices(factors))

    def _check_finite(self, array: NDArray[Any], stored: str, factor: str) -> None:
        """Raise `AdapterError` if a number is not finite in the model's type."""
        # Without their signs, floats are in the order of their bits; NaN is the largest.
        bits = array.view(f"u{array.itemsize}")
        largest = (bits & (2 ** (8 * array.itemsize - 1) - 1)).max(keepdims=True)
        with np.errstate(over="ignore"):  # numbers beyond the type become infinite
            largest = largest.view(array.dtype).astype(numpy_dtype(self._dtype))
        if not np.isfinite(largest).all():
            raise AdapterError(
                f"{self.file.file}: {factor} of {printable(stored)} has numbers that "
                f"are NaN or infinite in {self._dtype}; train the adapter again, or set another "
                "dtype."
            )

    def _narrow(self, array: NDArray[Any]) -> NDArray[Any]:
        return array.astype(numpy_dtype(self._dtype)) if array.itemsize == 8 else array

    def _slices(
        self, factors: Mapping[str, tuple[NDArray[Any], NDArray[Any]]]
    ) -> dict[str, list[Slice]]:
        slices: dict[str, list[Slice]] = {}
        for name, (a, b) in factors.items():
            module = self._model.modules[name]
            order = self.file.row_order(module.source, module.outputs, self._model.head_size)
            rows = b if order is None else b[order]
            for use in module.uses:
                own = [rows[part] for part in use.rows]
                own = own if len(own) == 1 else [np.concatenate(own)]
                shape = use.shape
                slices.setdefault(shape.layer, []).append(
                    Slice(
                        shape.begin,
                        shape.end,
                        from_numpy(np.ascontiguousarray(a[:, use.columns])),
                        from_numpy(np.ascontiguousarray(own[0])),
                        self._scales[name],
                    )
                )
        return {
            layer: sorted(own, key=lambda it: it.begin) for layer, own in sorted(slices.items())
        }


@dataclass(frozen=True)
class LoadedAdapter:
    """Factors of an adapter."""

    content_hash: str | None
    """SHA-256 of all factors of the file, their scales and the invocation tokens: adapters with one
    hash are equal. None: it was not computed again."""
    slices: dict[str, list[Slice]]
    """Slices of each linear layer that it changes, see `SliceShape.layer`; in the order of the
    outputs."""


def open_adapter_file(path: Path, root: Path | None = None) -> AdapterFile:
    """Return the description of an adapter, without its numbers.

    Args:
        path: the folder that PEFT has written, or a GGUF file.
        root: folder that must contain the adapter, links followed; None: any place is allowed.

    Raises:
        AdapterError: the adapter is damaged, of a kind that is not supported, or outside of `root`.
    """
    with adapter_errors():
        if not path.exists():
            raise AdapterError(f"There is no adapter {path}; name its folder, or its GGUF file.")
        check_place(path, root)
        if path.is_file():
            from octavo.checkpoints.gguf.adapter import GGUFAdapter

            return GGUFAdapter(path)
        if not (path / CONFIG).exists():
            raise AdapterError(
                f"{path} has no {CONFIG}: an adapter is a folder with {CONFIG} and "
                "adapter_model.safetensors, or a GGUF file. Name one of these."
            )
        return PeftFolder(path)


def open_adapter(
    path: Path,
    model: AdaptableModel,
    *,
    dtype: str,
    max_lora_rank: int,
    root: Path | None = None,
) -> Adapter:
    """Return an adapter whose description has been checked against a model.

    Args:
        path: the folder that PEFT has written, or a GGUF file.
        model: the model.
        dtype: type of weights and activations: float32, float16 or bfloat16.
        max_lora_rank: the setting of this name.
        root: folder that must contain the adapter, links followed; None: any place is allowed.

    Raises:
        AdapterError: the adapter is damaged, of a kind that is not supported, outside of `root`, or
            belongs to another model; or a rank is above `max_lora_rank`.
    """
    file = open_adapter_file(path, root)
    if (token := max(file.invocation_tokens, default=0)) >= model.vocab_size:
        raise AdapterError(
            f"{file.path}: the invocation token {token} is none of the {model.vocab_size} tokens "
            f"of {model.architecture}. Load an adapter of this model."
        )
    modules, containers = _match_modules(file, model)
    for name, stored in modules.items():
        _check_factors(file, stored, model.modules.get(name), max_lora_rank)
    fused = {
        f"{name}{inner}": model.fused.match(name, f"{stored}{inner}", file, max_lora_rank)
        for stored, inner, name in containers
    }
    check_single(file, fused, set(modules))
    return Adapter(file, model, modules, fused, dtype)


def _match_modules(
    file: AdapterFile, model: AdaptableModel
) -> tuple[dict[str, str], list[tuple[str, str, str]]]:
    """Return the modules that an adapter changes.

    Returns:
        The name in the file of each module. And the modules with fused experts: the name in the
        file without its end, the end, and the module.

    Raises:
        AdapterError: the model does not have a module, or adapters cannot change it.
    """
    by_stored, containers = model.by_stored(file), model.containers(file)
    matched: dict[str, str] = {}
    fused: list[tuple[str, str, str]] = []
    refused: dict[str, list[str]] = {}
    unknown = []
    for stored in file.factors:
        name, (bare, inner) = by_stored.get(stored), bare_module(stored)
        if name is None and bare in containers:
            if any(part in model.others for part in model.fused.parts_of(containers[bare])):
                refused.setdefault(_MOVING, []).append(stored)
            else:
                fused.append((bare, inner, containers[bare]))
            continue
        if name is None and model.leaves_out(stored):
            continue
        if name is None:
            unknown.append(stored)
        elif name in model.others:
            refused.setdefault(model.others[name], []).append(stored)
        elif name in matched:
            raise AdapterError(
                f"{file.file} has {printable(matched[name])} and {printable(stored)}, which are "
                "the same module; save the adapter again."
            )
        else:
            matched[name] = stored
    if unknown:
        base = "" if file.base is None else f" It was trained for {printable(file.base)}."
        raise AdapterError(
            f"{file.file} changes {len(unknown)} modules that {model.architecture} does not have: "
            f"{shorten_names(sorted(unknown))}.{base} Load an adapter of this model."
        )
    if not matched and not fused and not refused:
        raise AdapterError(
            f"{file.file} only changes parts of {model.architecture} that Octavo does not compute, "
            f"such as {printable(next(iter(file.factors)))}. Load an adapter of its text part."
        )
    for kind, names in refused.items():
        raise AdapterError(
            f"{file.file} changes {shorten_names(names)}: LoRA of {kind} is not supported. Train "
            f"the adapter without, or {MERGE}."
        )
    return matched, fused


def _check_factors(
    file: AdapterFile, stored: str, module: _Module | None, max_lora_rank: int
) -> None:
    """Check rank and shapes of a module's factors.

    Raises:
        AdapterError: the rank is too large, or the adapter belongs to another model.
    """
    factors = file.factors[stored]
    if factors.rank > max_lora_rank:
        raise AdapterError(
            f"{file.file}: {printable(stored)} has rank {factors.rank}, and max_lora_rank="
            f"{max_lora_rank}; raise max_lora_rank."
        )
    if module is None:  # another stage checks the shapes
        return
    found = factors.b.shape[0], factors.a.shape[1]
    if found != (module.outputs, module.inputs):
        base = "" if file.base is None else f" It was trained for {printable(file.base)}."
        raise AdapterError(
            f"{file.file}: the factors of {printable(stored)} change a weight {list(found)}, and "
            f"that of the model is {[module.outputs, module.inputs]}.{base} Load an adapter of "
            "this model."
        )
