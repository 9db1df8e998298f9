"""Loader of a `Model` from a checkpoint: it reads, packs and releases one tensor at a time."""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.checkpoints.base import Checkpoint, Source, Tensors
from octavo.errors import ModelError
from octavo.kernels.base import Ops
from octavo.kernels.memory import map_memory, release_memory
from octavo.kernels.weights import PackedWeight, QuantizedWeight
from octavo.layers.adapter import Adapters
from octavo.layers.expert_exchange import ExpertExchange
from octavo.layers.shared import SharedBuffers
from octavo.models.base import Model
from octavo.models.blocks.base import Parts
from octavo.models.expert_cache import ExpertCache
from octavo.models.spec import ModelSpec
from octavo.models.weight_cache import Image, Progress, WeightCache, weights_key
from octavo.models.weights import Weight
from octavo.quantization.base import IntArray, Part, TensorError
from octavo.system.tensor import (
    HostTensor,
    Tensor,
    dense,
    empty,
    from_numpy,
    full,
    itemsize,
    numpy_dtype,
)

_Loaded = Tensor | PackedWeight | QuantizedWeight


def load_model(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    *,
    dtype: str,
    max_model_len: int | None = None,
    ops: Ops,
    progress: Progress | None = None,
    cache: WeightCache | None = None,
    keep: list[LoadedWeights] | None = None,
    shared: SharedBuffers | None = None,
    expert_slots: int = 0,
    exchange: ExpertExchange | None = None,
    adapters: Adapters | None = None,
) -> Model:
    """Load a model.

    Names and shapes of all tensors are checked before the first is read. Files are mapped, and
    each tensor is packed directly from the map, so loading needs little more memory than the
    model. Weights in the cache are read from there unchanged.

    Args:
        spec: the model, or a rank's part of it; its weights have their forms.
        checkpoint: the model's tensors.
        dtype: type of weights and activations: float32, float16 or bfloat16.
        max_model_len: rows of the rotary tables; default: the model's context.
        ops: the table of operations.
        progress: called while tensors are loaded.
        cache: stores packed weights for the next start.
        shared: the buffers that ranks share, if the spec is a rank's part.
        expert_slots: number of experts in memory, while all are in the cache's file; 0: all are in
            memory.
        exchange: exchange with other engines, if the spec has a share of the experts.
        adapters: changes of adapters to linear layers; None: adapters are off.
        keep: a list to which the weights are added, so that they can be released and read again.

    Raises:
        ModelError: a tensor is missing, unexpected or has a wrong shape, a file is damaged, or a
            weight cannot be quantized.
        ConfigError: the cache has no room for the experts.
    """
    weights = LoadedWeights(
        spec,
        checkpoint,
        dtype=dtype,
        ops=ops,
        cache=cache,
        expert_slots=expert_slots,
    )
    loaded = weights.load(progress)
    length = max_model_len or spec.max_model_len
    experts = None if weights.experts is None else weights.experts.layers
    parts = Parts(
        loaded,
        ops,
        dtype=dtype,
        max_model_len=length,
        shared=shared,
        cached=experts,
        expert_slots=expert_slots,
        exchange=exchange,
        adapters=adapters,
    )
    model = build_model(spec, parts)
    if keep is not None:
        keep.append(weights)
    return model


