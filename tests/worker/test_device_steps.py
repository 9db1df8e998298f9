"""Captured decode steps, with a stand-in for CUDA graphs that runs the step again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch

from octavo.attention.triton import TritonAttention
from octavo.checkpoints.registry import open_checkpoint
from octavo.kernels.ops_logits import SAMPLING_ROW
from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups
from octavo.layers.step_table import StepSize
from octavo.messages import CoreSamplingParams, NewRequestData, ScheduledRequest
from octavo.models.loader import load_model
from octavo.models.registry import read_spec
from octavo.worker.graphs import EagerSteps, graph_sizes
from octavo.worker.input_batch import UNKNOWN, InputBatch, StepBuffers
from tests.models.cases import CASES
from tests.models.harness import make_hf

pytest.importorskip("triton", reason="the package triton is not installed")

from octavo.kernels.triton.ops import TritonOps
from octavo.worker.device_steps import CudaGraphs, DeviceSteps

BLOCK_SIZE, BLOCKS, MAX_LEN, MAX_REQS = 8, 4, 32, 4


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (24, [1, 2, 4, 8, 16, 24]),
        (300, [1, 2, 4, *range(8, 257, 8), 288, 300]),
    ],
)
def test_graph_sizes(max_num_seqs: int, expected: list[int]) -> None:
    assert graph_sizes(max_num_seqs) == expected


class Replayed:
    """Stand-in for torch.cuda.CUDAGraph, as far as results are concerned."""

    def __init__(self, step):
        step()
        self.step, self.replays = step, 0

    def replay(self):
        self.replays += 1
        self.step()


def make_steps(folder: Path) -> tuple[DeviceSteps, InputBatch]:
    architecture, config = CASES["llama"]
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    make_hf(architecture, **config | sizes).save_pretrained(folder)
    checkpoint, ops = open_checkpoint(folder), TritonOps(upcast=True)
    spec = read_spec(checkpoint)
    model = load_model(spec, checkpoint, dtype="float32", max_model_len=MAX_LEN, ops=ops)
    kv = KVCacheConfig(MAX_REQS * BLOCKS + 1, BLOCK_SIZE, make_kv_cache_groups(spec.caches))
    backend = TritonAttention(torch.device("cpu"), MAX_LEN)
    shape = backend.kv_cache_shape(
        kv.num_blocks, BLOCK_SIZE, spec.caches[0].num_kv_heads, spec.caches[0].head_size
    )
    caches = [torch.full(shape, torch.nan) for _ in range(len(spec.layers))]
    batch = InputBatch(MAX_REQS, MAX_LEN, kv)
    largest = StepSize(64, MAX_REQS, MAX_REQS)
    buffers = StepBuffers(batch.layout(largest))
    eager = EagerSteps(
        model, ops, backend, caches, spec.caches[:1], [0] * len(spec.layers), buffers, (0,)
    )
    steps = DeviceSteps(eager, ops, batch, largest=largest, max_model_len=MAX_LEN)
    for i, req_id in enumerate("abc"):
        blocks = list(range(1 + i * BLOCKS, 1 + (i + 1) * BLOCKS))
        ids = list(range(3 + i, 9 + 2 * i))
        row = batch.add(req_id, NewRequestData(ids, len(ids), CoreSamplingParams(), 0))
        batch.append_blocks(row, [blocks])
    return steps, batch


def params(count: int) -> np.ndarray:
    result = np.zeros(count, SAMPLING_ROW)
    result["top_p"] = 1.0
    result["temperature"][1:] = 0.7
    result["seed"] = 3
    return result


def run(steps: DeviceSteps, batch: InputBatch, scheduled: dict[str, int]) -> list[torch.Tensor]:
    """Run one step whose tokens the host never reads."""
    buffers = steps.buffers(sum(scheduled.values()), len(scheduled))
    requests = [ScheduledRequest(req_id, count) for req_id, count in scheduled.items()]
    inputs = batch.gather(requests, {}, buffers)
    result = steps.run(inputs, params(inputs.size.samples))
    assert result.tokens is not None
    seen = [t.clone() for t in (result.hidden, result.logits, result.tokens, result.kept[0])]
    rows = inputs.sampling_rows
    batch.append(rows, np.full(len(rows), UNKNOWN), np.ones_like(rows))
    batch.num_computed_tokens[inputs.rows] += inputs.counts
    return seen


class Event:
    """Stand-in for torch.cuda.Event."""

    def __init__(self, log, number):
        self.log, self.number = log, number

    def record(self):
        self.log.append(("record", self.number))

    def synchronize(self):
        self.log.append(("wait", self.number))


def test_a_host_buffer_is_taken_again_when_its_copy_has_been_made(tmp_path: Path) -> None:
    """No wait for a step is needed, as for a chunk of a prompt that samples nothing."""
    steps, batch = make_steps(tmp_path)
    log = []
    steps._copied = [Event(log, i) for i in range(3)]
    for _ in range(6):
        run(steps, batch, {"a": 1})
    order = [number for kind, number in log if kind == "record"]
    assert order == order[:3] * 2
    assert sorted(order[:3]) == [0, 1, 2]
    assert log == [(kind, number) for number in order for kind in ("wait", "record")]


def test_a_cuda_graph_is_warmed_up_and_captured_on_one_stream(monkeypatch) -> None:
    """Only torch's signatures are checked; their effects need a GPU."""
    for name in ("Stream", "CUDAGraph", "graph", "graph_pool_handle", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, create_autospec(getattr(torch.cuda, name)))
    graphs, launched = CudaGraphs(torch.device("cuda")), []
    for size in (8, 4):
        graph = graphs(partial(launched.append, size))
        assert graph is torch.cuda.CUDAGraph.return_value
    assert launched == [8, 8, 4, 4]
    # Earlier launches are waited for, and later ones wait.
    stream, current = torch.cuda.Stream.return_value, torch.cuda.current_stream.return_value
    assert [call.args for call in stream.wait_stream.call_args_list] == [(current,)] * 2
    assert [call.args for call in current.wait_stream.call_args_list] == [(stream,)] * 2
    assert [call.args for call in torch.cuda.stream.call_args_list] == [(stream,)] * 2
    torch.cuda.Stream.assert_called_once()
    torch.cuda.graph_pool_handle.assert_called_once()
    for call in torch.cuda.graph.call_args_list:
        assert call.kwargs["pool"] is torch.cuda.graph_pool_handle.return_value
        assert call.kwargs["stream"] is torch.cuda.Stream.return_value


