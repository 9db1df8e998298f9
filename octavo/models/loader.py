"""From a checkpoint to a `Model`: read one tensor at a time, pack it, let it go."""

from __future__ import annotations

import math
import pkgutil
import re
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from octavo import _native
from octavo.errors import ModelError
from octavo.kernels.base import Ops, PackedWeight, QuantizedWeight
from octavo.kernels.memory import map_memory, release_memory
from octavo.layers.shared import SharedBuffers
from octavo.models.base import Model
from octavo.models.blocks.base import Parts
from octavo.models.model_files import refuse_lfs_pointer, require_file, without_weights
from octavo.models.sharded_state import ShardedState
from octavo.models.spec import ModelSpec, read_safetensors_header
from octavo.models.weight_cache import Progress, WeightCache, weights_key
from octavo.models.weights import (
    Source,
    Weight,
    shorten_names,
    weight_files,
)
from octavo.quantization.base import MOST_INPUTS, Quantization, get_quantization, linear_nbytes

LoadFormat = Literal["auto", "safetensors", "pt", "sharded_state", "dummy"]
_Loaded = Tensor | PackedWeight | QuantizedWeight

_SAFETENSORS_DTYPES = {"F64", "F32", "F16", "BF16"}
_TORCH_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
# Standard deviation 0.02, as models are initialised.
_DUMMY_BOUND = 0.02 * 3**0.5


def load_model(
    spec: ModelSpec,
    path: Path | str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    max_model_len: int | None = None,
    quantization: str | None = None,
    ops: Ops,
    progress: Progress | None = None,
    cache: WeightCache | None = None,
    keep: list[LoadedWeights] | None = None,
    shared: SharedBuffers | None = None,
) -> Model:
    """Loads a model folder.

    Names and shapes of all tensors are checked before the first is read. Files are mapped, and
    each tensor is packed straight from the map, so that memory stays near one copy of the model.
    Weights that are in the cache are read from there as they are.

    Args:
        spec: what the folder holds.
        path: the folder; not read for dummy weights.
        dtype: of weights and activations: float32, float16 or bfloat16; weights are converted.
        device: where to.
        load_format: auto and safetensors read *.safetensors; pt reads pytorch_model*.bin;
            sharded_state reads vLLM's files of each rank; dummy makes random weights.
        seed: of the random weights.
        max_model_len: rows of the rotary tables; default: the model's context.
        quantization: form of the linear weights, as in `ModelConfig`; they are quantized as they
            are read.
        ops: table of operations.
        progress: called as loading goes on.
        cache: where weights that were packed are kept from one start to the next.
        shared: where ranks put what they compute together, if the spec is a rank's part.
        keep: is given the model's weights, for whom will release them and read them again.

    Raises:
        ModelError: for missing, unexpected or wrong-shaped tensors, damaged files, and weights that
            cannot be quantized.
    """
    weights = LoadedWeights(
        spec,
        Path(path),
        dtype=dtype,
        device=device,
        load_format=load_format,
        seed=seed,
        quantization=quantization,
        ops=ops,
        cache=cache,
    )
    with torch.inference_mode():
        loaded = weights.load(progress)
        length = max_model_len or spec.max_model_len
        parts = Parts(loaded, ops, device=device, max_model_len=length, shared=shared)
        model = build_model(spec, parts)
    if keep is not None:
        keep.append(weights)
    return model


