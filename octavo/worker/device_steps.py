"""Steps on a GPU: one copy of inputs, captured decode steps, sampled tokens on the device.

No function here waits for the device. A step's inputs are copied once, from pinned memory. The
next step reads the sampled tokens on the device; its inputs mark them `UNKNOWN`. One copy brings
them to the host, and its reader waits for it.

With Triton's interpreter the same code runs on a CPU, without graphs and pinned memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.torch_tensors import torch_dtype
from octavo.kernels.triton.ops import TritonOps
from octavo.kernels.triton.tokens import take_tokens
from octavo.layers.step_table import SAMPLING_ROW_WORDS, StepLayout, StepSize, StepTable
from octavo.worker.graphs import EagerSteps, StepResult, has_adapters, longest_context
from octavo.worker.input_batch import HostTable, InputBatch, StepBuffers, StepInputs

logger = logging.getLogger(__name__)

# Two steps are in flight while the inputs of a third are gathered. No code waits for steps that
# sample nothing, so a buffer is used again only after its copy.
_HOST_BUFFERS = 3

DeviceTable = StepTable[Tensor]
Embeds = Sequence[tuple[int, Tensor]]
"""Rows that replace embeddings: `StepInputs.embeds`."""


class Graph(Protocol):
    """Captured launches of a function without arguments and result."""

    def replay(self) -> None:
        """Launch them again."""
        ...


Capture = Callable[[Callable[[], None]], Graph]


class CudaGraphs:
    """`Capture` by CUDA graphs that share one memory pool: only one may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all captures: cuBLAS keeps a workspace for every stream that it has seen.
        self._stream = torch.cuda.Stream(device)

    def __call__(self, step: Callable[[], None]) -> Graph:
        """Capture a function on a dedicated stream, after one run."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            step()  # compiles the kernels, and lets the libraries allocate their workspace
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use another GPU at the same time.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            step()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph


@dataclass(slots=True)
class _Graph:
    """Captured decode step of one size."""

    layout: StepLayout
    table: DeviceTable
    buffers: list[StepBuffers]
    """The step's inputs in each of the host's buffers."""
    graph: Graph
    adapted: Graph | None
    """Step whose tokens may have adapters; None: the model has none."""


class DeviceSteps:
    """`StepRunner` of a GPU; see the module.

    Args:
        eager: the model, the backend and the KV cache.
        ops: the model's table of operations.
        batch: the rows of the live requests.
        largest: size of the largest step.
        max_model_len: longest context, also of cross attention.
    """

    def __init__(
        self,
        eager: EagerSteps,
        ops: TritonOps,
        batch: InputBatch,
        *,
        largest: StepSize,
        max_model_len: int,
    ) -> None:
        self._eager, self._ops, self._batch = eager, ops, batch
        self._largest, self._max_model_len = largest, max_model_len
        self.device = ops.device
        self._apart = self.device.type != "cpu"  # False with Triton's interpreter
        nbytes = batch.layout(largest).nbytes
        self._host = [
            torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self._apart)
            for _ in range(_HOST_BUFFERS)
        ]
        self._copied = [torch.cuda.Event() if self._apart else None for _ in self._host]
        self._at = 0
        self._memory = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        # The padding of captured steps writes to one extra row at the end: row -1.
        rows = largest.requests
        self._sampled = torch.zeros(rows + 1, dtype=torch.int64, device=self.device)
        self._rows = self._sampled[:0]  # the rows that sample in the last step
        # Results of captured steps of all sizes, which share this memory.
        spec, new = eager.model.spec, self._sampled.new_empty
        self._hidden = new((rows, spec.hidden_size), dtype=torch_dtype(eager.model.dtype))
        self._kept = {layer: torch.empty_like(self._hidden) for layer in eager.kept_layers}
        self._logits = new((rows, spec.vocab_size), dtype=torch.float32)
        self._tokens = new((rows,))
        self._graphs: dict[int, _Graph] = {}
        self._layout = batch.layout(StepSize(0, 0, 0))

    def buffers(self, num_tokens: int, num_reqs: int) -> StepBuffers:
        """Return the host's buffers for the inputs of the next step."""
        self._at = (self._at + 1) % _HOST_BUFFERS
        copied = self._copied[self._at]
        if copied is not None:
            copied.synchronize()
        graph = self._find_graph(num_tokens, num_reqs)
        if graph is not None:
            self._layout = graph.layout
            return graph.buffers[self._at]
        num_samples = min(num_tokens, self._largest.samples)
        self._layout = self._batch.layout(StepSize(num_tokens, num_reqs, num_samples))
        return StepBuffers(self._layout, self._host[self._at].numpy())

    def run(self, inputs: StepInputs, params: NDArray[np.void] | None) -> StepResult:
        """Launch a step; see `StepRunner`."""
        size, host, adapted = inputs.size, inputs.table, has_adapters(inputs)
        graph = self._find_graph(size.tokens, size.requests)
        if inputs.embeds:  # a captured step looks all embeddings up
            graph = None
        host.sampling_rows[: size.samples] = inputs.sampling_rows
        # A captured step always chooses tokens. If they are not used: greedily, which is quick.
        words = 0 if params is None else params.view(np.int64).reshape(-1, SAMPLING_ROW_WORDS)
        host.sampling_params[: size.samples] = words
        if graph is not None:
            _pad(host, size)
        nbytes = self._layout.nbytes
        self._memory[:nbytes].copy_(self._host[self._at][:nbytes], non_blocking=True)
        copied = self._copied[self._at]
        if copied is not None:
            copied.record()
        self._eager.embeds.clear()
        if graph is not None:
            self._rows = graph.table.sampling_rows[: size.samples]
            captured = graph.adapted if adapted else graph.graph
            assert captured is not None
            captured.replay()
            return StepResult(
                self._hidden[: size.requests],
                self._logits[: size.samples],
                {layer: hidden[: size.requests] for layer, hidden in self._kept.items()},
                self._tokens[: size.samples] if params is not None else None,
            )
        table = _device_table(self._layout, self._memory).first(size)
        self._rows = table.sampling_rows
        max_seq_len = longest_context(host.first(size))
        return self._forward(
            table,
            int(inputs.counts.max()),
            max_seq_len,
            sample=params is not None,
            has_adapters=adapted,
            embeds=inputs.embeds,
        )

    def put_tokens(self, tokens: Tensor) -> None:
        """Store tokens that the sampler has chosen as the last ones of the step's rows."""
        self._sampled[self._rows] = tokens

    def capture(self, sizes: Sequence[int], capture: Capture | None = None) -> None:
        """Capture decode steps of the given numbers of rows, the largest first.

        `capture` converts a function to a graph; default: `CudaGraphs`.
        """
        start, before = time.monotonic(), self._reserved()
        capture = capture or CudaGraphs(self.device)
        variants = (False,) if self._eager.adapters is None else (False, True)
        for size in sorted(sizes, reverse=True):
            layout = self._batch.layout(StepSize(size, size, size))
            table = _device_table(layout, self._memory)
            self._memory.zero_()
            table.sampling_rows.fill_(-1)
            torch.arange(size + 1, out=table.query_start_loc)
            table.slot_mappings.fill_(-1)
            for array in table.extra.values():
                array.fill_(-1)

            def step(adapted: bool, table: DeviceTable = table, size: int = size) -> None:
                result = self._forward(
                    table, 1, self._max_model_len, sample=True, has_adapters=adapted
                )
                assert result.tokens is not None
                self._hidden[:size], self._logits[:size] = result.hidden, result.logits
                self._tokens[:size] = result.tokens
                for layer, hidden in result.kept.items():
                    self._kept[layer][:size] = hidden

            buffers = [StepBuffers(layout, host.numpy()) for host in self._host]
            graphs = [capture(partial(step, adapted)) for adapted in variants]
            adapted = graphs[1] if len(graphs) > 1 else None
            self._graphs[size] = _Graph(layout, table, buffers, graphs[0], adapted)
        logger.info(
            "captured %d decode steps of up to %d requests in %.1f s, %.0f MiB",
            len(sizes),
            max(sizes),
            time.monotonic() - start,
            (self._reserved() - before) / 2**20,
        )

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self._apart else 0

    def _find_graph(self, num_tokens: int, num_reqs: int) -> _Graph | None:
        """Return the smallest captured step that fits a decode step of the given size, or None."""
        if num_tokens != num_reqs:
            return None
        size = min((size for size in self._graphs if size >= num_reqs), default=None)
        return None if size is None else self._graphs[size]

    def _forward(
        self,
        table: DeviceTable,
        max_query_len: int,
        max_seq_len: int,
        *,
        sample: bool,
        has_adapters: bool,
        embeds: Embeds = (),
    ) -> StepResult:
        with self._eager.use_adapters(table) if has_adapters else nullcontext():
            return self._compute(table, max_query_len, max_seq_len, embeds, sample=sample)

    def _compute(
        self,
        table: DeviceTable,
        max_query_len: int,
        max_seq_len: int,
        embeds: Embeds,
        *,
        sample: bool,
    ) -> StepResult:
        eager, indices, rows = self._eager, table.logits_indices, table.sampling_rows
        take_tokens(table.input_ids, indices, rows, self._sampled)
        step = eager.context(table, max_query_len, max_seq_len)
        if embeds:
            eager.write_embeds(step, table.input_ids, embeds)
        hidden = eager.model.forward(table.input_ids, step)
        if len(indices) == 0:
            return StepResult(hidden, self._logits[:0], step.kept, self._tokens[:0])
        result = StepResult(hidden, eager.model.head(hidden, indices), step.kept)
        if sample:
            result.tokens = tokens = torch.empty_like(rows)
            self._ops.sample_into(result.logits, table.sampling_params, tokens)
            self._sampled[rows] = tokens
        return result


def _device_table(layout: StepLayout, memory: Tensor) -> DeviceTable:
    """Return a step's arrays in uint8 [layout.nbytes or more] on the device."""
    return layout.table(
        lambda begin, end, dtype, shape: memory[begin:end].view(torch_dtype(dtype)).view(shape)
    )


def _pad(table: HostTable, size: StepSize) -> None:
    """Fill the unused rows of a captured step with requests that do nothing."""
    num_reqs, num_samples = size.requests, size.samples
    # One query for each, with an empty context: its attention is 0.
    table.query_start_loc[num_reqs + 1 :] = np.arange(num_reqs + 1, len(table.seq_lens) + 1)
    table.seq_lens[num_reqs:] = 0
    table.input_ids[num_reqs:] = 0
    table.positions[num_reqs:] = 0
    table.slot_mappings[:, num_reqs:] = -1
    table.logits_indices[num_samples:] = 0
    table.sampling_rows[num_samples:] = -1
    table.sampling_params[num_samples:] = 0
    ends = {"tokens": size.tokens, "requests": num_reqs, "samples": num_samples}
    for name, (dim, *_) in table.extra_dims.items():
        table.extra[name][ends[str(dim)] :] = -1
