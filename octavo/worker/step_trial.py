"""Trial of the steps of a model without its weights: the cost of a step of any size.

The model is recorded as the engine records it, with its own blocks and kernels. Equal layers are
alike, so one of each kind runs. Its weights are zeros that have no memory of their own: the system
maps them all to one page, which stays in the caches. So a run takes the time of computing, and a
model that exceeds the memory can be tried.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from octavo import _native
from octavo.attention.cpu import CPUAttention
from octavo.kernels.base import SAMPLING_ROW, PackedWeight, QuantizedWeight
from octavo.kernels.memory import Arena, map_memory, placeholder
from octavo.kernels.native import NativeOps
from octavo.kv_cache.groups import KVCacheConfig
from octavo.layers.layer import Layer
from octavo.layers.state_table import SNAPSHOT_SLOTS, STATE_SLOTS, STATE_SOURCES
from octavo.layers.step import StepContext
from octavo.layers.step_table import StepLayout, StepTable
from octavo.models.blocks.base import Parts
from octavo.models.blocks.layer import LayerSpec
from octavo.models.decoder import DecoderModel
from octavo.models.spec import ModelSpec
from octavo.models.state_cache import StateCache
from octavo.models.weights import Weight
from octavo.plan.memory import Scratch
from octavo.plan.setup import WorkerSetup
from octavo.plan.step_cost import OTHER, Batch, KernelCost, StepCost, distinct_experts
from octavo.quantization.plain import PLAIN
from octavo.system.dtypes import DTYPE_NBYTES
from octavo.system.tensor import Tensor, from_numpy, full
from octavo.worker.graphs import EagerSteps
from octavo.worker.input_batch import StepBuffers

_ALIGNMENT = 64
_FEW_TOKENS = 32
_LEAST_ROUNDS, _MOST_ROUNDS, _SECONDS = 3, 10, 0.02
"""A plan runs as often as this time permits, within these numbers."""

_Loaded = Tensor | PackedWeight | QuantizedWeight


class StepTrial:
    """Trial of a model's steps on this machine, with the current number of kernel threads.

    Args:
        setup: the worker's setup, for the whole model in one process.
        scratch: memory of its steps.
        max_len: longest context of a step, in tokens.
        most_seconds: time for the layers of one kind in one step. Longer steps are tried with fewer
            tokens.
    """

    def __init__(
        self, setup: WorkerSetup, scratch: Scratch, max_len: int, most_seconds: float = 0.06
    ) -> None:
        self._setup, self._most_seconds = setup, most_seconds
        self._ops, spec = NativeOps(), setup.spec
        self._kinds = _Kinds(spec)
        parts = Parts(self._make_weights(), self._ops, dtype=setup.dtype, max_model_len=max_len)
        self._model = DecoderModel(spec, parts)
        self._outer, self._head = _native.Plan(), _native.Plan()
        size = setup.largest_step
        block_size = setup.config.cache.block_size
        kv = KVCacheConfig(1, block_size, setup.kv_cache_groups)
        self._blocks = -(-max_len // block_size)
        layout = StepLayout(size, self._blocks, len(kv.groups), spec.step_arrays)
        self._buffers = StepBuffers(layout)
        eager = EagerSteps(
            self._model,
            self._ops,
            CPUAttention(),
            self._make_caches(size.requests),
            [group.cache for group in kv.groups],
            kv.layer_to_group,
            self._buffers,
        )
        table: StepTable[Tensor] = self._buffers.table.map(self._ops.to_device)
        self._layers: list[_RecordedLayer] = []
        for index, layer in enumerate(self._model.layers):
            self._layers.append(_RecordedLayer(layer, self._outer, held=index in self._kinds.first))
        self._model.layers[:] = self._layers
        kept = size.tokens * spec.stream_size * DTYPE_NBYTES["float32"] * 2
        self._arenas = (
            Arena(2 * (scratch.activations + kept * len(self._kinds.first))),
            Arena(2 * scratch.logits),
        )
        step = eager.context(table, size.tokens, 0)
        with self._ops.record(self._outer, self._arenas[0]):
            self._hidden = self._model.forward(table.input_ids, step)
        self._head.bind("samples")
        with self._ops.record(self._head, self._arenas[1]):
            self._logits = self._model.head(self._hidden, table.logits_indices)
        self._owners = eager, step, table

    def run(self, batch: Batch) -> StepCost:
        """Return the cost of a step, without the host's part; all of its requests sample."""
        kernels = self._try(self._outer, batch)
        for index, count in self._kinds.first.items():
            found = self._try_layer(index, batch)
            kernels += [
                replace(k, seconds=count * k.seconds, nbytes=count * k.nbytes) for k in found
            ]
        samples = len(batch)
        self._fill(batch)
        head = self._measure(lambda: self._head.run(samples, samples, samples))
        kernels += [replace(kernel, rows=samples) for kernel in head]
        params = np.zeros(samples, SAMPLING_ROW)
        params["temperature"], params["top_p"] = 1.0, 1.0
        logits = self._logits[:samples]
        kernels += self._measure(lambda: self._ops.sample(logits, params))
        return StepCost(tuple(kernels))

    # Construction

    def _make_weights(self) -> dict[str, _Loaded]:
        """Return all weights; those of layers that never run have no memory."""
        setup, weights = self._setup, self._setup.spec.weights()
        runs = [weight for weight in weights if self._kinds.runs(weight)]
        nbytes = sum(-(-w.nbytes(setup.dtype) // _ALIGNMENT) * _ALIGNMENT for w in runs)
        memory, place = map_memory(nbytes), 0
        found: dict[str, _Loaded] = {}
        names = {weight.name for weight in runs}
        for weight in weights:
            size = weight.nbytes(setup.dtype)
            if weight.name in names:
                data = memory[place : place + size]
                place += -(-size // _ALIGNMENT) * _ALIGNMENT
            else:
                data = placeholder(size, dtype="uint8")
            if weight.kind == "linear":
                found[weight.name] = weight.form.wrap(data, weight.packed(setup.dtype))
            else:
                found[weight.name] = data.view(weight.dtype or setup.dtype).view(weight.shape)
            if weight.name in names:
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
        """Return the caches of all layers. Equal ones share memory, and requests share blocks."""
        setup, backend = self._setup, CPUAttention()
        views: dict[Any, Any] = {}
        for cache in set(setup.spec.caches):
            count = requests if isinstance(cache, StateCache) else self._blocks
            block_size, dtype = setup.config.cache.block_size, setup.kv_cache_dtype
            nbytes = cache.block_nbytes(block_size, dtype)
            memory = map_memory(count * nbytes).view(count, nbytes)
            views[cache] = cache.view(memory, block_size, dtype, backend)
        return [views[cache] for cache in setup.spec.caches]

    # Trials

    def _try(self, plan: _native.Plan, batch: Batch) -> list[KernelCost]:
        self._fill(batch)
        tokens, requests = sum(count for _, count in batch), len(batch)
        return self._measure(lambda: plan.run(tokens, requests, requests))

    def _try_layer(self, index: int, batch: Batch) -> list[KernelCost]:
        """Return the kernels of a layer; of a long step, those of a part times the parts."""
        layer, tokens = self._layers[index], sum(count for _, count in batch)
        for tensor in layer.inputs:
            some = tensor[:tokens]
            self._ops.copy_(some, _random(math.prod(some.shape)).view(some.shape))
        tried, scale = batch, 1.0
        if tokens > 2 * _FEW_TOKENS and tokens > 2 * len(batch):
            few = _part(batch, _FEW_TOKENS / tokens)
            self._try(layer.plan, few)
            begin = time.perf_counter()
            layer.plan.run(sum(count for _, count in few), len(few), len(few))
            expected = (time.perf_counter() - begin) * tokens / sum(count for _, count in few)
            if expected > self._most_seconds:
                tried = _part(batch, self._most_seconds / expected)
                scale = tokens / sum(count for _, count in tried)
        found = self._try(layer.plan, tried)
        expert_nbytes, expert_rows = self._kinds.experts(index, tokens, self._setup.dtype)
        return [
            KernelCost(kernel.name, scale * kernel.seconds, expert_nbytes, expert_rows)
            if kernel.name == "experts"
            else KernelCost(kernel.name, scale * kernel.seconds, kernel.nbytes, tokens)
            for kernel in found
        ]

    def _measure(self, run: Callable[[], object]) -> list[KernelCost]:
        """Return the kernels of a function; of several runs, the median of each call."""
        run()  # allocates memory, and wakes the threads
        rows: list[list[float]] = []
        spans: list[Any] = []
        end = time.perf_counter() + _SECONDS
        for rounds in range(_MOST_ROUNDS):
            if rounds >= _LEAST_ROUNDS and time.perf_counter() > end:
                break
            _native.set_profiling(True)
            try:
                run()
            finally:
                _native.set_profiling(False)
            spans = _native.take_spans()
            rows.append([ended - begun for _, begun, ended, *_ in spans])
        found: dict[str, KernelCost] = {}
        for seconds, (name, _, _, nbytes, *_) in zip(np.median(rows, 0), spans, strict=True):
            before = found.get(name, KernelCost(name, 0.0, 0.0))
            read = nbytes if before.part != OTHER else 0.0
            found[name] = KernelCost(name, before.seconds + float(seconds), before.nbytes + read)
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
        table.logits_indices[:requests] = ends - 1
        table.positions[:tokens] = positions
        table.slot_mappings[:, :tokens] = positions
        table.block_tables[:, :requests] = np.arange(self._blocks)
        if STATE_SLOTS.name in table.extra:
            slots = np.arange(requests)
            started = [done > 0 for done, _ in batch]
            table.extra[STATE_SOURCES.name][:requests] = np.where(started, slots, -1)
            for array in (STATE_SLOTS, SNAPSHOT_SLOTS):
                table.extra[array.name][:tokens] = -1
            table.extra[STATE_SLOTS.name][ends - 1] = slots


class _Kinds:
    """Kinds of layers of a model: equal layers are of one kind."""

    def __init__(self, spec: ModelSpec) -> None:
        self.first: dict[int, int] = {}
        """Index of the first layer of each kind, and the number of the kind's layers."""
        self._spec = spec
        known: dict[LayerSpec, int] = {}
        for index, layer in enumerate(spec.layers):
            first = known.setdefault(layer, index)
            self.first[first] = self.first.get(first, 0) + 1

    def runs(self, weight: Weight) -> bool:
        """Return True if a weight is not one of a layer that never runs."""
        kind, index, *_ = f"{weight.name}.".split(".")
        return kind != "layers" or int(index) in self.first

    def experts(self, index: int, num_tokens: int, dtype: str) -> tuple[float, float]:
        """Return the bytes of the experts of a layer that a step reads, and rows of an expert."""
        total, rows = 0.0, 0.0
        for weight in self._spec.weights():
            if weight.expert is not None and weight.name.startswith(f"layers.{index}."):
                count, active = weight.expert.count, weight.expert.active
                used = distinct_experts(count, active, num_tokens)
                total += weight.nbytes(dtype) * used / count
                rows = num_tokens * active / used
        return total, rows


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


def _part(batch: Batch, share: float) -> Batch:
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
