"""A model with the engine's kernels that computes one chunk of a text at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.attention.base import AttentionBackend
from octavo.engine.assemble import set_up_worker
from octavo.errors import ConfigError, ModelError
from octavo.kv_cache.groups import KVCacheConfig
from octavo.layers.step import StepContext
from octavo.messages import CoreSamplingParams, NewRequestData, ScheduledRequest
from octavo.model_tools.opened import OpenedModel
from octavo.models.decoder import DecoderModel
from octavo.models.loader import load_model
from octavo.models.open_model import open_model
from octavo.models.weight_cache import WeightCache
from octavo.platforms.registry import get_platform
from octavo.system.tensor import Tensor
from octavo.worker.graphs import EagerSteps
from octavo.worker.input_batch import InputBatch, StepBuffers
from octavo.worker.loading_bar import loading_bar
from octavo.worker.platform import Platform

Floats = NDArray[np.float32]
_ROWS = 64
"""Rows of logits at a time: those of all tokens would not fit into the memory."""
_REQUEST = "chunk"


class ChunkRunner:
    """Model that computes chunks of a text, layer by layer, without the engine's captured steps.

    Captured steps call the same kernels, so the numbers have the same bits.

    Args:
        model: the model. Its settings have one request of a chunk's length.

    Raises:
        ConfigError, ModelError: the model cannot be loaded.
    """

    def __init__(self, model: OpenedModel) -> None:
        config = model.config
        platform = get_platform(config.device.device)
        chunk = config.model.max_model_len
        assert chunk is not None
        self.setup = setup = set_up_worker(config, model.spec, model.path, platform, chunk)
        device = platform.open_device(setup)
        self.ops = platform.make_ops(config.device, device)
        backend = platform.make_attention_backend(setup, device)
        with loading_bar(config.model.model, shown=True) as progress:
            loaded = load_model(
                setup.part,
                open_model(config, model.path, setup.dtype),
                dtype=setup.dtype,
                max_model_len=chunk,
                ops=self.ops,
                progress=progress,
                cache=WeightCache.from_config(config),
            )
        if not isinstance(loaded, DecoderModel):
            raise ConfigError(
                f"{config.model.model} is a {model.spec.architecture}, whose layers cannot be "
                "measured; name a decoder."
            )
        self.model = loaded
        groups = setup.kv_cache_groups
        num_paged = sum(not group.has_states for group in groups)
        each = -(-chunk // config.cache.block_size)
        # The groups share the tensors, so each has blocks of its own.
        self._blocks = [list(range(1 + g * each, 1 + (g + 1) * each)) for g in range(num_paged)]
        kv = KVCacheConfig(num_paged * each + 1, config.cache.block_size, groups, num_states=1)
        self._batch = InputBatch(1, chunk, kv, setup.part.step_arrays)
        self._buffers = StepBuffers(self._batch.layout(setup.largest_step))
        self._whole, self._single = (self._steps(platform, backend, kv) for _ in range(2))

    def _steps(
        self, platform: Platform, backend: AttentionBackend, kv: KVCacheConfig
    ) -> EagerSteps:
        """Return a runner with caches of its own."""
        dtype = self.setup.kv_cache_dtype
        tensors = [
            platform.allocate_cache(count, nbytes, self.ops)
            for count, nbytes in kv.tensor_sizes(dtype)
        ]
        caches = [
            cache.view(tensors[slot], kv.block_size, dtype, backend)
            for slot, cache in zip(kv.layer_to_tensor, self.setup.part.caches, strict=True)
        ]
        return EagerSteps(
            self.model,
            self.ops,
            backend,
            caches,
            [group.cache for group in kv.groups],
            kv.layer_to_group,
            self._buffers,
        )

    def begin(self, tokens: list[int], *, single: bool = False) -> tuple[Tensor, StepContext]:
        """Return the first layer's input for a chunk [T, hidden_size], and the context of its step.

        Args:
            tokens: the chunk.
            single: True for a second set of caches, of layers that compute other inputs than those
                of the layers before.
        """
        batch = self._batch
        batch.remove(_REQUEST)
        new = NewRequestData(tokens, len(tokens), CoreSamplingParams(), 0, state_slots=[0])
        batch.append_blocks(batch.add(_REQUEST, new), self._blocks)
        request = ScheduledRequest(_REQUEST, len(tokens), self._blocks, new=new)
        inputs = batch.gather([request], {}, self._buffers)
        table: Any = inputs.table.first(inputs.size).map(self.ops.to_device)
        steps = self._single if single else self._whole
        step = steps.context(table, len(tokens), len(tokens))
        return self.model.begin(table.input_ids, step), step

    def hidden_states(self, tokens: list[int]) -> Tensor:
        """Return the hidden states of a chunk after the final norm: [T, hidden_size]."""
        x, step = self.begin(tokens)
        residual: Tensor | None = None
        for layer in self.model.layers:
            x, residual = layer(x, residual, step)
        return self.model.finish(x, residual)

    def stream(self, x: Tensor, residual: Tensor | None) -> Floats:
        """Return the residual stream [T, hidden_size] after a layer, in float32."""
        total = x if residual is None else self.ops.add(x, residual)
        return self.ops.to_host(total).astype(np.float32)

    def logits(self, hidden: Tensor) -> Iterator[Floats]:
        """Yield the logits of all tokens, [at most 64, vocab_size] at a time.

        The caller may change them.

        Raises:
            ModelError: they are not finite.
        """
        for at in range(0, len(hidden), _ROWS):
            logits: Floats = self.ops.to_host(self.model.head(hidden[at : at + _ROWS]))
            if np.isnan(logits).any() or np.isposinf(logits).any():
                raise ModelError(
                    f"{self.setup.config.model.model} computes logits that are not finite numbers; "
                    "try --dtype float32, or download the model again."
                )
            yield logits


def log_softmax_(logits: Floats) -> Floats:
    """Replace logits [M, vocab_size] by their log-probabilities, and return them."""
    logits -= logits.max(axis=1, keepdims=True)
    sums = np.exp(logits).sum(axis=1, dtype=np.float64, keepdims=True)
    logits -= np.log(sums).astype(np.float32)
    return logits
