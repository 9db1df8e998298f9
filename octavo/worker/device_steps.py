"""Steps on a GPU: one copy in, captured graphs for decode steps, sampled tokens that stay there.

Nothing here waits for the device. A step's inputs go over in one copy from pinned memory; the
tokens that it samples are read on the device by the next step, whose inputs name them `UNKNOWN`,
and come to the host in one copy that somebody else waits for.

Through Triton's interpreter all of it runs on a CPU as well, without graphs and pinned memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.attention.base import AttentionMetadata
from octavo.kernels.triton.ops import TritonOps
from octavo.kernels.triton.tokens import take_tokens
from octavo.layers.step import StepContext
from octavo.worker.graphs import EagerSteps
from octavo.worker.input_batch import (
    SAMPLING_ROW_WORDS,
    InputBatch,
    StepBuffers,
    StepInputs,
    StepLayout,
)

logger = logging.getLogger(__name__)

# Two steps are in flight, and the inputs of a third are gathered. Steps that sample nothing are
# waited for by nobody, so a buffer is taken again only when its copy has been made.
_HOST_BUFFERS = 3
_TORCH_DTYPES = {"int32": torch.int32, "int64": torch.int64, "bool": torch.bool}


class _DeviceArrays:
    """The arrays of a step as tensors on the device."""

    def __init__(self, layout: StepLayout, memory: Tensor) -> None:
        arrays = {
            name: memory[begin : begin + nbytes].view(_TORCH_DTYPES[dtype]).view(shape)
            for name, (begin, nbytes, dtype, shape) in layout.arrays.items()
        }
        groups = range(layout.num_groups)
        self.query_start_loc = arrays["query_start_loc"]
        self.seq_lens = arrays["seq_lens"]
        self.last_tokens = arrays["last_tokens"]
        self.sampling_rows = arrays["sampling_rows"]
        self.sampling_params = arrays["sampling_params"]
        self.input_ids = arrays["input_ids"]
        self.positions = arrays["positions"]
        self.slot_mappings = [arrays[f"slot_mapping_{g}"] for g in groups]
        self.block_tables = [arrays[f"block_table_{g}"] for g in groups]

    def metadata(self, max_query_len: int, max_seq_len: int) -> list[AttentionMetadata]:
        """One for each KV-cache group."""
        return [
            AttentionMetadata(
                num_reqs=self.seq_lens.shape[0],
                num_tokens=self.input_ids.shape[0],
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                query_start_loc=self.query_start_loc,
                seq_lens=self.seq_lens,
                block_table=table,
                slot_mapping=slots,
            )
            for table, slots in zip(self.block_tables, self.slot_mappings, strict=True)
        ]


class Graph(Protocol):
    """The launches of a function without arguments and result, captured."""

    def replay(self) -> None:
        """Launches them again."""
        ...


Capture = Callable[[Callable[[], None]], Graph]


class CudaGraphs:
    """A `Capture` by CUDA graphs that share one pool of memory: no two may be under way at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: cuBLAS keeps a workspace for every stream that it has seen.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, step: Callable[[], None]) -> Graph:
        """Captures a function on a stream of its own, after having run it once."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            step()  # compiles the kernels, lets the libraries take their workspace
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may have a GPU of their own to talk to meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            step()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph


@dataclass(slots=True)
class _Graph:
    """A decode step of one size, captured."""

    arrays: _DeviceArrays
    layout: StepLayout
    graph: Graph


class DeviceSteps:
    """See the module.

    Args:
        eager: the model, the backend and the KV cache.
        ops: the model's table of operations.
        batch: the rows of the live requests.
        max_num_tokens: of a step.
        max_num_reqs: of a step.
        max_model_len: longest context.
    """

    def __init__(
        self,
        eager: EagerSteps,
        ops: TritonOps,
        batch: InputBatch,
        *,
        max_num_tokens: int,
        max_num_reqs: int,
        max_model_len: int,
    ) -> None:
        self._eager, self._ops, self._batch = eager, ops, batch
        self._max_model_len = max_model_len
        self.device = eager.model.device
        self._cuda = self.device.type == "cuda"
        nbytes = batch.layout(max_num_tokens, max_num_reqs).nbytes
        self._host = [
            torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self._cuda)
            for _ in range(_HOST_BUFFERS)
        ]
        self._copied = [torch.cuda.Event() if self._cuda else None for _ in self._host]  # type: ignore[no-untyped-call]
        self._at = 0
        self._memory = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        # Behind the rows one more, which the padding of captured steps writes: row -1.
        self._sampled = torch.zeros(max_num_reqs + 1, dtype=torch.int64, device=self.device)
        self._rows = self._sampled[:0]  # those that sample in the step run last
        # What captured steps of all sizes return, so that each of them holds no memory of its own.
        spec, rows = eager.model.spec, (max_num_reqs,)
        self._hidden = self._sampled.new_empty((*rows, spec.hidden_size), dtype=eager.model.dtype)
        self._logits = self._sampled.new_empty((*rows, spec.vocab_size), dtype=torch.float32)
        self._tokens = self._sampled.new_empty(rows)
        self._graphs: dict[int, _Graph] = {}
        self._layout = StepLayout(0, 0, 0, 0)

    def buffers(self, num_tokens: int, num_reqs: int) -> StepBuffers:
        """Where the inputs of the next step go, on the host."""
        size = self._graph_size(num_tokens, num_reqs)
        self._layout = (
            self._batch.layout(num_tokens, num_reqs) if size is None else self._graphs[size].layout
        )
        self._at = (self._at + 1) % _HOST_BUFFERS
        copied = self._copied[self._at]
        if copied is not None:
            copied.synchronize()
        return StepBuffers(self._layout, self._host[self._at].numpy())

    def run(
        self, inputs: StepInputs, buffers: StepBuffers, params: np.ndarray | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Launches a step.

        Args:
            inputs: what was gathered into `buffers`.
            buffers: the last that `buffers` returned.
            params: `SAMPLING_ROW` [S] to choose tokens by; None: that is done outside.

        Returns:
            Hidden states [T, hidden_size], float32 logits [S, vocab], and the tokens int64 [S].
        """
        num_reqs, num_logits = len(inputs.req_ids), len(inputs.last_tokens)
        size = self._graph_size(len(inputs.input_ids), num_reqs)
        graph = None if size is None else self._graphs[size]
        rows = inputs.rows[inputs.samples]
        buffers.sampling_rows[:num_logits] = rows
        # A captured step chooses tokens even if nobody wants them: greedily, which is quick.
        words = 0 if params is None else params.view(np.int64).reshape(-1, SAMPLING_ROW_WORDS)
        buffers.sampling_params[:num_logits] = words
        if graph is not None:
            _pad(buffers, inputs)
        nbytes = self._layout.nbytes
        self._memory[:nbytes].copy_(self._host[self._at][:nbytes], non_blocking=True)
        copied = self._copied[self._at]
        if copied is not None:
            copied.record()
        arrays = _DeviceArrays(self._layout, self._memory) if graph is None else graph.arrays
        self._rows = arrays.sampling_rows[:num_logits]
        if graph is not None:
            graph.graph.replay()
            tokens = self._tokens[:num_logits] if params is not None else None
            return self._hidden[:num_reqs], self._logits[:num_logits], tokens
        return self._forward(
            arrays,
            num_logits,
            int(np.diff(inputs.query_start_loc).max()),
            int(inputs.seq_lens.max()),
            sample=params is not None,
        )

    def put_tokens(self, tokens: Tensor) -> None:
        """Notes tokens that were chosen elsewhere as the last ones of the step's rows."""
        self._sampled[self._rows] = tokens

    def capture(self, sizes: Sequence[int], capture: Capture | None = None) -> None:
        """Captures decode steps of the given numbers of rows, the largest first.

        `capture` makes a graph of a function; default: `CudaGraphs`.
        """
        start, before = time.monotonic(), self._reserved()
        capture = capture or CudaGraphs(self.device)
        for size in sorted(sizes, reverse=True):
            layout = self._batch.layout(size, size)
            arrays = _DeviceArrays(layout, self._memory)
            self._memory.zero_()
            arrays.sampling_rows.fill_(-1)
            torch.arange(size + 1, out=arrays.query_start_loc)
            for slots in arrays.slot_mappings:
                slots.fill_(-1)

            def step(arrays: _DeviceArrays = arrays, size: int = size) -> None:
                hidden, logits, tokens = self._forward(
                    arrays, size, 1, self._max_model_len, sample=True
                )
                assert tokens is not None
                self._hidden[:size], self._logits[:size] = hidden, logits
                self._tokens[:size] = tokens

            self._graphs[size] = _Graph(arrays, layout, capture(step))
        logger.info(
            "captured %d decode steps of up to %d requests in %.1f s, %.0f MiB",
            len(sizes),
            max(sizes),
            time.monotonic() - start,
            (self._reserved() - before) / 2**20,
        )

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self._cuda else 0

    def _graph_size(self, num_tokens: int, num_reqs: int) -> int | None:
        """The captured step that a decode step of that size fits; None: there is none."""
        if num_tokens != num_reqs:
            return None
        return min((size for size in self._graphs if size >= num_reqs), default=None)

    def _forward(
        self,
        arrays: _DeviceArrays,
        num_logits: int,
        max_query_len: int,
        max_seq_len: int,
        *,
        sample: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        eager, last_tokens = self._eager, arrays.last_tokens[:num_logits]
        rows = arrays.sampling_rows[:num_logits]
        take_tokens(arrays.input_ids, last_tokens, rows, self._sampled)
        groups = arrays.metadata(max_query_len, max_seq_len)
        step = StepContext(
            arrays.positions,
            eager.kv_caches,
            [groups[g] for g in eager.layer_groups],
            eager.backend,
        )
        hidden = eager.model.forward(arrays.input_ids, step)
        if num_logits == 0:
            return hidden, self._logits[:0], self._tokens[:0]
        logits = eager.model.head(hidden, last_tokens)
        tokens = None
        if sample:
            tokens = torch.empty(num_logits, dtype=torch.int64, device=self.device)
            self._ops.sample_into(logits, arrays.sampling_params[:num_logits], tokens)
            self._sampled[rows] = tokens
        return hidden, logits, tokens


def _pad(buffers: StepBuffers, inputs: StepInputs) -> None:
    """Fills a captured step that is larger than the requests there are: rows that do nothing."""
    num_reqs, num_logits = len(inputs.req_ids), len(inputs.last_tokens)
    size = len(buffers.seq_lens)
    # One query each, which sees nothing: attention makes it 0.
    buffers.query_start_loc[num_reqs + 1 :] = np.arange(num_reqs + 1, size + 1)
    buffers.seq_lens[num_reqs:] = 0
    buffers.input_ids[num_reqs:] = 0
    buffers.positions[num_reqs:] = 0
    for slots in buffers.slot_mappings:
        slots[num_reqs:] = -1
    buffers.last_tokens[num_logits:] = 0
    buffers.sampling_rows[num_logits:] = -1
    buffers.sampling_params[num_logits:] = 0
