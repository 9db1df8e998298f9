"""The attention block: projections, norms and rotation of heads, KV cache, attention, output."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octavo.attention.base import Rotary
from octavo.kernels.base import Ops
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.shared import Columns
from octavo.layers.step import StepContext


@dataclass(slots=True, kw_only=True)
class Attention:
    """Causal self-attention over a paged KV cache."""

    ops: Ops
    cache: int
    """Index of its cache in `StepContext.caches`."""
    qkv_proj: Linear
    """To queries, keys and values, stacked."""
    o_proj: Linear
    """From the heads' results to the hidden size."""
    num_heads: int
    """Of queries."""
    num_kv_heads: int
    """Of keys and values; divides `num_heads`."""
    head_size: int
    scale: float
    """Of the attention scores."""
    sliding_window: int | None = None
    """Positions a token sees, itself included; None: all."""
    logits_soft_cap: float | None = None
    """Of the attention scores."""
    alibi_slopes: Tensor | None = None
    """float32 [num_heads]."""
    cos_sin_cache: Tensor | None = None
    """See `octavo.layers.rotary`; None without rotary positions."""
    is_neox: bool = True
    """Which elements of a head are pairs: see `Ops.rotary_embedding`."""
    q_norm: RMSNorm | None = None
    """Over each head of the queries, or over all of them."""
    k_norm: RMSNorm | None = None
    clip: float | None = None
    """Queries, keys and values are cut to [-clip, clip]."""
    columns: Columns | None = None
    """Which columns of all heads' results these heads are, where other ranks have the others."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]; writes this step's keys and values."""
        tokens, backend = x.shape[0], step.backend
        kv_cache, metadata = step.caches[self.cache], step.metadata[self.cache]
        qkv = self.qkv_proj(x)
        if self.clip is not None:
            self.ops.clamp_(qkv, self.clip)
        heads = qkv.view(tokens, -1, self.head_size)
        split = self.num_heads, self.num_kv_heads, self.num_kv_heads
        query, key, value = heads.split_with_sizes(split, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.heads_(query)
            self.k_norm.heads_(key)
        rotary = None
        if self.cos_sin_cache is not None:
            rotary = Rotary(
                self.ops.rotary_embedding, step.positions, query, self.cos_sin_cache, self.is_neox
            )
        backend.write_kv(key, value, kv_cache, metadata.slot_mapping, rotary)
        if self.columns is None:
            out = self.ops.empty(tokens, self.num_heads, self.head_size, like=x)
            whole = out.view(tokens, -1)
        else:
            whole, own = self.columns.empty(tokens, x.dtype)
            out = own.view(tokens, self.num_heads, self.head_size)
        backend.forward(
            query,
            kv_cache,
            metadata,
            out,
            scale=self.scale,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.logits_soft_cap,
            alibi_slopes=self.alibi_slopes,
        )
        if self.columns is not None:
            self.columns.join()
        return self.o_proj(whole)
