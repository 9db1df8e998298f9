"""The attention block: projections, norms and rotation of heads, KV cache, attention, output."""

from __future__ import annotations

from torch import Tensor

from octavo.attention.base import Rotary
from octavo.kernels.base import Ops
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.step import StepContext


class Attention:
    """Causal self-attention over a paged KV cache.

    Args:
        ops: table of operations.
        cache: index of its cache in `StepContext.caches`.
        qkv_proj: to queries, keys and values, stacked.
        o_proj: from the heads' results to the hidden size.
        num_heads: query heads.
        num_kv_heads: heads of keys and values; divides `num_heads`.
        head_size: elements of a head.
        scale: of the attention scores.
        sliding_window: positions a token sees, itself included; None: all.
        logits_soft_cap: of the attention scores, or None.
        alibi_slopes: float32 [num_heads], or None.
        cos_sin_cache: see `octavo.layers.rotary`, or None without rotary positions.
        q_norm, k_norm: norms over each head of queries and keys, or None.
        clip: queries, keys and values are cut to [-clip, clip]; None: not.
    """

    __slots__ = (
        "alibi_slopes",
        "cache",
        "clamp_",
        "clip",
        "cos_sin_cache",
        "empty",
        "head_size",
        "k_norm",
        "logits_soft_cap",
        "num_heads",
        "o_proj",
        "q_norm",
        "qkv_proj",
        "rotary",
        "scale",
        "sliding_window",
        "splits",
    )

    def __init__(
        self,
        ops: Ops,
        cache: int,
        qkv_proj: Linear,
        o_proj: Linear,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        alibi_slopes: Tensor | None = None,
        cos_sin_cache: Tensor | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        clip: float | None = None,
    ) -> None:
        self.rotary = ops.rotary_embedding
        self.clamp_ = ops.clamp_
        self.empty = ops.empty
        self.cache = cache
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.num_heads = num_heads
        self.head_size = head_size
        self.splits = (num_heads, num_kv_heads, num_kv_heads)
        self.scale = scale
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap
        self.alibi_slopes = alibi_slopes
        self.cos_sin_cache = cos_sin_cache
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.clip = clip

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]; writes this step's keys and values."""
        tokens, backend = x.shape[0], step.backend
        kv_cache, metadata = step.caches[self.cache], step.metadata[self.cache]
        qkv = self.qkv_proj(x)
        if self.clip is not None:
            self.clamp_(qkv, self.clip)
        heads = qkv.view(tokens, -1, self.head_size)
        query, key, value = heads.split_with_sizes(self.splits, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.heads_(query)
            self.k_norm.heads_(key)
        rotary = None
        if self.cos_sin_cache is not None:
            rotary = Rotary(self.rotary, step.positions, query, self.cos_sin_cache)
        backend.write_kv(key, value, kv_cache, metadata.slot_mapping, rotary)
        out = self.empty(tokens, self.num_heads, self.head_size, like=x)
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
        return self.o_proj(out.view(tokens, -1))
