"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in the absorbed form."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.kernels.weights import PackedWeight
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.shared import Columns
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


@dataclass(slots=True, kw_only=True)
class LatentAttention:
    """Causal self-attention of all heads over a paged cache of latents."""

    ops: Ops
    cache: int
    """Index of the layer's cache in `StepContext.caches`."""
    in_proj: Linear
    """Projection to the input of `q_b_proj` (or to queries), latent and rotated key, stacked."""
    q_norm: RMSNorm | None
    """Norm of the input of `q_b_proj`."""
    q_b_proj: Linear | None
    """Projection to the queries; None if `in_proj` computes them."""
    kv_norm: RMSNorm
    """Norm of the latent."""
    key_heads: PackedWeight
    """Weight [num_heads * latent_size, key_size], which multiplies the queries."""
    value_heads: PackedWeight
    """Weight [num_heads * value_size, latent_size], which multiplies the results."""
    o_proj: Linear
    """Projection from the heads' results to the hidden size."""
    num_heads: int
    key_size: int
    """Size of the part of a query that is not rotated."""
    rope_size: int
    """Size of the rotated part of a query, and of the key that all heads share."""
    value_size: int
    """Size of a head's result."""
    latent_size: int
    scale: float
    one: Tensor
    """Number 1, [1]: the factor with which rotated parts are copied."""
    cos_sin_cache: Tensor | None
    """Table of `octavo.layers.rotary`; None without rotary positions."""
    is_neox: bool
    """Layout of the rotated pairs: see `Ops.rotary_embedding`."""
    query_factors: Tensor | None
    """Factor of the queries at each position: [positions, 1]."""
    columns: Columns | None
    """Columns of these heads in the result of all heads, if other ranks have the others."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size]; store this step's latents."""
        ops, tokens, backend = self.ops, x.shape[0], step.backend
        cache, metadata = step.caches[self.cache], step.metadata[self.cache]
        heads, size = self.num_heads, self.latent_size + self.rope_size
        projected = self.in_proj(x)
        queries, latents = projected.split_with_sizes((projected.shape[1] - size, size), dim=1)
        if self.q_b_proj is not None:
            assert self.q_norm is not None
            queries = self.q_b_proj(self.q_norm(queries))
        if self.query_factors is not None:
            factors = ops.embedding(self.query_factors, step.positions)
            ops.multiply(queries, factors, out=queries)
        # [T, heads, ...]; the latent is one head.
        split = self.key_size, self.rope_size
        whole = queries.view(tokens, heads, sum(split))
        query, query_rope = whole.split_with_sizes(split, dim=2)
        latent, key_rope = latents[:, None].split_with_sizes((self.latent_size, self.rope_size), 2)
        self.kv_norm.heads_(latent)
        absorbed = ops.empty(tokens, heads, size, like=x)
        absorbed_latent, absorbed_rope = absorbed.split_with_sizes(
            (self.latent_size, self.rope_size), dim=2
        )
        ops.head_linear(query, self.key_heads, heads, absorbed_latent)
        ops.multiply(query_rope, self.one, out=absorbed_rope)
        if self.cos_sin_cache is not None:
            table, is_neox = self.cos_sin_cache, self.is_neox
            ops.rotary_embedding(step.positions, absorbed_rope, key_rope, table, is_neox)
        backend.write_latents(latents, cache, metadata.slot_mapping)
        if step.progress is not None:
            step.progress.reach(self.cache + 1)
        results = ops.empty(tokens, heads, self.latent_size, like=x)
        backend.attend_latents(absorbed, cache, metadata, results, self.scale)
        if self.columns is None:
            joined = own = ops.empty(tokens, heads * self.value_size, like=x)
        else:
            joined, own = self.columns.empty(tokens, x.dtype)
        ops.head_linear(results, self.value_heads, heads, own.view(tokens, heads, self.value_size))
        if self.columns is not None:
            self.columns.join()
        return self.o_proj(joined)
