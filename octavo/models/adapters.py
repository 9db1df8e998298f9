"""Adapters of a model: their factors for each of its linear layers."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
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
    check_opened,
    check_place,
)
from octavo.checkpoints.base import Source, shorten_names
from octavo.checkpoints.mapped_file import StoredTensor
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
from octavo.system.tensor import HostTensor, from_numpy, itemsize, numpy_dtype

_MOVING = "experts on a GPU, or that several engines divide, or that enable_eplb moves,"
PIECE_NBYTES = 2**20
"""Most bytes of several modules that are read together."""
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
    def stored_names(self) -> list[str]:
        """Names in the file of the modules that it changes."""
        return [*self._modules.values(), *(match.stored for match in self._fused.values())]

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

    def read(self, use: Callable[[str, Slice], object] = lambda layer, one: None) -> str:
        """Read all numbers, in pieces; return SHA-256 of the adapter, in hex.

        It covers the factors, their scales and the invocation tokens: adapters with one hash are
        equal. A thread computes it while this one uses the piece.

        Args:
            use: called with the prefix of a linear layer and with each of its slices, see
                `slices`; the slice's memory is freed afterwards. It is called before all numbers
                have been checked.

        Raises:
            AdapterError: a number is not finite, or the file is damaged or has changed.
        """
        fused = {name: match.stored for name, match in self._fused.items()}
        modules = {**self._modules, **fused}
        files = {name: self.file.factors[stored].tensors for name, stored in modules.items()}
        # A stage does not know the scales of other stages' experts.
        scales = {name: scale.hex() for name, scale in self._scales.items()}
        scales |= dict.fromkeys(fused, self.file.settings)
        first = min(it.begin for tensors in files.values() for it in tensors.values())
        facts = [
            (name, scales[name], part, it.begin - first, it.dtype, it.shape, it.strides)
            for name, tensors in sorted(files.items())
            for part, it in tensors.items()
        ]
        hashed = hashlib.sha256(f"{self.file.invocation_tokens} {facts}".encode())

        def add(blocks: list[NDArray[Any]]) -> None:
            for block in blocks:
                hashed.update(block.view(np.uint8).data)

        with adapter_errors(), AdapterData(self.file) as data, ThreadPoolExecutor(1) as thread:
            for names in _pieces(files):
                keys = [(name, part) for name in names for part in files[name]]
                blocks, arrays = data.read([files[name][part] for name, part in keys])
                adding = thread.submit(add, blocks)
                tensors = dict(zip(keys, arrays, strict=True))
                if not all(self._is_finite(block) for block in blocks):
                    self._check_tensors(tensors)
                for name in names:
                    a, b = (self._narrow(tensors[name, part]) for part in "AB")
                    if name in fused:
                        for own in self._fused[name].split(a, b):
                            self._use_slices(*own, use)
                    elif name in self._model.modules:
                        self._use_slices(name, a, b, use)
                adding.result()
            data.check()
        return hashed.hexdigest()

    def _is_finite(self, array: NDArray[Any]) -> bool:
        """Return True if all numbers are finite in the model's type."""
        # Without their signs, floats are in the order of their bits; NaN is the largest.
        sign = 2 ** (8 * array.itemsize - 1)
        largest = array.view(f"u{array.itemsize}").max(keepdims=True)
        negative = largest & (sign - 1)
        positive = array.view(f"i{array.itemsize}").max(keepdims=True).clip(0)
        both = np.maximum(negative, positive.view(negative.dtype)).view(array.dtype)
        with np.errstate(over="ignore"):  # numbers beyond the type become infinite
            return bool(np.isfinite(both.astype(numpy_dtype(self._dtype))).all())

    def _check_tensors(self, arrays: Mapping[tuple[str, str], NDArray[Any]]) -> None:
        """Raise `AdapterError` if a tensor has a number that is not finite."""
        for (name, part), array in arrays.items():
            if not self._is_finite(array):
                raise AdapterError(
                    f"{self.file.file}: {part} of {printable(self._stored(name))} has numbers "
                    f"that are NaN or infinite in {self._dtype}; train the adapter again, or set "
                    "another dtype."
                )

    def _stored(self, name: str) -> str:
        """Return the name in the file of a module that the adapter changes."""
        return self._fused[name].stored if name in self._fused else self._modules[name]

    def _narrow(self, array: NDArray[Any]) -> NDArray[Any]:
        return array.astype(numpy_dtype(self._dtype)) if array.itemsize == 8 else array

    def _use_slices(
        self,
        name: str,
        a: NDArray[Any],
        b: NDArray[Any],
        use: Callable[[str, Slice], object],
    ) -> None:
        """Call `use` for each linear layer that computes with a module."""
        module = self._model.modules[name]
        order = self.file.row_order(module.source, module.outputs, self._model.head_size)
        rows = b if order is None else b[order]
        for it in module.uses:
            own = [rows[part] for part in it.rows]
            own = own if len(own) == 1 else [np.concatenate(own)]
            columns = from_numpy(np.ascontiguousarray(a[:, it.columns]))
            outputs = from_numpy(np.ascontiguousarray(own[0]))
            shape = it.shape
            one = Slice(shape.begin, shape.end, columns, outputs, self._scales[name])
            use(shape.layer, one)


def _pieces(files: Mapping[str, Mapping[str, StoredTensor]]) -> Iterator[list[str]]:
    """Return names of modules in the order of the file, in pieces of `PIECE_NBYTES` or one module.

    Args:
        files: tensors of each module.
    """
    piece: list[str] = []
    nbytes = 0
    for name in sorted(files, key=lambda name: min(it.begin for it in files[name].values())):
        size = sum(math.prod(it.shape) * itemsize(it.dtype) for it in files[name].values())
        if piece and nbytes + size > PIECE_NBYTES:
            yield piece
            piece, nbytes = [], 0
        piece.append(name)
        nbytes += size
    yield piece


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
        if not path.is_file() and not (path / CONFIG).exists():
            raise AdapterError(
                f"{path} has no {CONFIG}: an adapter is a folder with {CONFIG} and "
                "adapter_model.safetensors, or a GGUF file. Name one of these."
            )
        file: AdapterFile
        if path.is_file():
            from octavo.checkpoints.gguf.adapter import GGUFAdapter

            file = GGUFAdapter(path)
        else:
            file = PeftFolder(path)
        if root is not None:
            check_opened(file, root)
    return file


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
