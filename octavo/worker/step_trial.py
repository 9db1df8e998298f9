"""Trial of the steps of a model without its weights: the cost of a step of any size.

The model is recorded as the engine records it, with its own blocks and kernels. There are two
trials. In the first one, weights are zeros that have no memory of their own: the system maps them
all to one page, which stays in the caches. Equal layers are alike, so one of each kind runs, and
takes the time of computing. In the second one, weights, keys, values and states have memory, and as
many layers run, in their order, as read more than the caches hold. They take the time of a step. So
a model that exceeds the memory can be tried.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octavo import _native
from octavo.attention.cpu import CPUAttention
from octavo.kernels.memory import Arena, map_memory, placeholder
from octavo.kernels.native import NativeOps
from octavo.kernels.ops_logits import SAMPLING_ROW
from octavo.kernels.weights import PackedWeight, QuantizedWeight
from octavo.kv_cache.groups import KVCacheConfig
from octavo.layers.layer import Layer
from octavo.layers.seen_lens import SEEN_LENS
from octavo.layers.state_table import SNAPSHOT_SLOTS, STATE_SLOTS, STATE_SOURCES
from octavo.layers.step import StepContext
from octavo.layers.step_table import StepLayout, StepTable
from octavo.models.blocks.base import Parts
from octavo.models.blocks.layer import LayerSpec
from octavo.models.cache import CacheSpec
from octavo.models.decoder import DecoderModel
from octavo.models.spec import ModelSpec
from octavo.models.state_cache import StateCache
from octavo.models.weights import Weight
from octavo.plan.memory import Scratch
from octavo.plan.setup import WorkerSetup
from octavo.plan.step_cost import OTHER, Batch, KernelCost, StepCost, distinct_experts
from octavo.quantization.plain import PLAIN
from octavo.system.dtypes import DTYPE_NBYTES
from octavo.system.tensor import HostTensor, Tensor, from_numpy, full
from octavo.worker.graphs import EagerSteps
from octavo.worker.input_batch import StepBuffers

_ALIGNMENT = 64
_FEW_TOKENS = 32
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 10
_SECONDS, _MEMORY_SECONDS = 0.02, 0.15
"""Parts run as often as this time permits, within these numbers."""
_CACHE_SHARE = 1 / 4
"""Part of the memory that is for keys, values and states."""

_Loaded = Tensor | PackedWeight | QuantizedWeight


@dataclass(frozen=True)
class _Part:
    """Part of a step that is measured.

    Attributes:
        run: runs it.
        prepare: sets its inputs.
        times: times that a step has it.
    """

    run: Callable[[], object]
    prepare: Callable[[], None] = lambda: None
    times: float = 1.0


class StepTrial:
    """Trial of a model's steps on this machine, with the current number of kernel threads.

    Args:
        setup: the worker's setup, for the whole model in one process.
        scratch: memory of its steps.
        max_len: longest context of a step, in tokens.
        num_reqs: most requests of a step.
        memory: memory of caches and weights, which use it in turns; None: a trial of computing.
        most_seconds: time for the layers of one kind in one step. Longer steps are tried with fewer
            tokens.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        scratch: Scratch,
        max_len: int,
        num_reqs: int,
        memory: HostTensor | None = None,
        most_seconds: float = 0.06,
    ) -> None:
        self._setup, self._memory, self._most_seconds = setup, memory, most_seconds
        self._ops, spec = NativeOps(), setup.spec
        nbytes = 0 if memory is None else memory.nbytes
        self._cache_room = int(nbytes * _CACHE_SHARE)
        self._kinds = _Kinds(spec, setup.dtype, nbytes - self._cache_room)
        self._absent: set[str] = set()
        size = setup.largest_step
        self._random = _random(2 * size.tokens * spec.stream_size)
        block_size = setup.config.cache.block_size
        self._blocks = self._num_blocks = -(-max_len // block_size)
        parts = Parts(self._make_weights(), self._ops, dtype=setup.dtype, max_model_len=max_len)
        self._model = DecoderModel(spec, parts)
        self._outer, self._head = _native.Plan(), _native.Plan()
        kv = KVCacheConfig(1, block_size, setup.kv_cache_groups)
        layout = StepLayout(size, self._blocks, len(kv.groups), spec.step_arrays)
        self._buffers = StepBuffers(layout)
        eager = EagerSteps(
            self._model,
            self._ops,
            CPUAttention(),
            self._make_caches(num_reqs),
            [group.cache for group in kv.groups],
            kv.layer_to_group,
            self._buffers,
        )
        table: StepTable[Tensor] = self._buffers.table.map(self._ops.to_device)
        self._layers: list[_RecordedLayer] = []
        for index, layer in enumerate(self._model.layers):
            self._layers.append(_RecordedLayer(layer, self._outer, held=index in self._kinds.run))
        self._model.layers[:] = self._layers
        kept = size.tokens * spec.stream_size * DTYPE_NBYTES["float32"] * 2
        self._arenas = (
            Arena(2 * (scratch.activations + kept * len(self._kinds.run))),
            Arena(2 * scratch.logits),
        )
        step = eager.context(table, size.tokens, 0)
        with self._ops.record(self._outer, self._arenas[0]):
            self._hidden = self._model.forward(table.input_ids, step)
        self._head.bind("samples")
        with self._ops.record(self._head, self._arenas[1]):
            self._logits = self._model.head(self._hidden, table.logits_indices)
        self._owners = eager, step, table

    def run(self, batch: Batch, samples: int = 1) -> StepCost:
        """Return the cost of a step with samples of each request, without the host's part.

        With memory, the seconds of kernels are those of computing and reading. Kernels that read
        weights larger than the memory are left out.
        """
        self._fill(batch)
        outer, ends = self._part(self._outer, batch), self._ends(samples * len(batch))
        if self._memory is None:
            kernels = [*self._measure([outer]), *self._measure(ends)]
            for index in self._kinds.run:
                kernels += self._try_layer(index, batch)
            return StepCost.of(kernels)
        layers = [self._layer(index, batch) for index in self._kinds.run]
        found = StepCost.of(self._measure([outer, *layers, *ends], _MEMORY_SECONDS))
        kernels = [k for k in found.kernels if k.name.rpartition(" ")[2] not in self._absent]
        return StepCost.of(kernels)

    # Construction

    def _make_weights(self) -> dict[str, _Loaded]:
        """Return all weights; those of layers that never run have no memory."""
        setup, weights = self._setup, self._setup.spec.weights()
        sizes = {w.name: -(-w.nbytes(setup.dtype) // _ALIGNMENT) * _ALIGNMENT for w in weights}
        runs = {weight.name for weight in weights if self._kinds.runs(weight)}
        if self._memory is None:
            memory = map_memory(sum(sizes[name] for name in runs))
        else:
            memory = self._memory[self._cache_room :]
        place = 0
        found: dict[str, _Loaded] = {}
        for weight in weights:
            size = weight.nbytes(setup.dtype)
            if weight.name not in runs:
                data = placeholder(size, dtype="uint8")
            elif sizes[weight.name] > memory.nbytes:
                data = map_memory(size)
                self._absent.add("x".join(map(str, weight.shape)))
            else:
                place = place if place + sizes[weight.name] <= memory.nbytes else 0
                data = memory[place : place + size]
                place += sizes[weight.name]
            if weight.kind == "linear":
                found[weight.name] = weight.form.wrap(data, weight.packed(setup.dtype))
            else:
                found[weight.name] = data.view(weight.dtype or setup.dtype).view(weight.shape)
            if weight.name in runs:
                self._set(weight, data)
        return found

    def _set(self, weight: Weight, data: Tensor) -> None:
        """Set the weights whose zeros would make tokens equal: norms, and routers of experts."""
        dtype = weight.dtype or self._setup.dtype
        if weight.kind == "vector" and "norm" in weight.name and weight.name.endswith("weight"):
            tensor = data.view(dtype)
            self._ops.copy_(tensor, full(tensor.shape, 1.0, dtype))
        elif weight.kind == "linear" and ".router." in weight.name and weight.form == PLAIN:
            tensor = data.view(dtype)
            self._ops.copy_(tensor, _random(math.prod(tensor.shape)))

    def _make_caches(self, requests: int) -> list[Any]:
        """Return the caches of all layers.

        Without memory, equal ones are one, and requests share blocks.
        """
        setup, backend = self._setup, CPUAttention()
        block_size, dtype = setup.config.cache.block_size, setup.kv_cache_dtype
        caches = setup.spec.caches
        sizes = {cache: cache.block_nbytes(block_size, dtype) for cache in caches}
        paged = [size for cache, size in sizes.items() if not isinstance(cache, StateCache)]
        if self._memory is not None and paged:
            room = self._cache_room // max(paged)
            self._num_blocks = max(self._blocks, min(requests * self._blocks, room))

        def count(cache: CacheSpec) -> int:
            return requests if isinstance(cache, StateCache) else self._num_blocks

        def view(cache: CacheSpec, memory: HostTensor) -> Any:
            memory = memory.view(count(cache), sizes[cache])
            return cache.view(memory, block_size, dtype, backend)

        if self._memory is None:
            views = {cache: view(cache, map_memory(count(cache) * sizes[cache])) for cache in sizes}
            return [views[cache] for cache in caches]
        found, place = [], 0
        for cache in caches:
            nbytes = -(-count(cache) * sizes[cache] // _ALIGNMENT) * _ALIGNMENT
            place = place if place + nbytes <= self._cache_room else 0
            is_large = nbytes > self._cache_room
            memory = map_memory(nbytes) if is_large else self._memory[place : place + nbytes]
            found.append(view(cache, memory[: count(cache) * sizes[cache]]))
            place += nbytes
        return found

    # Trials

    def _part(self, plan: _native.Plan, batch: Batch) -> _Part:
        tokens, requests = sum(count for _, count in batch), len(batch)
        return _Part(lambda: plan.run(tokens, requests, requests))

    def _layer(self, index: int, batch: Batch) -> _Part:
        """Return a layer with random inputs, for which routers choose different experts."""
        layer, tokens = self._layers[index], sum(count for _, count in batch)

        def prepare() -> None:
            for number, tensor in enumerate(layer.inputs):
                some = tensor[:tokens]
                count = math.prod(some.shape)
                values = self._random[number * count : (number + 1) * count]
                self._ops.copy_(some, values.view(some.shape))

        return replace(self._part(layer.plan, batch), prepare=prepare, times=self._kinds.run[index])

    def _ends(self, samples: int) -> list[_Part]:
        """Return the head and the sampling."""
        params = np.zeros(samples, SAMPLING_ROW)
        params["temperature"], params["top_p"] = 1.0, 1.0
        logits = self._logits[:samples]
        return [
            _Part(lambda: self._head.run(samples, samples, samples)),
            _Part(lambda: self._ops.sample(logits, params)),
        ]

    def _try_layer(self, index: int, batch: Batch) -> list[KernelCost]:
        """Return the kernels of a layer; of a long step, those of a part times the parts."""
        tokens = sum(count for _, count in batch)
        tried, scale = batch, 1.0
        if tokens > 2 * _FEW_TOKENS and tokens > 2 * len(batch):
            few = _share(batch, _FEW_TOKENS / tokens)
            self._fill(few)
            layer = self._layer(index, few)
            self._measure([layer])
            begin = time.perf_counter()
            layer.run()
            expected = (time.perf_counter() - begin) * tokens / sum(count for _, count in few)
            if expected > self._most_seconds:
                tried = _share(batch, self._most_seconds / expected)
                scale = tokens / sum(count for _, count in tried)
        self._fill(tried)
        layer = self._layer(index, tried)
        experts = layer.times * self._kinds.expert_nbytes(index, tokens, self._setup.dtype)
        return [
            KernelCost(
                kernel.name,
                scale * kernel.seconds,
                experts if kernel.name == "experts" else kernel.nbytes,
            )
            for kernel in self._measure([layer])
        ]

    def _measure(self, parts: Sequence[_Part], seconds: float = _SECONDS) -> list[KernelCost]:
        """Return the kernels of parts that run one after the other; the median of each call."""
        rows: list[list[float]] = []
        calls: list[tuple[str, float, float]] = []
        end = math.inf
        for rounds in range(-1, _MOST_ROUNDS):  # the first one allocates memory
            if rounds >= _LEAST_ROUNDS and time.perf_counter() > end:
                break
            row: list[float] = []
            calls = []
            for part in parts:
                part.prepare()
                _native.set_profiling(True)
                try:
                    part.run()
                finally:
                    _native.set_profiling(False)
                for name, begun, ended, nbytes, *_ in _native.take_spans():
                    row.append(ended - begun)
                    calls.append((name, nbytes, part.times))
            if rounds < 0:
                end = time.perf_counter() + seconds
            else:
                rows.append(row)
        found: dict[str, KernelCost] = {}
        for taken, (name, nbytes, times) in zip(np.median(rows, 0), calls, strict=True):
            before = found.get(name, KernelCost(name, 0.0, 0.0))
            read = times * nbytes if before.part != OTHER else 0.0
            found[name] = KernelCost(
                name, before.seconds + times * float(taken), before.nbytes + read
            )
        return list(found.values())

    def _fill(self, batch: Batch) -> None:
        """Set the arrays of a step."""
        table, requests = self._buffers.table, len(batch)
        counts = np.asarray([count for _, count in batch])
        ends = np.cumsum(counts)
        positions = np.concatenate([np.arange(done, done + count) for done, count in batch])
        tokens = len(positions)
        table.query_start_loc[1 : requests + 1] = ends
        table.seq_lens[:requests] = [done + count for done, count in batch]
        if SEEN_LENS in table.extra:
            table.extra[SEEN_LENS][:requests] = table.seq_lens[:requests]
        table.logits_indices[:requests] = ends - 1
        table.positions[:tokens] = positions
        block_size = self._setup.config.cache.block_size
        blocks = np.arange(requests * self._blocks).reshape(requests, -1) % self._num_blocks
        owners = np.repeat(np.arange(requests), counts)
        slots = blocks[owners, positions // block_size] * block_size + positions % block_size
        table.slot_mappings[:, :tokens] = slots
        table.block_tables[:, :requests] = blocks
        if STATE_SLOTS.name in table.extra:
            slots = np.arange(requests)
            started = [done > 0 for done, _ in batch]
            table.extra[STATE_SOURCES.name][:requests] = np.where(started, slots, -1)
            for array in (STATE_SLOTS, SNAPSHOT_SLOTS):
                table.extra[array.name][:tokens] = -1
            table.extra[STATE_SLOTS.name][ends - 1] = slots


class _Kinds:
    """Kinds of layers of a model: equal layers are of one kind.

    Args:
        spec: the model.
        dtype: its type.
        nbytes: bytes that the layers that run read, if the model has as many.
    """

    def __init__(self, spec: ModelSpec, dtype: str, nbytes: int) -> None:
        self.run: dict[int, float] = {}
        """Indices of the layers that run, and the number of layers that each stands for."""
        self._spec = spec
        self._weights: dict[int, list[Weight]] = {}
        for weight in spec.weights():
            if weight.name.startswith("layers."):
                index = int(weight.name.split(".")[1])
                self._weights.setdefault(index, []).append(weight)
        same: dict[LayerSpec, list[int]] = {}
        for index, layer in enumerate(spec.layers):
            same.setdefault(layer, []).append(index)
        chosen: list[list[int]] = [[] for _ in same]
        read = 0.0
        for turn in range(len(spec.layers)):
            for few, all_of in zip(chosen, same.values(), strict=True):
                if turn < len(all_of) and (not few or read < nbytes):
                    few.append(all_of[turn])
                    read += self._read_by_a_token(all_of[turn], dtype)
        run = {
            index: len(all_of) / len(few)
            for few, all_of in zip(chosen, same.values(), strict=True)
            for index in few
        }
        self.run = dict(sorted(run.items()))

    def runs(self, weight: Weight) -> bool:
        """Return True if a weight is not one of a layer that never runs."""
        kind, index, *_ = f"{weight.name}.".split(".")
        return kind != "layers" or int(index) in self.run

    def expert_nbytes(self, index: int, num_tokens: int, dtype: str) -> float:
        """Return the bytes of the experts of a layer that a step reads."""
        total = 0.0
        for weight in self._weights.get(index, ()):
            if weight.expert is not None:
                count, active = weight.expert.count, weight.expert.active
                total += weight.nbytes(dtype) * distinct_experts(count, active, num_tokens) / count
        return total

    def _read_by_a_token(self, index: int, dtype: str) -> float:
        weights = self._weights.get(index, ())
        shared = sum(weight.nbytes(dtype) for weight in weights if weight.expert is None)
        return shared + self.expert_nbytes(index, 1, dtype)


class _RecordedLayer:
    """Layer that is recorded in a plan of its own.

    Args:
        layer: the layer.
        outer: the plan that records the model.
        held: True to keep the inputs in memory.
    """

    def __init__(self, layer: Layer, outer: _native.Plan, *, held: bool) -> None:
        self._layer, self._outer, self._held = layer, outer, held
        self.plan = _native.Plan()
        self.inputs: list[Tensor] = []

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """Implement `Layer`."""
        if self._held:
            self.inputs = [tensor for tensor in (x, residual) if tensor is not None]
        self._outer.end()
        self.plan.begin()
        try:
            return self._layer(x, residual, step)
        finally:
            self.plan.end()
            self._outer.begin()


def _share(batch: Batch, share: float) -> Batch:
    """Return a part of a batch of prompts with about this share of its tokens.

    It has fewer of several prompts, or the middle of one, whose attention is the mean of the whole.
    """
    if len(batch) > 1 and share * len(batch) >= 1:
        return batch[: int(share * len(batch))]
    done, count = batch[0]
    least = min(count, _FEW_TOKENS)
    some = max(least, int(share * sum(n for _, n in batch)))
    return ((done + (count - some) // 2, some),)


def _random(count: int) -> Tensor:
    return from_numpy(np.random.default_rng(0).standard_normal(count, np.float32))
