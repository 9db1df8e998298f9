"""Trial of this machine's memory: its bandwidth, and how well kernels hide reading.

Products and attention run once with their numbers in the caches, and once with numbers that fill
memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from octavo import _native
from octavo.attention.base import AttentionMetadata, AttentionParams
from octavo.attention.cpu import CPUAttention
from octavo.kernels.base import PackedWeight
from octavo.kernels.memory import map_memory
from octavo.kernels.native import NativeOps
from octavo.plan.step_cost import Machine
from octavo.system.tensor import HostTensor, from_numpy, full

_INPUTS, _ROWS = 2048, 8
_CACHED_OUTPUTS = 256
"""Outputs of a weight in the caches for each thread: 1 MiB."""
_KV_HEADS, _GROUP, _HEAD_SIZE, _BLOCK_SIZE = 8, 4, 64, 16
_REQUESTS, _BLOCKS = 8, 32
_BF16 = 2
_SECONDS = 0.1
"""Time of each measurement."""


def try_memory(nbytes: int) -> Machine:
    """Measure the memory, with the current number of kernel threads; takes about a second.

    Args:
        nbytes: bytes that a step reads. Numbers that fit the caches are read from these.
    """
    memory = map_memory(max(nbytes, 2**22))
    _native.touch_pages(memory.data_ptr(), memory.nbytes)
    bandwidth, exposed = _try_products(memory)
    return Machine(bandwidth, exposed=exposed, exposed_in_blocks=_try_attention(memory, bandwidth))


def _try_products(memory: HostTensor) -> tuple[float, float]:
    """Return the bandwidth, and the exposed share in products.

    With r, the time of reading, and x, the exposed share: the product of one row takes
    r + x * computing, as reading takes longer; that of several rows takes computing + x * r.
    """
    ops, panels = NativeOps(), 64

    def seconds(rows: int, outputs: int) -> float:
        n = outputs // panels * panels
        data = memory[: _BF16 * n * _INPUTS]
        weight = PackedWeight(data, n, _INPUTS, "bfloat16", _native.panel())
        x, out = full((rows, _INPUTS), 1.0, "bfloat16"), full((rows, n), 0.0, "bfloat16")
        return _lower_quartile(lambda _: ops.linear(x, weight, out=out)) / n

    whole = memory.nbytes // (_BF16 * _INPUTS)
    few = min(whole, _CACHED_OUTPUTS * _native.num_threads())
    one, several = seconds(1, whole), seconds(_ROWS, whole)
    # Not less than 0, and not more than it can be
    product = max(0.0, several - seconds(_ROWS, few)) * seconds(1, few)
    reading = (one + math.sqrt(max(0.0, one**2 - 4 * product))) / 2
    exposed = min(1.0, max(0.0, several - seconds(_ROWS, few)) / reading)
    return _BF16 * _INPUTS / reading, exposed


def _try_attention(memory: HostTensor, bandwidth: float) -> float:
    """Return the exposed share in attention of decoded tokens."""
    backend, block_nbytes = CPUAttention(), 2 * _BF16 * _KV_HEADS * _BLOCK_SIZE * _HEAD_SIZE
    count = memory.nbytes // block_nbytes
    kv_cache = memory[: count * block_nbytes].view("bfloat16")
    shape = backend.kv_cache_shape(count, _BLOCK_SIZE, _KV_HEADS, _HEAD_SIZE)
    used = min(_REQUESTS * _BLOCKS, count)
    requests, length = used // _BLOCKS or 1, min(_BLOCKS, used) * _BLOCK_SIZE
    query = full((requests, _KV_HEADS * _GROUP, _HEAD_SIZE), 1.0, "bfloat16")
    out = full((requests, _KV_HEADS * _GROUP, _HEAD_SIZE), 0.0, "bfloat16")
    tables = np.arange(count // used * used, dtype=np.int32).reshape(-1, requests, used // requests)
    metadata = [
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
    params = AttentionParams(scale=1.0)
    view = kv_cache.view(shape)
    cached = _lower_quartile(lambda _: backend.forward(query, view, metadata[0], out, params))
    read = _lower_quartile(
        lambda turn: backend.forward(query, view, metadata[turn % len(metadata)], out, params)
    )
    reading = used * block_nbytes / bandwidth
    return min(1.0, max(0.0, (read - max(cached, reading)) / min(cached, reading)))


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
