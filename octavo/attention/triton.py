"""Attention by the Triton kernels in octavo/kernels/triton, for CUDA."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from octavo.attention.base import (
    AttentionMetadata,
    AttentionParams,
    DistanceProducts,
    LargestAttention,
    Rotary,
)
from octavo.errors import ConfigError
from octavo.kernels.torch_tensors import torch_dtype
from octavo.kernels.triton.attention import MOST_SPLITS, attention
from octavo.kernels.triton.attention_prefill import prefill
from octavo.kernels.triton.attention_step import Step
from octavo.kernels.triton.fp8 import E4M3, E5M2
from octavo.kernels.triton.kv_write import write_kv, write_latents
from octavo.system.device import cuda_capability, cuda_cores

MIN_SPLIT = 256
"""Minimum number of positions of a split of the KV."""

_FORMATS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
_MAX_HEAD_SIZE, _MAX_LATENT_SIZE = 512, 576
# Rows of a program for decode rows, and of every program with `batch_invariant`.
_DECODE_ROWS, _INVARIANT_ROWS = 16, 64
_PROGRAMS_PER_CORE = 2  # number that fits a core of every GPU: all run at once
_MIXED_PROGRAMS = 4  # in a step with prefill chunks, where most programs are idle
# Size per core of the results of shared splits: 1 MiB. Steps that need more have enough rows to
# fill the GPU.
_WORKSPACE_FLOATS = 2**18


class PagedCaches:
    """Caches on the device, [blocks, 2, block_size, KVH, D]; part of the backends for CUDA."""

    def typed(self, memory: Tensor, dtype: str) -> Tensor:
        """Implement `AttentionBackend`."""
        return memory.view(torch_dtype(dtype))

    def scratch_nbytes(self, largest: LargestAttention) -> int:
        """Return 0: attention uses memory of the device, which is measured."""
        return 0

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        rotary: Rotary | None = None,
    ) -> None:
        """Store in one launch, together with the rotary embedding."""
        cells, format = _cells(kv_cache)
        if rotary is None:
            write_kv(key, value, cells, slot_mapping, format=format)
        else:
            write_kv(
                key,
                value,
                cells,
                slot_mapping,
                format=format,
                query=rotary.query,
                positions=rotary.positions,
                cos_sin_cache=rotary.cos_sin_cache,
                is_neox=rotary.is_neox,
            )


class TritonAttention(PagedCaches):
    """Implementation of `AttentionBackend` for CUDA.

    A row's result does not depend on the other rows of a step. With `batch_invariant` it does not
    depend on the presence of prefill chunks either, and a token has the same bits decoded or
    prefilled.

    Args:
        device: the CUDA device.
        max_model_len: longest context; determines the splits of the KV.
        batch_invariant: True to use the same tile for all steps.
    """

    name = "triton"
    pads_blocks = True

    def __init__(
        self, device: torch.device, max_model_len: int, *, batch_invariant: bool = False
    ) -> None:
        self.split = max(MIN_SPLIT, triton.next_power_of_2(-(-max_model_len // MOST_SPLITS)))
        self.max_model_len = max_model_len
        self.batch_invariant = batch_invariant
        interpreted = device.type == "cpu"
        self.cores = 4 if interpreted else cuda_cores(device)
        self.native_fp8 = not interpreted and cuda_capability(device) >= (8, 9)
        self.upcast = interpreted  # Triton's interpreter cannot multiply bfloat16
        self._workspace = torch.empty(_WORKSPACE_FLOATS * self.cores, device=device)

    def kv_cache_shape(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: str | None = None,
    ) -> tuple[int, ...]:
        """Return [num_blocks, 2, block_size, num_kv_heads, head_size]: keys, then values."""
        if head_size > _MAX_HEAD_SIZE:
            raise ConfigError(
                f"head_size={head_size}: Triton attention supports up to {_MAX_HEAD_SIZE}; use "
                "attention_backend=reference."
            )
        _check_dtype(dtype)
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    def forward(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        out: Tensor,
        params: AttentionParams,
    ) -> None:
        """Launch the kernels for decode rows and for requests with several queries.

        If several programs share the splits of a decode row, launch another kernel to merge them.
        """
        if metadata.num_tokens == 0:
            return
        self._attend(
            metadata,
            query=query,
            kv_cache=kv_cache,
            out=out,
            scale=params.scale,
            sliding_window=params.sliding_window,
            chunk_size=params.chunk_size,
            logits_soft_cap=params.logits_soft_cap,
            alibi_slopes=params.alibi_slopes,
            sinks=params.sinks,
            causal=params.causal,
            position_bias=params.position_bias,
            ranges=metadata.ranges if params.sees_ranges else None,
            **_products(params.products),
        )

    def latent_cache_shape(
        self, num_blocks: int, block_size: int, latent_size: int, dtype: str | None = None
    ) -> tuple[int, ...]:
        """Return [num_blocks, block_size, latent_size]."""
        if latent_size > _MAX_LATENT_SIZE:
            raise ConfigError(
                f"latent_size={latent_size}: Triton attention supports up to {_MAX_LATENT_SIZE}; "
                "use attention_backend=reference."
            )
        _check_dtype(dtype)
        return (num_blocks, block_size, latent_size)

    def write_latents(self, latents: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
        """Store in one launch."""
        write_latents(latents, *_cells(cache), slot_mapping)

    def attend_latents(
        self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, out: Tensor, scale: float
    ) -> None:
        """Launch the kernels of `forward`, for which latents are one head."""
        if metadata.num_tokens:
            self._attend(metadata, query=query, kv_cache=cache, out=out, scale=scale)

    def _attend(self, metadata: AttentionMetadata, *, kv_cache: Tensor, **given: Any) -> None:
        """Launch the kernels; `given` are fields of `Step`."""
        cells, format = _cells(kv_cache)
        step = Step(
            kv_cache=cells,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            block_table=metadata.block_table,
            format=format,
            native_fp8=self.native_fp8,
            upcast=self.upcast,
            **given,
        )
        decode = metadata.max_query_len == 1
        one_query = decode and metadata.num_tokens == metadata.num_reqs
        if not (decode or self.batch_invariant):
            prefill(step)
            if metadata.num_reqs == 1:
                return
        max_splits = -(-metadata.max_seq_len // self.split)
        pairs = metadata.num_reqs * step.groups
        programs = max(1, min(max_splits, _PROGRAMS_PER_CORE * self.cores // pairs))
        if not decode:  # other programs than those of decode rows are idle
            programs = 1 if metadata.num_reqs == 1 else min(programs, _MIXED_PROGRAMS)
        if step.splits_floats(max_splits) > len(self._workspace):
            programs = 1
        attention(
            step,
            rows="tiles" if self.batch_invariant else "one" if one_query else "decode",
            split=self.split,
            max_splits=max_splits,
            programs=programs,
            workspace=self._workspace,
            block_m=_INVARIANT_ROWS if self.batch_invariant else _DECODE_ROWS,
        )


def _cells(cache: Tensor) -> tuple[Tensor, int]:
    """Return a cache as the kernels read it, and its format; see `octavo.kernels.triton.fp8`."""
    format = _FORMATS.get(cache.dtype, 0)
    return cache.view(torch.uint8) if format else cache, format


def _products(products: DistanceProducts | None) -> dict[str, Any]:
    """Return the fields of `Step` for products with vectors of distances."""
    if products is None:
        return {}
    return {
        "product_columns": products.columns,
        "query_products": products.queries,
        "key_products": products.keys,
    }


def _check_dtype(dtype: str | None) -> None:
    if dtype == "int8":
        raise ConfigError(
            "kv_cache_dtype=int8 is not supported by Triton attention yet; use fp8_e4m3 or "
            "fp8_e5m2."
        )
