"""Keys and values of cross attention, which a request's first step computes and stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.attention.base import AttentionBackend
from octavo.kernels.base import Ops
from octavo.kv_cache.groups import KVCacheConfig
from octavo.layers.cross_attention import CrossAttention
from octavo.messages import ScheduledRequest, SchedulerOutput
from octavo.models.spec import ModelSpec
from octavo.system.dtypes import DTYPE_NBYTES
from octavo.worker.encoder_runner import EncoderRunner
from octavo.worker.input_batch import InputBatch


class CrossAttentionRows:
    """Writer of the rows of encoders to the caches of all layers with cross attention.

    A step runs the encoder for all of its new requests at once, before the decoder. Requests whose
    blocks are known from an earlier request with the same input need no run.

    Args:
        encoder: runs the encoder.
        layers: the blocks of cross attention.
        caches: the model's caches, as its blocks use them.
        kv: groups of the caches.
        ops: moves arrays to the device.
        backend: writes keys and values.
    """

    def __init__(
        self,
        encoder: EncoderRunner,
        layers: Sequence[CrossAttention],
        caches: Sequence[Any],
        kv: KVCacheConfig,
        ops: Ops,
        backend: AttentionBackend,
    ) -> None:
        self._encoder, self._block_size = encoder, kv.block_size
        self.failed: dict[str, str] = {}
        """Errors of the items of live requests whose rows could not be computed, by identifier."""
        self._ops, self._backend = ops, backend
        self._layers = [
            (layer, caches[layer.cache], kv.layer_to_group[layer.cache]) for layer in layers
        ]

    def run_largest(self, num_tokens: int) -> None:
        """Run the longest item, and store nothing, for a measurement of memory.

        Args:
            num_tokens: most rows of a step, for which there is memory at the same time.
        """
        (rows,) = self._encoder.run_largest()
        _others = self._ops.empty(num_tokens, rows.shape[1], like=rows)
        slots = self._ops.to_device(np.full(len(rows), -1))
        for layer, cache, _ in self._layers:
            layer.store(rows, cache, slots, self._backend)

    def compute(self, output: SchedulerOutput, batch: InputBatch) -> None:
        """Compute and store the rows of a step's new requests.

        Args:
            output: the step.
            batch: the rows of the requests, which have their blocks.
        """
        if self.failed:
            live = {item.identifier for of_req in batch.features.values() for item in of_req}
            self.failed = {name: self.failed[name] for name in self.failed.keys() & live}
        if not output.scheduled_encoder_inputs:
            return
        new: list[ScheduledRequest] = [
            request
            for request in output.scheduled_reqs
            if request.req_id in output.scheduled_encoder_inputs
        ]
        items = [item for request in new if request.new for item in request.new.mm_features]
        results, errors = self._encoder.run_apart(items)
        for index, item in enumerate(items):
            self.failed.pop(item.identifier, None)
            if index in errors:
                self.failed[item.identifier] = errors[index]
        size = self._block_size
        for request, rows in zip(new, results, strict=True):
            row, at = batch.row_of[request.req_id], np.arange(len(rows))
            slots = {
                group: self._ops.to_device(
                    batch.block_tables[group, row][at // size].astype(np.int64) * size + at % size
                )
                for group in {group for _, _, group in self._layers}
            }
            for layer, cache, group in self._layers:
                layer.store(rows, cache, slots[group], self._backend)


def rows_nbytes(spec: ModelSpec, dtype: str, num_tokens: int) -> int:
    """Return the bytes of all rows of a step, and of the keys and values of one layer for an item.

    Args:
        spec: a rank's part of the model.
        dtype: type of the model.
        num_tokens: most encoder tokens of a step.
    """
    (encoder,), caches = spec.encoders, spec.cross_caches
    most = max(cache.num_kv_heads * cache.head_size for cache in caches)
    numbers = num_tokens * encoder.out_size + encoder.max_num_tokens * 2 * most
    return numbers * DTYPE_NBYTES[dtype]