def test_captured_steps_of_any_number_of_requests(tmp_path: Path) -> None:
    results, graphs = [], []
    for captured in (False, True):
        steps, batch = make_steps(tmp_path)
        if captured:
            steps.capture(
                [2, MAX_REQS], capture=lambda step: graphs.append(Replayed(step)) or graphs[-1]
            )
        seen = run(steps, batch, {"a": 6, "b": 8, "c": 4})
        seen += run(steps, batch, {"a": 1, "b": 1})
        seen += run(steps, batch, {"b": 1, "c": 6, "a": 1})
        seen += run(steps, batch, {"c": 1, "b": 1, "a": 1})
        seen += run(steps, batch, {"c": 1})
        results.append(seen)
        # Neither capturing nor a row of padding has written any keys or values.
        spec, num_tokens = steps._eager.model.spec, batch.num_computed_tokens.sum()
        for cache in steps._eager.caches:
            written = num_tokens * 2 * spec.caches[0].num_kv_heads * spec.caches[0].head_size
            assert cache.isfinite().sum() == written
    for eager, captured_result in zip(*results, strict=True):
        assert eager.isfinite().all()
        torch.testing.assert_close(captured_result, eager)
    # The graph of four requests is captured first; two steps fit that of two.
    assert [graph.replays for graph in graphs] == [1, 2]