class LoadedWeights:
    """The weights of a model in memory, which can be given back to the system and taken again.

    Their addresses stay, so what was made of them (live blocks, captured steps) stays good.

    Args and Raises: as for `load_model`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        path: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        load_format: LoadFormat,
        seed: int,
        quantization: str | None,
        ops: Ops,
        cache: WeightCache | None,
    ) -> None:
        self._path, self._dtype, self._device, self._ops = path, dtype, device, ops
        self._form = form = get_quantization(quantization)
        self._weights = spec.weights(quantized=form is not None)
        for weight in self._weights:
            if form is not None and weight.kind == "linear" and weight.shape[1] > MOST_INPUTS:
                raise ModelError(
                    f"{weight.name} has {weight.shape[1]} inputs, and quantization={form.name} "
                    f"takes {MOST_INPUTS} at most; leave quantization out."
                )
        self._open = partial(open_checkpoint, spec, path, load_format, seed, device)
        self._key = partial(
            weights_key,
            spec,
            path,
            dtype=str(dtype).removeprefix("torch."),
            load_format=load_format,
            quantization=quantization,
        )
        self._cache = cache if ops.packs_weights else None
        self._memory = _Memory(self._weights, dtype, ops, form)
        self._made_of: bytes | None = None
        """The key of what was loaded."""

    @property
    def nbytes(self) -> int:
        """What they take in memory."""
        return self._memory.nbytes

    def load(self, progress: Progress | None = None) -> dict[str, _Loaded]:
        """Reads what the folder holds; by the weights' names."""
        self._made_of = self._key() if self._ops.packs_weights else None
        return self._read_cache(progress) or self._pack(progress)

    def release(self) -> None:
        """Gives their memory back to the system; they are zeros until they are read again."""
        if self._cache is not None and self._cache.writer is not None:
            self._cache.writer.join()  # it reads them
        self._memory.release()

    def reload(self, progress: Progress | None = None, *, same: bool) -> None:
        """Reads them again, to where they were.

        Args:
            progress: called as loading goes on.
            same: they must be those that were loaded; otherwise what the folder holds now.

        Raises:
            ModelError: they cannot be read, or are not the same any more.
        """
        with torch.inference_mode():
            if not same:
                self.load(progress)
            elif not self._read_cache(progress):
                if self._key() != self._made_of:
                    raise ModelError(
                        f"{self._path} has changed since the model was loaded. Put the old files "
                        "back, or take the new ones: sleep with level=2, then wake up."
                    )
                self._pack(progress)

    def _read_cache(self, progress: Progress | None) -> dict[str, _Loaded]:
        """The weights from the cache; empty if they are not there."""
        if self._cache is None or self._made_of is None:
            return {}
        if not self._memory.read(self._cache, self._made_of, progress):
            return {}
        return {weight.name: self._memory.wrap(weight) for weight in self._weights}

    def _pack(self, progress: Progress | None) -> dict[str, _Loaded]:
        """The weights from the checkpoint, which the cache is given, too."""
        made_of = self._made_of
        checkpoint = self._open()
        checkpoint.check(self._weights)
        loaded: dict[str, _Loaded] = {}
        total, done = sum(math.prod(weight.shape) for weight in self._weights), 0
        for weight in self._weights:
            loaded[weight.name] = _load(
                *(weight, checkpoint, self._ops, self._dtype, self._device),
                *(self._memory, self._form),
            )
            done += math.prod(weight.shape)
            if progress is not None:
                progress(done, total)
        if self._cache is not None and made_of is not None:
            self._memory.keep(self._cache, made_of, lambda: self._key() == made_of)
        return loaded


def read_tensor(folder: Path, name: str) -> Tensor:
    """A tensor of a folder's safetensors as it is.

    Raises:
        ModelError: if there is none of that name, or its file is damaged.
    """
    for file in weight_files(folder, "safetensors"):
        if name in read_safetensors_header(file):
            with safe_open(file, framework="pt") as tensors:
                tensor: Tensor = tensors.get_tensor(name)
                return tensor
    raise ModelError(f"{folder} lacks the tensor {name}.")


def build_model(spec: ModelSpec, parts: Parts) -> Model:
    """The model of weights that are loaded: all that `spec.weights()` lists."""
    model: Model = pkgutil.resolve_name(spec.model_class)(spec, parts)
    return model


