"""Adapters of a model: their factors for each of its linear layers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.adapter import (
    CONFIG,
    AdapterData,
    AdapterFile,
    PeftFolder,
    adapter_errors,
    check_opened,
    check_place,
)
from octavo.checkpoints.mapped_file import StoredTensor
from octavo.checkpoints.model_files import printable
from octavo.checkpoints.task_adapters import TaskAdapter, is_task
from octavo.errors import AdapterError
from octavo.models.adaptable_model import AdaptableModel, SliceShape
from octavo.models.adapter_match import AdapterMatch, match_adapter
from octavo.models.weight_norms import WeightNorms
from octavo.quantization.base import IntArray
from octavo.system.tensor import HostTensor, from_numpy, itemsize, numpy_dtype

PIECE_NBYTES = 2**20
"""Most bytes of several modules that are read together."""
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
class Replacement:
    """Layer in place of the model's."""

    weight: HostTensor
    """Weight [outputs, inputs] or [tokens, size], of the types of `Slice.a`, and finite."""
    bias: HostTensor | None
    """Bias [outputs]."""


class Adapter:
    """Adapter whose description has been read and checked against a model.

    Args:
        file: its files.
        model: the model.
        matched: the modules that it changes and replaces.
        dtype: type of weights and activations: float32, float16 or bfloat16.
    """

    def __init__(
        self,
        file: AdapterFile,
        model: AdaptableModel,
        matched: AdapterMatch,
        dtype: str,
    ) -> None:
        self.file = file
        self._model, self._dtype = model, dtype
        self._modules, self._replaced, self._fused = (
            matched.modules,
            matched.replaced,
            matched.fused,
        )
        self._scales = {name: file.scale(stored) for name, stored in self._modules.items()}
        for match in self._fused.values():
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
    return Adapter(file, model, match_adapter(file, model, max_lora_rank), dtype)
