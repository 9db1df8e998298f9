"""Adapters of a model: their factors for each of its linear layers."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
from octavo.checkpoints.task_adapters import TaskAdapter, is_task
from octavo.errors import AdapterError
from octavo.layers.adapter import is_replaceable
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.embedding import EmbedSpec
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
from octavo.models.weight_norms import WeightNorms
from octavo.models.weights import Weight
from octavo.quantization.base import IntArray
from octavo.quantization.plain import PLAIN
from octavo.system.tensor import HostTensor, from_numpy, itemsize, numpy_dtype

_OTHERS = "other layers than the decoder's, on this device,"
_MOVING = "experts on a GPU, or that several engines divide, or that enable_eplb moves,"
PIECE_NBYTES = 2**20
"""Most bytes of several modules that are read together."""
_NOT_LINEAR = "norms, other embeddings than that of tokens, and weights with several uses"
EMBED = "embed."
"""Name of the embedding of tokens, as `SliceShape.layer`."""
TOKEN_TYPES = "embed.token_types"
"""Name of the vectors of token types, as `SliceShape.layer`."""
_LM_HEAD = "lm_head."
_TIED_HEAD = "lm_head"
"""Module of an LM head that is tied to the embedding: adapters distinguish the two."""
_WHOLE = " whole"
"""End of the key of a replaced module, besides those of changed ones."""


@dataclass(frozen=True)
class Slice:
    """Change of some outputs of a linear layer: y[:, begin:end] += scale * (x A^T) B^T.

    With a gain, all of x W^T + scale * (x A^T) B^T is multiplied by it, but not the layer's bias.
    The inputs of the embedding are tokens, of which x has a one.
    """

    begin: int
    """First output of the layer, or of the rank's part of it."""
    end: int
    a: HostTensor
    """A: [rank, inputs] in float32, float16 or bfloat16; the inputs are those of the layer's part.
    All numbers are finite in the model's type, too."""
    b: HostTensor
    """B: [end - begin, rank], of the same types, and finite."""
    scale: float
    offset: NDArray[np.float32] | None = None
    """Numbers that are added to the outputs: [end - begin]; None: zeros."""
    gain: NDArray[np.float32] | None = None
    """Factor of each output: [end - begin]; None: ones."""

    def affine(self, bias: NDArray[Any] | None) -> HostTensor | None:
        """Return the factors and addends of the changed outputs: float32 [2, end - begin].

        None stands for ones and zeros.

        Args:
            bias: bias of all outputs of the layer, if they contain one before they are changed.
        """
        if self.gain is None and self.offset is None:
            return None
        affine = np.zeros((2, self.end - self.begin), np.float32)
        affine[0] = 1 if self.gain is None else self.gain
        if self.offset is not None:
            affine[1] = self.offset
        if bias is not None:
            affine[1] += (1 - affine[0]) * bias[self.begin : self.end].astype(np.float32)
        return from_numpy(affine)


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
    """Uses by layers; a rank may have none."""
    is_embedding: bool = False
    """True for the embedding of tokens: the inputs are tokens."""

    @property
    def weight_shape(self) -> tuple[int, int]:
        """Shape of the weight, which has a row for each token if it is an embedding."""
        shape = self.outputs, self.inputs
        return shape[::-1] if self.is_embedding else shape


@dataclass(frozen=True)
class _Replaceable:
    """Module in whose place adapters may have their own."""

    uses: tuple[tuple[str, tuple[slice | IntArray, ...]], ...]
    """Layers that it is, as `SliceShape.layer`, and the rows that the rank needs of it."""
    shapes: dict[str, tuple[int, ...]]
    """Shapes of its tensors: weight, and bias if it has one."""


@dataclass(frozen=True)
class Replacement:
    """Layer in place of the model's."""

    weight: HostTensor
    """Weight [outputs, inputs] or [tokens, size], of the types of `Slice.a`, and finite."""
    bias: HostTensor | None
    """Bias [outputs]."""