class _Memory:
    """The memory of a model's weights: one mapping, so that huge pages are well filled."""

    def __init__(
        self,
        weights: list[Weight],
        dtype: torch.dtype,
        ops: Ops,
        form: Quantization | None,
    ) -> None:
        self._form = form
        self._dtype = dtype
        self._places: dict[str, slice] = {}
        self.nbytes = 0
        # Packed weights are whole cache lines; behind them the others need no gaps either.
        for weight in sorted(weights, key=lambda weight: weight.kind != "linear"):
            begin, self.nbytes = self.nbytes, self.nbytes + self._nbytes_of(weight)
            self._places[weight.name] = slice(begin, self.nbytes)
        self._memory = map_memory(self.nbytes) if ops.packs_weights else None

    def _nbytes_of(self, weight: Weight) -> int:
        if weight.kind != "linear":
            return math.prod(weight.shape) * self._dtype.itemsize
        n, k = weight.shape
        dtype = str(self._dtype).removeprefix("torch.")
        return linear_nbytes(n, k, dtype, self._form, weight.whole_rows)

    def place(self, weight: Weight) -> Tensor | None:
        """A weight's share, uint8; None for operations that keep weights as they are."""
        return None if self._memory is None else self._memory[self._places[weight.name]]

    def wrap(self, weight: Weight) -> _Loaded:
        """A weight whose share has been filled."""
        place = self.place(weight)
        assert place is not None
        if weight.kind != "linear":
            return place.view(self._dtype).view(weight.shape)
        n, k = weight.shape
        if self._form is not None:
            return self._form.wrap(place, n, k, _native.panel(), weight.whole_rows)
        return PackedWeight(place, n, k, self._dtype, _native.panel())

    def read(self, cache: WeightCache, key: bytes, progress: Progress | None) -> bool:
        """Fills all from a cache; False if that does not have it."""
        assert self._memory is not None
        found = cache.read(key, self._memory.numpy(), _native.num_threads(), progress)
        if not found:  # there may be anything in it now
            release_memory(self._memory)
        return found

    def release(self) -> None:
        """Gives all back to the system."""
        assert self._memory is not None, "these operations keep weights as they are"
        release_memory(self._memory)

    def keep(self, cache: WeightCache, key: bytes, still: Callable[[], bool]) -> None:
        """Puts all into a cache, in the background."""
        assert self._memory is not None
        cache.keep(key, self._memory.numpy(), still)


def _load(
    weight: Weight,
    checkpoint: Checkpoint,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    memory: _Memory,
    form: Quantization | None,
) -> _Loaded:
    parts = [part for s in weight.sources for part in _rows(s, checkpoint, weight)]
    out = memory.place(weight)
    result: _Loaded
    if weight.kind == "linear":
        # A list, so that no table of operations keeps the mapped file itself.
        rows = [_narrow(part.to(device), dtype, form).contiguous() for part in parts]
        if form is None:
            result = ops.pack_weight(rows, dtype, out)
        else:
            result = form.pack(ops, rows, out, weight.whole_rows)
    else:
        if out is None:
            result = torch.empty(weight.shape, dtype=dtype, device=device)
        else:
            result = out.view(dtype).view(weight.shape)
        torch.cat([part.to(device, dtype) for part in parts], out=result)
    for part in parts:
        checkpoint.done(part)
    return result


def _narrow(part: Tensor, dtype: torch.dtype, form: Quantization | None) -> Tensor:
    """A part of a weight as packing takes it: float64 is rounded once, to the weight's type."""
    if part.dtype != torch.float64:
        return part
    return part.to(dtype if form is None else torch.float32)


def _rows(source: Source, checkpoint: Checkpoint, weight: Weight) -> list[Tensor]:
    """The rows of a source that go into a weight; nothing else of it is touched."""
    tensor = checkpoint.read(source, weight)
    if source.transform == "by_group":
        queries = source.group_queries
        heads = torch.arange(len(tensor)).view(source.groups, queries + 2, -1)
        order = torch.cat(
            [part.flatten() for part in heads.split_with_sizes((queries, 1, 1), dim=1)]
        )
        parts = source.parts or ((0, len(order)),)
        return [tensor[order[begin:end].to(tensor.device)] for begin, end in parts]
    match source.transform:
        case "transpose":
            tensor = tensor.T
        case "skip_rows":
            tensor = tensor[source.shape[0] - weight.shape[0] :]
    if source.columns is not None:
        begin, end = source.columns
        tensor = tensor[:, begin:end]
    if source.parts is None:
        return [tensor]
    return [tensor[begin:end] for begin, end in source.parts]


