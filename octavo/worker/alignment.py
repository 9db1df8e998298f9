"""Alignment of tokens with an encoder's rows by the weights of cross attention.

As in OpenAI's Whisper (`timing.py`: `find_alignment`), some heads tell when each token is spoken.
The weights of each head are normalized over the tokens, smoothed by a median filter over the rows,
and averaged over the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.attention.base import AttentionBackend
from octavo.attention.cpu import CPUAttention
from octavo.errors import RequestError
from octavo.kernels.base import Ops
from octavo.kernels.memory import borrow
from octavo.kv_cache.groups import KVCacheConfig
from octavo.layers.cross_attention import CrossAttention
from octavo.messages import AlignmentSpec
from octavo.system.distributed import Rank
from octavo.system.tensor import Tensor
from octavo.worker.input_batch import InputBatch, StepInputs

Floats = NDArray[np.float32]

_FILTER = 7
"""Rows of the median filter."""


class AlignmentRows:
    """Rows of the requests that return weights of cross attention.

    One step computes all tokens of such a request (`PoolingSpec.whole`). The layers keep no
    weights: this object copies the queries of the step, and multiplies them with the stored keys.

    Args:
        layers: the blocks of cross attention, in the order of the layers.
        caches: the model's caches, as its blocks use them.
        kv: groups of the caches.
        ops: moves arrays to the host.
        backend: reads keys.
        rank: this rank.
    """

    def __init__(
        self,
        layers: Sequence[CrossAttention],
        caches: Sequence[Any],
        kv: KVCacheConfig,
        ops: Ops,
        backend: AttentionBackend,
        rank: Rank,
    ) -> None:
        self._layers, self._ops, self._backend, self._rank = layers, ops, backend, rank
        self._caches = [caches[layer.cache] for layer in layers]
        self._groups = [kv.layer_to_group[layer.cache] for layer in layers]
        self._rows: dict[int, AlignmentSpec] = {}
        self._queries: dict[int, Floats | None] = {}
        """Queries of the step, by layer, for the layers whose queries are needed."""
        can_align = isinstance(backend, CPUAttention)  # see `add_row`
        for index, layer in enumerate(layers if can_align else ()):
            layer.on_query = partial(self._note, index)

    def add_row(self, row: int, spec: AlignmentSpec) -> None:
        """Begin a request in a row.

        Raises:
            RequestError: the weights cannot be computed.
        """
        if self._rank.world_size > 1:
            raise RequestError(
                "times of words are not supported with several ranks; use tensor_parallel_size=1"
            )
        if not isinstance(self._backend, CPUAttention):
            raise RequestError("times of words are supported only by the attention backend cpu")
        dtype = self._caches[0].dtype
        if dtype not in ("float32", "bfloat16", "float16"):
            raise RequestError(
                f"times of words are not supported with keys of the type {dtype}; leave "
                "kv_cache_dtype out"
            )
        for index, head in spec.heads:
            if index >= len(self._layers) or head >= self._layers[index].num_heads:
                raise RequestError(
                    f"the model has no head {head} of cross attention in the layer {index}"
                )
        self._rows[row] = spec

    def remove_row(self, row: int) -> None:
        """Forget the request of a row, if it is here."""
        self._rows.pop(row, None)

    def begin(self, inputs: StepInputs) -> None:
        """Prepare for a step: note the layers whose queries are needed."""
        self._queries = {}
        if self._rows:
            specs = [self._rows[row] for row in inputs.rows.tolist() if row in self._rows]
            self._queries = {index: None for spec in specs for index, _ in spec.heads}

    def align(self, inputs: StepInputs, batch: InputBatch) -> dict[str, bytes]:
        """Return the weights of the requests of a step: float32 [tokens, rows], by request id."""
        results: dict[str, bytes] = {}
        if not self._queries:
            return results
        starts = inputs.table.query_start_loc
        for i, (req_id, row) in enumerate(zip(inputs.req_ids, inputs.rows.tolist(), strict=True)):
            if (spec := self._rows.get(row)) is None:
                continue
            total = None
            for index, head in spec.heads:
                queries = self._queries[index]
                assert queries is not None
                own = queries[int(starts[i]) : int(starts[i + 1]), head]
                weights = normalized(own @ self._keys(index, head, row, batch, spec.num_rows).T)
                total = weights if total is None else np.add(total, weights, out=total)
            assert total is not None
            results[req_id] = (total / np.float32(len(spec.heads))).tobytes()
        self._queries = {}
        return results

    def _note(self, index: int, query: Tensor) -> None:
        """Copy the queries of a layer in every step that needs them.

        A recorded step calls `copy` each time it runs.
        """
        array = borrow(query)

        def copy(tokens: int, _: int) -> None:
            if index in self._queries:
                self._queries[index] = array[:tokens].astype(np.float32)

        self._ops.call(copy, len(array), 0)

    def _keys(self, index: int, head: int, row: int, batch: InputBatch, count: int) -> Floats:
        """Return the first keys for a head of queries, times the factor of the scores."""
        assert isinstance(self._backend, CPUAttention)
        layer, cache = self._layers[index], self._caches[index]
        blocks = -(-count // cache.shape[3])
        ids = batch.block_tables[self._groups[index], row, :blocks].tolist()
        kv_head = head * layer.num_kv_heads // layer.num_heads
        keys = self._backend.read_keys(cache, ids, kv_head, count)
        return keys * np.float32(layer.params.scale)


def normalized(scores: Floats) -> Floats:
    """Return the weights of scores, normalized over the tokens and smoothed over the rows.

    Args:
        scores: float32 [tokens, rows], products of queries and keys; overwritten.
    """
    scores -= scores.max(axis=1, keepdims=True)
    weights = np.exp(scores, out=scores)
    weights /= weights.sum(axis=1, keepdims=True)
    weights -= weights.mean(axis=0, keepdims=True)
    deviation = np.sqrt(np.square(weights).mean(axis=0, keepdims=True))
    weights /= np.maximum(deviation, np.finfo(np.float32).tiny)
    return median(weights)


def median(x: Floats) -> Floats:
    """Return the median of 7 numbers around each one of a row, [n, m].

    The row is mirrored at its ends. A row of at most 3 numbers stays as it is.
    """
    around, length = _FILTER // 2, x.shape[1]
    if length <= around:
        return x
    padded = np.pad(x, ((0, 0), (around, around)), mode="reflect")
    parts = [padded[:, i : i + length].copy() for i in range(_FILTER)]
    # Odd-even sort of the 7 numbers; each exchange is done for all places at once.
    for turn in range(_FILTER):
        for i in range(turn % 2, _FILTER - 1, 2):
            low = np.minimum(parts[i], parts[i + 1])
            np.maximum(parts[i], parts[i + 1], out=parts[i + 1])
            parts[i] = low
    return parts[around]