class AdaptableModel:
    """Modules of a model's checkpoint, and the linear layers that compute with them.

    Args:
        spec: the model, or a rank's or a stage's part of it, with weights of any form.
        layers: linear layers that adapters may change, as `SliceShape.layer`; None: all.
        modules_to_save: `lora_modules_to_save`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: Collection[str] | None = None,
        modules_to_save: Collection[str] = (),
    ) -> None:
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
        self.replaceable: dict[str, _Replaceable] = {}
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
        if layers is not None:
            experts = self.fused.modules
            for name, module in self.modules.items():
                if any(use.shape.layer not in layers for use in module.uses):
                    self.others[name] = _MOVING if name in experts else _OTHERS
            for name, whole in list(self.replaceable.items()):
                if any(layer not in layers for layer, _ in whole.uses):
                    del self.replaceable[name]
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

    def _add_replaceable(
        self, name: str, source: Source, layer: str, rows: tuple[slice | IntArray, ...]
    ) -> None:
        known = self.replaceable.get(name, _Replaceable((), {"weight": source.shape}))
        self.replaceable[name] = replace(known, uses=(*known.uses, (layer, rows)))

    def _add_embedding(self, spec: EmbedSpec) -> None:
        """Add the embedding of tokens; its inputs are tokens."""
        shape = SliceShape(EMBED, 0, spec.size, spec.vocab_size)
        use = _Use(shape, (slice(None),), slice(None))
        source = Source(f"{spec.module}.weight", (spec.vocab_size, spec.size))
        self.modules[spec.module] = _Module(
            spec.module, source, spec.size, spec.vocab_size, (use,), is_embedding=True
        )
        if "embed_tokens" in self._modules_to_save:
            self._add_replaceable(spec.module, source, EMBED, use.rows)
        if (types := spec.token_types) is not None:
            size = spec.size if spec.projects_sum else spec.hidden_size
            use = replace(use, shape=SliceShape(TOKEN_TYPES, 0, size, types.rows))
            source = Source(f"{types.module}.weight", (types.rows, size))
            self.modules[types.module] = _Module(
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
                if weight.name != f"{_LM_HEAD}weight":
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
        replaced: the name in the file of each module that it replaces.
        fused: modules with fused experts that it changes, by other names.
        dtype: type of weights and activations: float32, float16 or bfloat16.
    """

    def __init__(
        self,
        file: AdapterFile,
        model: AdaptableModel,
        modules: Mapping[str, str],
        replaced: Mapping[str, str],
        fused: Mapping[str, FusedMatch],
        dtype: str,
    ) -> None:
        self.file = file
        self._model, self._modules, self._fused, self._dtype = model, modules, fused, dtype
        self._replaced = replaced
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

    def read(
        self,
        use: Callable[[str, Slice], object] = lambda layer, one: None,
        norms: WeightNorms | None = None,
        use_whole: Callable[[str, Replacement], object] = lambda layer, one: None,
    ) -> str:
        """Read all numbers, in pieces; return SHA-256 of the adapter, in hex.

        It covers all tensors, their scales and the invocation tokens: adapters with one hash are
        equal. A thread computes it while this one uses the piece.

        Args:
            use: called with the prefix of a linear layer and with each of its slices, see
                `slices`; the slice's memory is freed afterwards. It is called before all numbers
                have been checked.
            norms: the weights, whose changed norms DoRA needs; None: the slices of a DoRA have no
                gains, so that layers cannot use them.
            use_whole: called in the same way with each layer that the adapter replaces.

        Raises:
            AdapterError: a number is not finite, the file is damaged or has changed, or a norm of
                DoRA is 0.
            ModelError: the weights cannot be read, or have changed since the model was loaded.
        """
        factors, trained = self.file.factors, self.file.trained
        fused = {name: match.stored for name, match in self._fused.items()}
        modules = {**self._modules, **fused}
        files: dict[str, Mapping[str, StoredTensor]]
        files = {name: factors[stored].tensors for name, stored in modules.items()}
        files |= {f"{name}{_WHOLE}": trained[stored] for name, stored in self._replaced.items()}
        first = min(it.begin for tensors in files.values() for it in tensors.values())
        # A stage does not know the scales of other stages' experts.
        scales = {name: scale.hex() for name, scale in self._scales.items()}
        scales |= dict.fromkeys(fused, self.file.settings)
        facts = [
            (name, scales.get(name), part, it.begin - first, it.dtype, it.shape, it.strides)
            for name, tensors in sorted(files.items())
            for part, it in tensors.items()
        ]
        file = self.file
        form = file.naming, file.swaps_experts, file.invocation_tokens
        hashed = hashlib.sha256(f"{form} {facts}".encode())

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
                    read = {part: self._narrow(tensors[name, part]) for part in files[name]}
                    if name.endswith(_WHOLE):
                        self._use_whole(name.removesuffix(_WHOLE), read, use_whole)
                    elif name in fused:
                        for module, a, b in self._fused[name].split(read["A"], read["B"]):
                            self._use_slices(module, {"A": a, "B": b}, norms, use)
                    elif name in self._model.modules:
                        self._use_slices(name, read, norms, use)
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
        """Return the name in the file of a module that the adapter changes or replaces."""
        if name.endswith(_WHOLE):
            return self._replaced[name.removesuffix(_WHOLE)]
        return self._fused[name].stored if name in self._fused else self._modules[name]

    def _narrow(self, array: NDArray[Any]) -> NDArray[Any]:
        return array.astype(numpy_dtype(self._dtype)) if array.itemsize == 8 else array

    def _use_slices(
        self,
        name: str,
        read: Mapping[str, NDArray[Any]],
        norms: WeightNorms | None,
        use: Callable[[str, Slice], object],
    ) -> None:
        """Call `use` for each linear layer that computes with a module, of which `read` has the
        tensors."""
        module, scale = self._model.modules[name], self._scales[name]
        order = self.file.row_order(module.source, module.outputs, self._model.head_size)
        a = read["A"]
        by_row = {key: array for key, array in read.items() if key != "A"}
        if order is not None:
            by_row = {key: array[order] for key, array in by_row.items()}
        for it in module.uses:
            own = {key: _select(array, it.rows) for key, array in by_row.items()}
            b, bias, magnitude = (own.get(key) for key in ("B", "bias", "magnitude"))
            assert b is not None
            gain = offset = None
            if magnitude is not None and norms is not None:
                stored = module.source.name.rpartition(".")[0]  # also for a tied LM head
                changed = norms.compute(stored, it.rows, a, b, scale)
                gain = self._gain(name, magnitude, changed)
            if bias is not None and not it.columns.start:
                # Of the ranks that divide the inputs, the first one adds it.
                offset = np.float32(scale) * bias.astype(np.float32)
            columns = from_numpy(np.ascontiguousarray(a[:, it.columns]))
            outputs = from_numpy(np.ascontiguousarray(b))
            shape = it.shape
            one = Slice(shape.begin, shape.end, columns, outputs, scale, offset, gain)
            use(shape.layer, one)

    def _use_whole(
        self,
        name: str,
        read: Mapping[str, NDArray[Any]],
        use: Callable[[str, Replacement], object],
    ) -> None:
        """Call `use` for each layer that is a module, of which `read` has the tensors."""
        if name not in self._model.replaceable:
            return
        for layer, rows in self._model.replaceable[name].uses:
            own = {
                kind: from_numpy(np.ascontiguousarray(_select(array, rows)))
                for kind, array in read.items()
            }
            use(layer, Replacement(own["weight"], own.get("bias")))

    def _gain(
        self, name: str, magnitude: NDArray[Any], norms: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return the factors of the outputs of a DoRA.

        Raises:
            AdapterError: a factor is not finite.
        """
        with np.errstate(all="ignore"):
            gain = magnitude.astype(np.float32) / norms
        if not np.isfinite(gain).all():
            row = int(np.argmin(np.isfinite(gain)))
            raise AdapterError(
                f"{self.file.file}: a row of the changed weight of "
                f"{printable(self._modules[name])} has the norm {norms[row]}, which DoRA divides "
                "by; load an adapter of this model."
            )
        return gain


def _select(array: NDArray[Any], rows: Sequence[slice | IntArray]) -> NDArray[Any]:
    """Return parts of the rows of an array, one after the other."""
    parts = [array[part] for part in rows]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


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
        path: the folder that PEFT has written, a GGUF file, or a task of a model's own checkpoint,
            see `TaskAdapter`.
        root: folder that must contain the adapter, links followed; None: any place is allowed.

    Raises:
        AdapterError: the adapter is damaged, of a kind that is not supported, or outside of `root`.
    """
    with adapter_errors():
        if is_task(path):
            if root is not None:
                raise AdapterError(
                    f"{path} is a task of a model's own checkpoint; prompt_name chooses it."
                )
            return TaskAdapter(path)
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
    for stored, shape in file.copies.items():
        module = model.modules.get(model.by_stored(file).get(stored, ""))
        if module is not None:
            _check_shape(file, f"the copy of {printable(stored)} of the base is", shape, module)
    fused = {
        f"{name}{inner}": model.fused.match(name, f"{stored}{inner}", file, max_lora_rank)
        for stored, inner, name in containers
    }
    replaced = _match_replaced(file, model)
    twice = [stored for name, stored in replaced.items() if name in modules]
    if len(fused) < len(containers) or len(replaced) < len(file.trained) or twice:
        raise AdapterError(
            f"{file.file} changes or replaces a module under two names, or does both"
            f"{': ' + shorten_names(twice) if twice else ''}; save the adapter again."
        )
    check_single(file, fused, set(modules))
    of_experts = [stored for name, stored in modules.items() if name in model.fused.modules]
    of_experts += [match.stored for match in fused.values()]
    if any(len(file.factors[stored].tensors) > 2 for stored in of_experts):
        raise AdapterError(
            f"{file.file} changes {shorten_names(of_experts)}: DoRA (use_dora) and biases of B "
            f"(lora_bias) of experts are not supported. Train the adapter without them, or {MERGE}."
        )
    return Adapter(file, model, modules, replaced, fused, dtype)


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


def _match_replaced(file: AdapterFile, model: AdaptableModel) -> dict[str, str]:
    """Return the name in the file of each module that the adapter replaces.

    Raises:
        AdapterError: the model does not have a module, or adapters cannot replace it.
    """
    by_stored = model.by_stored(file)
    matched: dict[str, str] = {}
    for stored, tensors in file.trained.items():
        name = by_stored.get(stored, stored)
        known, module = model.replaceable.get(name), model.modules.get(name)
        found = {kind: tensor.shape for kind, tensor in tensors.items()}
        if module is not None and "weight" in found:
            _check_shape(file, f"{printable(stored)} is", found["weight"], module)
        if name not in model.elsewhere and known is None:
            raise AdapterError(
                f"{file.file} replaces {printable(stored)} (modules_to_save). "
                f"{_advice(module)}, or {MERGE}."
            )
        if known is not None and found != known.shapes:
            raise AdapterError(
                f"{file.file}: {printable(stored)} has {_shapes(found)}, and that of the model has "
                f"{_shapes(known.shapes)}. Load an adapter of a model with the same head."
            )
        matched[name] = stored
    return matched


def _advice(module: _Module | None) -> str:
    """Return what to do about a module that adapters cannot replace."""
    for layer, name in ((EMBED, "embed_tokens"), (_LM_HEAD, "lm_head")):
        if module is not None and any(use.shape.layer == layer for use in module.uses):
            return (
                f"Set lora_modules_to_save={name}, with which memory is planned for it in each "
                "adapter; train factors of it instead (target_modules)"
            )
    return (
        "Adapters can replace the embedding of tokens, the LM head and heads of classifiers only. "
        "Train factors of other modules instead (target_modules)"
    )


def _shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the shapes of tensors for an error message."""
    return " and ".join(f"{kind} {list(shape)}" for kind, shape in sorted(shapes.items()))


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
    if factors.of_embedding != module.is_embedding:
        raise AdapterError(
            f"{file.file}: the factors of {printable(stored)} are those of "
            f"{_kind_of(factors.of_embedding)}, and the model has {_kind_of(module.is_embedding)} "
            "there. Load an adapter of this model."
        )
    found = factors.b.shape[0], factors.a.shape[1]
    if factors.of_embedding:
        found = found[::-1]
    _check_shape(file, f"the factors of {printable(stored)} change", found, module)


def _kind_of(is_embedding: bool) -> str:
    return "an embedding" if is_embedding else "a linear layer"


def _check_shape(file: AdapterFile, what: str, found: tuple[int, ...], module: _Module) -> None:
    """Raise `AdapterError` if a weight in the file has another shape than the module's.

    Args:
        file: the file.
        what: beginning of a message about the weight.
        found: the weight's shape.
        module: the module.
    """
    if found == module.weight_shape:
        return
    added = found[0] - module.weight_shape[0] if found else 0
    if added > 0 and any(use.shape.layer in (EMBED, _LM_HEAD) for use in module.uses):
        advice = f"The training has added {added} tokens, which is not supported: {MERGE}."
    else:
        base = "" if file.base is None else f"It was trained for {printable(file.base)}. "
        advice = f"{base}Load an adapter of this model."
    raise AdapterError(
        f"{file.file}: {what} a weight {list(found)}, and that of the model is "
        f"{list(module.weight_shape)}. {advice}"
    )
