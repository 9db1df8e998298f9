"""Trial of this machine's memory: its bandwidth, and how well kernels hide reading.

Products and attention run once with numbers that fill memory, and once with zeros that have no
memory of their own and stay in the caches, as in `step_trial.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from octavo import _native
from octavo.attention.base import AttentionMetadata, AttentionParams
from octavo.attention.cpu import CPUAttention
from octavo.kernels.memory import map_memory
from octavo.kernels.native import NativeOps
from octavo.kernels.sizes import PANEL
from octavo.models.weights import Weight
from octavo.plan.step_cost import FEW_ROWS, Machine
from octavo.quantization.base import PackedShape
from octavo.quantization.plain import PLAIN
from octavo.system.tensor import HostTensor, from_numpy, full

_INPUTS = 2048
_KV_HEADS, _GROUP, _HEAD_SIZE, _BLOCK_SIZE = 8, 4, 64, 16
_REQUESTS, _BLOCKS = 8, 32
_LEAST_NBYTES = 2**22
_SECONDS = 0.06
"""Time of each measurement."""


class MemoryTrial:
    """Trial of the memory, with the current number of kernel threads.

    Args:
        nbytes: bytes that a step reads. Numbers that fit the caches are read from these.
    """

    def __init__(self, nbytes: int) -> None:
        self._ops = NativeOps()
        nbytes = max(nbytes, _LEAST_NBYTES) // PANEL * PANEL
        self._memory = map_memory(nbytes)
        _native.touch_pages(self._memory.data_ptr(), self._memory.nbytes)
        self._zeros = map_memory(nbytes)

    def run(self, weight: Weight, dtype: str, rows: int) -> Machine:
        """Return the figures of the machine for weights of a shape and a form.

        Args:
            weight: a typical weight of the model.
            dtype: type of the model.
            rows: rows of products of several rows.
        """
        nbytes = weight.nbytes(dtype)
        bandwidth = self._memory.nbytes / self._read()
        reading = self._memory.nbytes // nbytes * nbytes / bandwidth

        def exposed(rows: int) -> float:
            whole, computing = (
                self._products(rows, memory, weight, dtype)
                for memory in (self._memory, self._zeros)
            )
            return _exposed(whole, computing, reading)

        return Machine(
            bandwidth,
            exposed=exposed(max(rows, FEW_ROWS + 1)),
            exposed_in_few=exposed(1),
            exposed_in_blocks=self._attention(bandwidth),
        )

    def _read(self) -> float:
        """Return the seconds of a product of one row with a weight that fills the memory."""
        shape = PackedShape(
            self._memory.nbytes // (2 * _INPUTS * PANEL) * PANEL, _INPUTS, "bfloat16"
        )
        weight = PLAIN.wrap(self._memory[: PLAIN.nbytes(shape)], shape)
        x, out = full((1, _INPUTS), 1.0, "bfloat16"), full((1, shape.n), 0.0, "bfloat16")
        return _lower_quartile(lambda _: self._ops.linear(x, weight, out=out)) * (
            self._memory.nbytes / weight.data.nbytes
        )

    def _products(self, rows: int, memory: HostTensor, weight: Weight, dtype: str) -> float:
        """Return the seconds of products with the weights of a shape that fill the memory."""
        (n, k), nbytes = weight.shape, weight.nbytes(dtype)
        packed = [
            weight.form.wrap(memory[begin : begin + nbytes], weight.packed(dtype))
            for begin in range(0, memory.nbytes - nbytes + 1, nbytes)
        ]
        x, out = full((rows, k), 1.0, dtype), full((rows, n), 0.0, dtype)

        def run(turn: int) -> None:
            for each in packed:
                self._ops.linear(x, each, out=out)

        return _lower_quartile(run)

    def _attention(self, bandwidth: float) -> float:
        """Return the exposed share in attention of decoded tokens."""
        backend, block_nbytes = CPUAttention(), 4 * _KV_HEADS * _BLOCK_SIZE * _HEAD_SIZE
        count = self._memory.nbytes // block_nbytes
        used = min(_REQUESTS * _BLOCKS, count // _BLOCKS * _BLOCKS)
        requests, length = used // _BLOCKS, _BLOCKS * _BLOCK_SIZE
        query = full((requests, _KV_HEADS * _GROUP, _HEAD_SIZE), 1.0, "bfloat16")
        out = full((requests, _KV_HEADS * _GROUP, _HEAD_SIZE), 0.0, "bfloat16")
        tables = np.arange(count // used * used, dtype=np.int32).reshape(-1, requests, _BLOCKS)
        turns = [
            AttentionMetadata(
                num_reqs=requests,
                num_tokens=requests,
                max_query_len=1,
                max_seq_len=length,
                query_start_loc=from_numpy(np.arange(requests + 1, dtype=np.int32)),
                seq_lens=from_numpy(np.full(requests, length, np.int32)),
                block_table=from_numpy(table),
                slot_mapping=from_numpy(np.zeros(requests, np.int64)),
            )
            for table in tables
        ]
        shape = backend.kv_cache_shape(count, _BLOCK_SIZE, _KV_HEADS, _HEAD_SIZE)
        params, seconds = AttentionParams(scale=1.0), []
        for memory in (self._zeros, self._memory):
            cache = memory[: count * block_nbytes].view("bfloat16").view(shape)

            def attend(turn: int, cache: HostTensor = cache) -> None:
                backend.forward(query, cache, turns[turn % len(turns)], out, params)

            seconds.append(_lower_quartile(attend))
        computing, whole = seconds
        reading = used * block_nbytes / bandwidth
        return _exposed(whole, computing, reading)


def _exposed(whole: float, computing: float, reading: float) -> float:
    """Return the share of the smaller one of two times that the larger one does not hide."""
    return max(0.0, whole - max(computing, reading)) / min(computing, reading)


def _lower_quartile(run: Callable[[int], object]) -> float:
    """Return the lower quartile of the seconds of a function, which is given its turn.

    The least would be misleading: with other users, memory is sometimes much faster than usual.
    """
    run(0)
    taken: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(taken) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        run(len(taken) + 1)
        taken.append(time.perf_counter() - begin)
    return float(np.percentile(taken, 25))
