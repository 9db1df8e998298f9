"""Attention by the FlashInfer package, for CUDA (Ye et al., "FlashInfer", MLSys 2025).

The host plans each step, so a step waits for the device once and cannot be captured.
"""

from __future__ import annotations

from typing import Any

import flashinfer
import torch
from torch import Tensor

from octavo.attention.base import (
    AttentionMetadata,
    AttentionParams,
    NoLatents,
)
from octavo.attention.triton import PagedCaches
from octavo.errors import ConfigError
from octavo.kernels.torch_tensors import torch_dtype

_WORKSPACE_NBYTES = 128 * 2**20


class FlashInferAttention(NoLatents, PagedCaches):
    """Implementation of `AttentionBackend` by FlashInfer.

    Args:
        device: the CUDA device.
    """

    name = "flashinfer"
    pads_blocks = False

    def __init__(self, device: torch.device) -> None:
        workspace = torch.empty(_WORKSPACE_NBYTES, dtype=torch.uint8, device=device)
        self._wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._planned_for: AttentionMetadata | None = None
        self._params: AttentionParams | None = None

    def kv_cache_shape(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: str | None = None,
    ) -> tuple[int, ...]:
        """Return [num_blocks, 2, block_size, num_kv_heads, head_size]: keys, then values."""
        if dtype is not None and torch_dtype(dtype).itemsize == 1:
            raise ConfigError(
                "kv_cache_dtype: attention_backend=flashinfer does not support an 8-bit cache "
                "yet; use auto, or attention_backend=triton."
            )
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    def forward(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        out: Tensor,
        params: AttentionParams,
    ) -> None:
        """Run one call for prefill chunks and decode rows."""
        assert params.alibi_slopes is None, "refused by the platform"
        assert params.sinks is None, "refused by the platform"
        if not params.causal or params.position_bias is not None:
            raise ConfigError(
                "attention_backend=flashinfer does not support encoders, nor position biases, yet; "
                "use attention_backend=triton."
            )
        # Layers of a step with the same parameters share a plan.
        if self._planned_for is not metadata or self._params != params:
            self._plan(query, kv_cache, metadata, params)
            self._planned_for, self._params = metadata, params
        self._wrapper.run(query.contiguous(), kv_cache, out=out)

    def _plan(
        self, query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, params: AttentionParams
    ) -> None:
        block_size = kv_cache.shape[2]
        pages = (metadata.seq_lens + block_size - 1) // block_size
        columns = torch.arange(metadata.block_table.shape[1], device=pages.device)
        indptr = torch.zeros(len(pages) + 1, dtype=torch.int32, device=pages.device)
        indptr[1:] = pages.cumsum(0)
        self._wrapper.plan(
            metadata.query_start_loc,
            indptr,
            metadata.block_table[columns < pages[:, None]],
            (metadata.seq_lens - 1) % block_size + 1,
            query.shape[1],
            kv_cache.shape[3],
            query.shape[2],
            block_size,
            causal=True,
            sm_scale=params.scale,
            window_left=-1 if params.sliding_window is None else params.sliding_window - 1,
            logits_soft_cap=params.logits_soft_cap,
            q_data_type=query.dtype,
            kv_data_type=kv_cache.dtype,
        )