class LoadedWeights:
    """Weights of a model in memory, which can be released and read again.

    Their addresses stay the same, so live blocks and captured steps that use them stay valid.

    Args and Raises: as for `load_model`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        *,
        dtype: str,
        ops: Ops,
        cache: WeightCache | None,
        expert_slots: int = 0,
    ) -> None:
        self._checkpoint, self._dtype, self._ops = checkpoint, dtype, ops
        self._weights = spec.weights()
        check_inputs(self._weights)
        self._open = partial(checkpoint.open, spec.expected)
        self._key = partial(weights_key, spec, checkpoint, dtype)
        self._cache = cache if ops.packs_weights else None
        self._memory = _Memory(self._weights, dtype, ops, expert_slots)
        self._made_of: bytes | None = None
        """Key of the loaded weights."""

    @property
    def experts(self) -> ExpertCache | None:
        """The experts; None: all are in memory."""
        return self._memory.experts

    @property
    def nbytes(self) -> int:
        """Number of bytes in memory."""
        return self._memory.nbytes

    def load(self, progress: Progress | None = None) -> dict[str, _Loaded]:
        """Read the weights from the cache or the checkpoint; return them by name."""
        self._made_of = self._key() if self._ops.packs_weights else None
        if self.experts is None:
            return self._read_cache(progress) or self._pack(progress)
        return self._read_cache(progress) or self._pack_experts(progress)

    def open(self) -> Tensors:
        """Open the checkpoint again.

        Raises:
            ModelError: it has changed since the weights were loaded, or cannot be read.
        """
        if self._made_of is not None and self._key() != self._made_of:
            raise ModelError(
                f"{self._checkpoint.path} has changed since the model was loaded. Put the old "
                "files back, or start again."
            )
        return self._open()

    @property
    def is_busy(self) -> bool:
        """True while a thread writes the weights to the cache: they must not change."""
        writer = None if self._cache is None else self._cache.writer
        return writer is not None and writer.is_alive()

    def wait(self) -> None:
        """Wait until the weights may change."""
        if self._cache is not None and self._cache.writer is not None:
            self._cache.writer.join()

    def release(self) -> None:
        """Release the memory to the system; the weights are zeros until they are read again."""
        self.wait()
        self._memory.release()

    def reload(self, progress: Progress | None = None, *, same: bool) -> None:
        """Read the weights again, to the same addresses.

        Args:
            progress: called while tensors are loaded.
            same: True if the weights must not have changed; False to read the checkpoint's
                current weights.

        Raises:
            ModelError: the weights cannot be read, or have changed.
        """
        if not same:
            self.load(progress)
        elif not self._read_cache(progress):
            if self._key() != self._made_of:
                raise ModelError(
                    f"{self._checkpoint.path} has changed since the model was loaded. Put the "
                    "old files back, or load the new ones: sleep with level=2, then wake up."
                )
            if self.experts is None:
                self._pack(progress)
            else:
                self._pack_experts(progress)

    def _read_cache(self, progress: Progress | None) -> dict[str, _Loaded]:
        """Return the weights from the cache; empty if it does not have them."""
        if self._cache is None or self._made_of is None:
            return {}
        if not self._memory.read(self._cache, self._made_of, progress):
            return {}
        return {weight.name: self._memory.wrap(weight) for weight in self._weights}

    def _pack(self, progress: Progress | None) -> dict[str, _Loaded]:
        """Return the weights from the checkpoint, and add them to the cache."""
        made_of = self._made_of
        tensors = self._open()
        loaded: dict[str, _Loaded] = {}
        total, done = sum(math.prod(weight.shape) for weight in self._weights), 0
        for weight in self._weights:
            loaded[weight.name] = self._load(weight, tensors)
            done += math.prod(weight.shape)
            if progress is not None:
                progress(done, total)
        if self._cache is not None and made_of is not None:
            self._memory.keep(self._cache, made_of, lambda: self._key() == made_of)
        return loaded

    def _pack_experts(self, progress: Progress | None) -> dict[str, _Loaded]:
        """Return the weights from the checkpoint, and write the experts to the cache's file."""
        made_of, cache, experts = self._made_of, self._cache, self.experts
        assert made_of is not None, "no file has these weights"
        assert cache is not None
        assert experts is not None
        experts.release()
        tensors, loaded = self._open(), {}
        total, done = sum(math.prod(weight.shape) for weight in self._weights), 0
        with cache.create(made_of, self._memory.image, self._memory.numpy()) as writer:
            for expert, weights in groupby(self._weights, lambda weight: weight.expert):
                group = list(weights)
                for weight in group:
                    loaded[weight.name] = self._load(weight, tensors)
                    done += math.prod(weight.shape)
                    if progress is not None:
                        progress(done, total)
                if expert is not None:
                    begin, end = self._memory.range_of(group)
                    writer.write(begin, experts.memory.numpy()[: end - begin])
            if self._key() != made_of:
                raise ModelError(
                    f"{self._checkpoint.path} has changed while it was read; start again."
                )
        experts.open(writer.file)
        experts.release()
        return loaded

    def _load(self, weight: Weight, tensors: Tensors) -> _Loaded:
        """Return a weight from the checkpoint: packed, if it is linear."""
        return _load(weight, tensors, self._memory.place(weight), self._dtype, self._ops)


class ExpertReader:
    """Reader of single experts, which replace loaded ones. It implements `ExpertSource`.

    Args:
        spec: the layers with all of their experts.
        checkpoint: tensors of the model.
        dtype: type of weights and activations.
        ops: the table of operations.
        loaded: the loaded weights.
    """

    def __init__(
        self, spec: ModelSpec, checkpoint: Checkpoint, dtype: str, ops: Ops, loaded: LoadedWeights
    ) -> None:
        self._spec, self._checkpoint, self._dtype, self._ops = spec, checkpoint, dtype, ops
        self._loaded = loaded
        self._tensors: Tensors | None = None
        self._weights: dict[tuple[str, int], list[Weight]] = {}

    @property
    def is_busy(self) -> bool:
        """See `LoadedWeights`."""
        return self._loaded.is_busy

    def wait(self) -> None:
        """See `LoadedWeights`."""
        self._loaded.wait()

    def load(self, block: str, index: int, up: NDArray[np.uint8], down: NDArray[np.uint8]) -> None:
        """Implement `ExpertSource`."""
        if self._tensors is None:
            self._tensors = self._checkpoint.open(self._spec.expected)
            for weight in self._spec.weights():
                if weight.expert is not None:
                    key = weight.expert.block, weight.expert.index
                    self._weights.setdefault(key, []).append(weight)
        for weight, out in zip(self._weights[block, index], (up, down), strict=True):
            _load(weight, self._tensors, from_numpy(out), self._dtype, self._ops)


