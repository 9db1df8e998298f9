"""Attention in plain torch: the reference for tests, and for devices without a kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.attention.base import (
    AttentionMetadata,
    AttentionParams,
    DistanceProducts,
    LargestAttention,
    Rotary,
    cached_head_size,
)
from octavo.kernels.reference import to_bytes
from octavo.kernels.torch_tensors import torch_dtype

# Copies of float32 logits: raw, masked, exponentials, probabilities.
_LOGITS_COPIES = 4


def _to_cache(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert [..., head_size] to a cache of type `dtype`; types of 8 bits as raw bytes."""
    if dtype == torch.int8:
        wide = x.float()
        q, scale = to_bytes(wide)
        broken = ~wide.isfinite().all(-1, keepdim=True)
        scale = scale.masked_fill(broken, torch.nan)
        q = q.masked_fill(broken, 0).to(torch.int8)
        return torch.cat([q, scale.contiguous().view(torch.int8)], -1)
    if dtype.itemsize == 1:
        most = torch.finfo(dtype).max
        return x.float().clamp(-most, most).to(dtype).view(torch.int8)
    return x


def _from_cache(x: Tensor, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
    if dtype == torch.int8:
        scales = x[..., -4:].clone(memory_format=torch.contiguous_format)  # aligned
        return x[..., :-4].to(wide) * scales.view(torch.float32).to(wide)
    return (x.view(dtype) if dtype.itemsize == 1 else x).to(wide)


def _cells(kv_cache: Tensor) -> Tensor:
    """View the cache as a type that torch can index."""
    return kv_cache.view(torch.int8) if kv_cache.dtype.itemsize == 1 else kv_cache


def _store(cache: Tensor, slot_mapping: Tensor, *parts: Tensor) -> None:
    """Write keys and values, or latents, [T, KVH, D] to a cache [blocks, parts, slots, ...]."""
    block_size = cache.shape[2]
    wanted = slot_mapping >= 0
    slots = slot_mapping[wanted]
    cells = _cells(cache)
    for i, x in enumerate(parts):
        cells[slots // block_size, i, slots % block_size] = _to_cache(x[wanted], cache.dtype)


def _products(products: DistanceProducts, distance: Tensor, tokens: slice) -> Tensor:
    """Return the sums of the products for each query and key of the text `tokens`: [H, n, k].

    `distance` is that of each key from each query: int64 [n, k].
    """
    columns = products.columns
    most = len(columns) // 2
    column = columns[distance.clamp(-most, most) + most].long()
    queries, keys = (torch.arange(n, device=distance.device) for n in distance.shape)
    total = torch.zeros((), device=distance.device)
    for tensor, rows in ((products.queries, queries[:, None]), (products.keys, keys[None])):
        if tensor is not None:
            total = total + tensor[tokens][rows, :, column].float()
    return total.permute(2, 0, 1)


class ReferenceAttention:
    """Implementation of `AttentionBackend` in torch, one request at a time."""

    name = "reference"
    pads_blocks = True

    def kv_cache_shape(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: str | None = None,
    ) -> tuple[int, ...]:
        """Return [num_blocks, 2, block_size, num_kv_heads, head_size]: keys, then values.

        In int8 each head is followed by its scale of 4 bytes.
        """
        if dtype is not None:
            head_size = cached_head_size(head_size, dtype)
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    def typed(self, memory: Tensor, dtype: str) -> Tensor:
        """Implement `AttentionBackend`."""
        return memory.view(torch_dtype(dtype))

    def scratch_nbytes(self, largest: LargestAttention) -> int:
        """Return the bytes of a request's logits, their copies, and its keys and values."""
        length = largest.max_model_len
        rows = min(largest.num_tokens, length)
        logits = (4 * _LOGITS_COPIES * largest.num_heads + 16) * rows * length
        heads = 4 * largest.num_kv_heads + 4 * largest.num_heads
        return logits + 4 * length * largest.head_size * heads

    def latent_cache_shape(
        self, num_blocks: int, block_size: int, latent_size: int, dtype: str | None = None
    ) -> tuple[int, ...]:
        """Return the shape of one head's keys."""
        shape = self.kv_cache_shape(num_blocks, block_size, 1, latent_size, dtype)
        return (num_blocks, 1, *shape[2:])

    def write_latents(self, latents: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
        """Store by indexing."""
        _store(cache, slot_mapping, latents[:, None])

    def attend_latents(
        self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, out: Tensor, scale: float
    ) -> None:
        """Compute like `forward`."""
        self.forward(query, cache, metadata, out, AttentionParams(scale))

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        rotary: Rotary | None = None,
    ) -> None:
        """Store by indexing."""
        if rotary is not None:
            rotary(key)
        value = F.pad(value, (0, key.shape[2] - value.shape[2]))
        _store(kv_cache, slot_mapping, key, value)

    def forward(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        out: Tensor,
        params: AttentionParams,
    ) -> None:
        """Compute the full matrix of logits of each request, in float32 or better."""
        wide = torch.promote_types(query.dtype, torch.float32)
        block_size, group = kv_cache.shape[2], query.shape[1] // kv_cache.shape[3]
        starts = metadata.query_start_loc.tolist()
        for r, seq_len in enumerate(metadata.seq_lens.tolist()):
            tokens = slice(starts[r], starts[r + 1])
            query_len = starts[r + 1] - starts[r]
            if query_len == 0:
                continue
            position = seq_len - query_len if params.causal else 0
            first = 0
            if params.sliding_window is not None:
                first = max(0, position - params.sliding_window + 1)
            if params.chunk_size is not None:
                first = position // params.chunk_size * params.chunk_size
            ranges = None
            if params.sees_ranges and metadata.ranges is not None:
                ranges = metadata.ranges[tokens]
                first = max(0, min(first, int(ranges[:, 0].min())))
            keys_at = torch.arange(first, seq_len, device=query.device)
            blocks = metadata.block_table[r][keys_at // block_size].long()
            kv = _cells(kv_cache)[blocks, :, keys_at % block_size]
            kv = _from_cache(kv, kv_cache.dtype, wide)
            key, *values = kv.repeat_interleave(group, dim=2).unbind(1)  # [positions, H, D]
            value = (values[0] if values else key)[..., : out.shape[2]]
            logits = torch.einsum("qhd,khd->hqk", query[tokens].to(wide), key)
            queries_at = torch.arange(position, position + query_len, device=query.device)
            distance = keys_at[None] - queries_at[:, None]  # [q, k], 0 for the token itself
            if params.products is not None:
                logits = logits + _products(params.products, distance, tokens).to(wide)
            logits = logits * params.scale
            if params.logits_soft_cap is not None:
                logits = params.logits_soft_cap * torch.tanh(logits / params.logits_soft_cap)
            if params.alibi_slopes is not None:
                logits = logits - params.alibi_slopes.to(wide)[:, None, None] * distance.abs()
            if params.position_bias is not None:
                most = params.position_bias.shape[1] // 2
                logits = logits + params.position_bias[:, distance.clamp(-most, most) + most]
            hidden = (distance > 0) & params.causal
            if params.sliding_window is not None:
                hidden = hidden | (distance.abs() >= params.sliding_window)
            if params.chunk_size is not None:
                begins = queries_at // params.chunk_size * params.chunk_size
                hidden = hidden | (keys_at[None] < begins[:, None])
            if ranges is not None:
                after = queries_at[:, None] + 1
                begins = torch.minimum(ranges[:, :1], after)
                ends = torch.maximum(ranges[:, 1:], after)
                hidden = hidden & ((keys_at[None] < begins) | (keys_at[None] >= ends))
            logits = logits.masked_fill(hidden, -torch.inf)
            if params.sinks is not None:
                sinks = params.sinks.to(wide)[:, None, None].expand(-1, query_len, 1)
                logits = torch.cat([logits, sinks], dim=-1)
            weights = torch.softmax(logits, dim=-1)[..., : len(keys_at)]
            weights = weights.masked_fill(hidden, 0)  # NaN where a token sees nothing
            out[tokens] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)