class Checkpoint(Protocol):
    """Where tensors come from."""

    def check(self, weights: list[Weight]) -> None:
        """Compares names, shapes and dtypes with what the model needs."""

    def read(self, source: Source, weight: Weight) -> Tensor:
        """One tensor of the checkpoint, as it is stored."""
        ...

    def done(self, tensor: Tensor) -> None:
        """Called when a tensor that was read, or what was made of it, is needed no more."""


class _DummyCheckpoint:
    """Random weights, made on the device: of the seed and a tensor's name, so ties stay tied."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.device = device

    def check(self, weights: list[Weight]) -> None:
        """Nothing can be wrong."""

    def read(self, source: Source, weight: Weight) -> Tensor:
        """What norms have, or uniform numbers with standard deviation 0.02."""
        if weight.dummy is not None:
            return torch.full(source.shape, weight.dummy)
        generator = torch.Generator(self.device)
        generator.manual_seed(zlib.crc32(source.name.encode(), self.seed & 0xFFFFFFFF))
        tensor = torch.empty(source.shape, device=self.device)
        return tensor.uniform_(-_DUMMY_BOUND, _DUMMY_BOUND, generator=generator)

    def done(self, tensor: Tensor) -> None:
        """Nothing is kept."""


class _ShardedCheckpoint:
    """Parts of ranks, which are put together as they are read."""

    def __init__(self, spec: ModelSpec, folder: Path) -> None:
        self.state = ShardedState(spec, folder)

    def check(self, weights: list[Weight]) -> None:
        """See `ShardedState.check`."""
        self.state.check([source for weight in weights for source in weight.sources])

    def read(self, source: Source, weight: Weight) -> Tensor:
        """A copy, of the parts of all ranks."""
        return self.state.read(source)

    def done(self, tensor: Tensor) -> None:
        """Nothing is kept."""


class _FileCheckpoint:
    """What safetensors and PyTorch files have in common."""

    def __init__(self, spec: ModelSpec, folder: Path) -> None:
        self.spec = spec
        self.folder = folder
        self.files: dict[str, Path] = {}
        """Tensor name -> file."""

    def describe(self, name: str) -> tuple[tuple[int, ...], str | None]:
        """Shape, and the dtype if it is one that cannot be read."""
        raise NotImplementedError

    def stored_name(self, name: str) -> str | None:
        """The name under which a tensor is stored; bare models lack a prefix."""
        for candidate in (name, name.removeprefix(self.spec.bare_prefix)):
            if candidate in self.files:
                return candidate
        return None

    def check(self, weights: list[Weight]) -> None:
        """Compares names, shapes and dtypes with what the model needs.

        Raises:
            ModelError: naming the tensors.
        """
        sources = [source for weight in weights for source in weight.sources]
        missing = [s.name for s in sources if self.stored_name(s.name) is None]
        if missing:
            raise ModelError(
                f"{self.folder} lacks {len(missing)} tensors of {self.spec.architecture}: "
                f"{shorten_names(missing)}. The download may be incomplete, or config.json belongs "
                "to another checkpoint."
            )
        used = {self.stored_name(s.name) for s in sources}
        elsewhere = {self.stored_name(name) for name in self.spec.elsewhere}
        extra = [
            name
            for name in self.files
            if name not in used
            and name not in elsewhere
            and not any(re.fullmatch(pattern, name) for pattern in self.spec.ignored)
        ]
        if extra:
            raise ModelError(
                f"{self.folder} holds {len(extra)} tensors that {self.spec.architecture} with this "
                f"config.json does not have: {shorten_names(extra)}."
            )
        for source in sources:
            name = self.stored_name(source.name)
            assert name is not None
            shape, wrong_dtype = self.describe(name)
            if shape != source.shape:
                raise ModelError(
                    f"{self.files[name]}: {name} has shape {list(shape)}, but config.json asks for "
                    f"{list(source.shape)}."
                )
            if wrong_dtype is not None:
                raise ModelError(
                    f"{self.files[name]}: {name} has type {wrong_dtype}; supported: float64, "
                    "float32, float16, bfloat16."
                )


class _SafetensorsCheckpoint(_FileCheckpoint):
    def __init__(self, spec: ModelSpec, folder: Path) -> None:
        super().__init__(spec, folder)
        self.headers: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.open_files: dict[Path, Any] = {}
        files = weight_files(folder, "safetensors")
        if not files:
            if any(folder.glob("*.bin")):
                raise ModelError(
                    f"{folder} holds PyTorch .bin files and no safetensors. They are pickles, "
                    "which can run code when they are read; load_format=pt reads them all the "
                    "same, with torch's restricted unpickler."
                )
            raise without_weights(folder, "*.safetensors")
        for file in files:
            header = read_safetensors_header(file)
            self.headers.update(header)
            self.files.update(dict.fromkeys(header, file))
            self.open_files[file] = safe_open(file, framework="pt")

    def describe(self, name: str) -> tuple[tuple[int, ...], str | None]:
        """From the header."""
        dtype, shape = self.headers[name]
        return shape, None if dtype in _SAFETENSORS_DTYPES else dtype

    def read(self, source: Source, weight: Weight) -> Tensor:
        """A view of the mapped file."""
        name = self.stored_name(source.name)
        assert name is not None
        tensor: Tensor = self.open_files[self.files[name]].get_tensor(name)
        return tensor

    def done(self, tensor: Tensor) -> None:
        """Its pages of the mapped file need not stay in memory."""
        if tensor.is_contiguous():
            _native.release_pages(tensor.data_ptr(), tensor.nbytes)


class _TorchCheckpoint(_FileCheckpoint):
    def __init__(self, spec: ModelSpec, folder: Path) -> None:
        super().__init__(spec, folder)
        self.tensors: dict[str, Tensor] = {}
        files = weight_files(folder, "pt")
        if not files:
            raise without_weights(folder, "pytorch_model*.bin")
        for file in files:
            require_file(file)
            refuse_lfs_pointer(file)
            try:
                # Files older than torch 1.6 are no zip archives and cannot be mapped.
                state = torch.load(
                    file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
                )
            except Exception as error:  # the unpickler lets through whatever a broken file causes
                reason = str(error).strip().splitlines()[0] if str(error).strip() else "empty"
                raise ModelError(
                    f"{file} is damaged, cut off, or holds more than tensors ({reason})."
                ) from None
            if not isinstance(state, dict) or not all(
                isinstance(t, Tensor) for t in state.values()
            ):
                raise ModelError(f"{file} must hold a dictionary of tensors.")
            self.tensors.update(state)
            self.files.update(dict.fromkeys(state, file))

    def describe(self, name: str) -> tuple[tuple[int, ...], str | None]:
        """From the tensor."""
        tensor = self.tensors[name]
        wrong = None if tensor.dtype in _TORCH_DTYPES else str(tensor.dtype)
        return tuple(tensor.shape), wrong

    def read(self, source: Source, weight: Weight) -> Tensor:
        """The tensor."""
        name = self.stored_name(source.name)
        assert name is not None
        return self.tensors[name]

    def done(self, tensor: Tensor) -> None:
        """The file stays mapped until all is loaded."""


def open_checkpoint(
    spec: ModelSpec, folder: Path, load_format: LoadFormat, seed: int, device: torch.device
) -> Checkpoint:
    """Return the weights of a folder; `load_format` as in `load_model`.

    Raises:
        ModelError: the folder holds none, or they cannot be read.
    """
    match load_format:
        case "dummy":
            return _DummyCheckpoint(seed, device)
        case "pt":
            return _TorchCheckpoint(spec, folder)
        case "sharded_state":
            return _ShardedCheckpoint(spec, folder)
        case "auto" | "safetensors":
            return _SafetensorsCheckpoint(spec, folder)