def _load(
    weight: Weight, tensors: Tensors, out: HostTensor | None, dtype: str, ops: Ops
) -> _Loaded:
    """Return a weight from the checkpoint, in the memory `out`: packed, if it is linear."""
    parts, whole = read_parts(weight, tensors)
    result: _Loaded
    if weight.kind == "linear":
        try:
            result = weight.form.pack(ops, parts, weight.packed(dtype), out)
        except TensorError as error:
            raise with_module(error, weight.sources[0]) from None
    else:
        dtype = weight.dtype or dtype
        whole_weight = (
            empty(*weight.shape, dtype=dtype) if out is None else out.view(dtype).view(weight.shape)
        )
        np.concatenate(
            [_same_bytes(tensor, dtype) for (tensor,) in parts],
            out=_same_bytes(whole_weight, dtype),
        )
        result = ops.to_device(whole_weight)
    for tensor in whole:
        tensors.done(tensor)
    return result


def check_inputs(weights: Iterable[Weight]) -> None:
    """Check that the forms of all weights support their numbers of inputs.

    Raises:
        ModelError: a weight has more inputs than its form supports.
    """
    for weight in weights:
        limit = weight.form.max_inputs
        if limit is not None and weight.shape[1] > limit:
            raise ModelError(
                f"{weight.name} has {weight.shape[1]} inputs, and quantization="
                f"{weight.form.name} supports {limit} at most; leave quantization out."
            )


def build_model(spec: ModelSpec, parts: Parts) -> Model:
    """Return the live model of loaded weights: all that `spec.weights()` lists."""
    model: Model = pkgutil.resolve_name(spec.model_class)(spec, parts)
    return model


class _Memory:
    """Memory of a model's weights: one mapping, so that huge pages are well filled."""

    def __init__(self, weights: list[Weight], dtype: str, ops: Ops, expert_slots: int = 0) -> None:
        self._dtype = dtype
        self._places: dict[str, slice] = {}  # in the image
        nbytes = 0
        # Packed weights fill whole cache lines; stored first, they leave no gaps before the others.
        # Those with a type of their own have the largest numbers of the others.
        for weight in sorted(weights, key=lambda w: (w.kind != "linear", w.dtype is None)):
            begin, nbytes = nbytes, nbytes + weight.nbytes(dtype)
            self._places[weight.name] = slice(begin, nbytes)
        groups = groupby(weights, lambda weight: weight.expert)
        ranges = {key: self.range_of(list(group)) for key, group in groups if key is not None}
        self._experts, self.experts = ranges, None
        self.image = Image(nbytes, tuple(ranges.values()))
        self._held = dict(self._places)  # in memory
        if expert_slots:
            self.experts = ExpertCache(weights, self._places, dtype, expert_slots)
            left_out = 0
            for weight in sorted(weights, key=lambda w: self._places[w.name].start):
                place = self._places[weight.name]
                self._held[weight.name] = slice(place.start - left_out, place.stop - left_out)
                if weight.expert is not None:
                    left_out += place.stop - place.start
            nbytes -= left_out
        self._memory = map_memory(nbytes) if ops.packs_weights else None
        self.nbytes = nbytes + (0 if self.experts is None else self.experts.memory.nbytes)

    def range_of(self, weights: list[Weight]) -> tuple[int, int]:
        """Return the bytes [begin, end) of successive weights in the image."""
        return self._places[weights[0].name].start, self._places[weights[-1].name].stop

    def numpy(self) -> NDArray[np.uint8]:
        """Return the memory of all weights that are not in an expert cache."""
        assert self._memory is not None
        array: NDArray[np.uint8] = self._memory.numpy()
        return array

    def place(self, weight: Weight) -> HostTensor | None:
        """Return a weight's memory, uint8; None for operations that do not pack weights."""
        if self.experts is not None and weight.expert is not None:
            return self.experts.place(weight, self._experts[weight.expert][0])
        return None if self._memory is None else self._memory[self._held[weight.name]]

    def wrap(self, weight: Weight) -> _Loaded:
        """Return a weight on its filled memory."""
        place = self.place(weight)
        assert place is not None
        if weight.kind != "linear":
            return place.view(weight.dtype or self._dtype).view(weight.shape)
        return weight.form.wrap(place, weight.packed(self._dtype))

    def read(self, cache: WeightCache, key: bytes, progress: Progress | None) -> bool:
        """Fill all memory from a cache; return False if the cache does not have the weights."""
        assert self._memory is not None
        memory, threads = self.numpy(), _native.num_threads()
        if self.experts is None:
            found = cache.read(key, memory, threads, progress, self.image)
        else:
            file = cache.read_without_experts(key, self.image, memory, threads, progress)
            if found := file is not None:
                self.experts.open(file)
        if not found:  # its contents are undefined now
            release_memory(self._memory)
        return found

    def release(self) -> None:
        """Release all memory to the system."""
        assert self._memory is not None, "these operations keep weights as they are"
        release_memory(self._memory)
        if self.experts is not None:
            self.experts.release()

    def keep(self, cache: WeightCache, key: bytes, still: Callable[[], bool]) -> None:
        """Write all memory into a cache, in the background."""
        cache.keep(key, self.numpy(), still, self.image)


def _same_bytes(tensor: HostTensor, dtype: str) -> NDArray[Any]:
    """Return the numbers of a tensor in a type; in a type that numpy lacks, as unsigned integers.

    numpy copies those faster.
    """
    array: NDArray[Any] = tensor.numpy()
    array = array if tensor.dtype == dtype else array.astype(numpy_dtype(dtype))
    return array.view(np.uint16) if itemsize(dtype) == 2 else array


def read_parts(weight: Weight, tensors: Tensors) -> tuple[list[Part], list[HostTensor]]:
    """Return the parts of a weight, module by module, and the whole tensors that contain them.

    Args:
        weight: the weight.
        tensors: the open checkpoint.

    Raises:
        ModelError: the numbers of a tensor are impossible.
    """
    parts, whole = [], []
    step = weight.form.num_tensors
    for begin in range(0, len(weight.sources), step):
        sources = weight.sources[begin : begin + step]
        turned, read = read_turned(sources, tensors)
        whole += read
        try:
            parts += weight.form.cut(turned, rows_of(sources[0], weight), sources[0].columns)
        except TensorError as error:
            raise with_module(error, sources[0]) from None
    return parts, whole


def read_turned(
    sources: Sequence[Source], tensors: Tensors
) -> tuple[list[HostTensor], list[HostTensor]]:
    """Return tensors after the changes of their sources that do not select rows.

    The second list has the whole tensors that contain them.
    """
    whole = [tensors.read(source) for source in sources]
    ordered = [
        tensor if source.order is None else from_numpy(tensor.numpy()[list(source.order)])
        for tensor, source in zip(whole, sources, strict=True)
    ]
    turned = [_turned(tensor, source) for tensor, source in zip(ordered, sources, strict=True)]
    return turned, whole


def _turned(tensor: HostTensor, source: Source) -> HostTensor:
    """Return a tensor after the changes of its source that do not select rows."""
    match source.transform:
        case "transpose" | "swap":
            return tensor.T
        case "flat":
            return tensor.view(-1)
        case "flat_or_zeros":
            size = math.prod(source.shape)
            return tensor.view(-1) if tensor.numel() else full((size,), 0.0, tensor.dtype)
        case "padded":
            numbers = tensor.numpy()
            return from_numpy(np.concatenate([numbers, np.zeros_like(numbers)]))
        case "flat_rows":
            return tensor.view(tensor.shape[0], -1)
        case "softplus":
            return from_numpy(np.logaddexp(0, dense(tensor, "float32").numpy()).astype(np.float32))
        case "taps":
            taps = tensor.numpy().reshape(source.shape)
            return from_numpy(taps.swapaxes(1, 2).reshape(len(taps), -1))
    return tensor


def with_module(error: TensorError, source: Source) -> ModelError:
    """Return the error with the name of the source's module."""
    if source.index is not None:
        return ModelError(f"{source.name}[{source.index}]: {error}")
    return ModelError(f"{source.name.rpartition('.')[0]}.{error}")


def rows_of(source: Source, weight: Weight) -> list[slice | IntArray]:
    """Return the rows of a module that a weight needs, in the order in which it has them."""
    parts = source.parts
    if source.alternate or source.transform in ("by_group", "by_shard", "halves"):
        rows = weight.whole_rows
        order = source.row_order(rows)
        return [order[begin:end] for begin, end in parts or ((0, rows),)]
    match source.transform:
        case "skip_rows":
            parts = ((source.shape[0] - weight.shape[0], source.shape[0]),)
    return [slice(None)] if parts is None else [slice(*part) for part in parts]
