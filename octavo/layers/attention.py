"""Attention block: projections, norms and rotation of heads, KV cache, attention, output."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.attention.base import AttentionParams, Rotary
from octavo.kernels.base import Ops
from octavo.kernels.routing import Gate
from octavo.layers.disentangled import Disentangled
from octavo.layers.linear import Linear
from octavo.layers.norm import HeadFactors, HeadNorms, RMSNorm
from octavo.layers.shared import Columns
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


@dataclass(slots=True, kw_only=True)
class Attention:
    """Causal self-attention over a paged KV cache."""

    ops: Ops
    cache: int
    """Index of the layer's cache in `StepContext.caches`."""
    qkv_proj: Linear
    """Projection to queries, keys, values and gates, stacked; with `qk_proj` to values only."""
    o_proj: Linear
    """Projection from the heads' results to the hidden size."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key and value heads; divides `num_heads`."""
    head_size: int
    """Number of elements of a head of queries or keys."""
    value_size: int
    """Number of elements of a head of values or of the result; at most `head_size`."""
    params: AttentionParams
    cos_sin_cache: Tensor | None = None
    """Table of `octavo.layers.rotary`; None without rotary positions."""
    is_neox: bool = True
    """Layout of a head's pairs: see `Ops.rotary_embedding`."""
    rotated_parts: int = 0
    """Number of parts of a head that `StepContext.rotary` turns separately; 0: none."""
    q_norm: RMSNorm | HeadNorms | HeadFactors | None = None
    """Norm of each head of the queries, or of all of them together."""
    k_norm: RMSNorm | HeadNorms | None = None
    v_norm: RMSNorm | None = None
    """Norm of each head of the values."""
    values_are_keys: bool = False
    """True if the values are the keys before their own norm and rotation, with `v_norm`; `qkv_proj`
    then computes no values."""
    stores: bool = True
    """False if the layer reads keys and values that another layer has stored; `qkv_proj` then
    computes queries only."""
    gate_size: int = 0
    """Number of gates of a head: `value_size`, or 1 for all elements of its result. The activation
    of a gate is a factor of the result. 0: no gates."""
    gate_activation: Gate = "sigmoid"
    gates_follow_queries: bool = False
    """True if `qkv_proj` computes the gate of a head directly after its query; False: all gates
    after the values."""
    value_factor: Tensor | None = None
    """Factor of all values: [1]."""
    query_factors: Tensor | None = None
    """Factor of the queries at each position: [positions, 1]."""
    norms_rotated: bool = False
    """True if the norms follow the rotation."""
    qk_proj: tuple[Linear, Linear] | None = None
    """Projections to the queries and keys of all ranks, if these are normed over all heads."""
    clip: float | None = None
    """Bound of queries, keys and values: they are clamped to [-clip, clip]."""
    columns: Columns | None = None
    """Columns of these heads in the result of all heads, if other ranks have the others."""
    out_norm: RMSNorm | None = None
    """Norm of the result of all heads together."""
    disentangled: Disentangled | None = None
    """Products of queries and keys with vectors of distances."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size]; store this step's keys and values."""
        tokens, backend = x.shape[0], step.backend
        kv_cache, metadata = step.caches[self.cache], step.metadata[self.cache]
        query, gate, params = self.store(x, step)
        if self.columns is None:
            out = self.ops.empty(tokens, self.num_heads, self.value_size, like=x)
            whole = out.view(tokens, -1)
        else:
            whole, own = self.columns.empty(tokens, x.dtype)
            out = own.view(tokens, self.num_heads, self.value_size)
        backend.forward(query, kv_cache, metadata, out, params)
        if gate is not None:
            self.ops.multiply(out, gate, self.gate_activation, out)
        if self.columns is not None:
            self.columns.join()
        return self.o_proj(whole if self.out_norm is None else self.out_norm(whole))

    def store(self, x: Tensor, step: StepContext) -> tuple[Tensor, Tensor | None, AttentionParams]:
        """Store the keys and values of x [T, hidden_size].

        Returns:
            The queries [T, num_heads, head_size], the gates [T, num_heads, gate_size], and the
            parameters of the attention.
        """
        kv_cache, metadata = step.caches[self.cache], step.metadata[self.cache]
        query, key, value, gate = self._project(x)
        rotary = None
        if self.cos_sin_cache is not None:
            rotary = Rotary(
                self.ops.rotary_embedding, step.positions, query, self.cos_sin_cache, self.is_neox
            )
        elif self.rotated_parts > 1:
            self._rotate_parts(query, key, step)
        elif self.rotated_parts:
            assert step.rotary is not None
            rows, table = step.rotary.rows, step.rotary.table
            rotary = Rotary(self.ops.rotary_embedding, rows, query, table, self.is_neox)
        if self.norms_rotated:
            if rotary is not None:
                rotary(key)
                rotary = None
            self._norm_heads(query, key)
        params = self.params
        if self.disentangled is not None:
            params = replace(params, products=self.disentangled(query, key))
        if not self.stores:
            if rotary is not None:
                rotary(key)
        else:
            step.backend.write_kv(key, value, kv_cache, metadata.slot_mapping, rotary)
            if step.progress is not None:
                step.progress.reach(self.cache + 1)
        if self.query_factors is not None:
            factors = self.ops.embedding(self.query_factors, step.positions)
            self.ops.multiply(query, factors, out=query)
        return query, gate, params

    def _rotate_parts(self, query: Tensor, key: Tensor, step: StepContext) -> None:
        """Rotate each part of the heads by its own rows of the step's table."""
        assert step.rotary is not None
        tokens, size = query.shape[0], self.head_size // self.rotated_parts
        for part in range(self.rotated_parts):
            rows = step.rotary.rows[part * tokens : (part + 1) * tokens]
            numbers = slice(part * size, (part + 1) * size)
            self.ops.rotary_embedding(
                rows, query[..., numbers], key[..., numbers], step.rotary.table, self.is_neox
            )

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys [T, num_kv_heads, D], values [T, num_kv_heads, V], and gates.

        Queries are [T, num_heads, D] and gates [T, num_heads, gate_size]. Queries and keys are
        normed, unless the norms follow the rotation. A layer that stores nothing has no heads of
        keys and values.
        """
        tokens, size = x.shape[0], self.head_size
        columns = self.qkv_proj(x)
        if self.clip is not None:
            self.ops.clamp_(columns, self.clip)
        if self.qk_proj is not None:
            query, key = self._norm_all(x)
            return query, key, columns.view(tokens, -1, self.value_size), None
        keys = self.num_kv_heads if self.stores else 0
        values = 0 if self.values_are_keys else keys
        follow = self.gates_follow_queries
        gates = 0 if follow else self.num_heads * self.gate_size
        queries = self.num_heads * (2 if follow else 1)
        query, key, value, gate = columns.split_with_sizes(
            (queries * size, keys * size, values * self.value_size, gates), dim=1
        )
        query, key = query.view(tokens, queries, size), key.view(tokens, keys, size)
        value = value.view(tokens, values, self.value_size)
        if follow:
            query, gate = query[:, 0::2], query[:, 1::2]
        else:
            gate = gate.view(tokens, self.num_heads, self.gate_size) if gates else None
        if self.value_factor is not None:
            self.ops.multiply(value, self.value_factor, out=value)
        if self.values_are_keys and self.stores:
            assert self.v_norm is not None
            value = self.v_norm(key)
        elif self.v_norm is not None:
            self.v_norm.heads_(value)
        if not self.norms_rotated:
            self._norm_heads(query, key)
        return query, key, value, gate

    def _norm_heads(self, query: Tensor, key: Tensor) -> None:
        if self.q_norm is not None:
            self.q_norm.heads_(query)
        if self.k_norm is not None:
            self.k_norm.heads_(key)

    def _norm_all(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's queries and keys, after the norms over all ranks' heads."""
        assert self.qk_proj is not None
        assert isinstance(self.q_norm, RMSNorm)
        assert isinstance(self.k_norm, RMSNorm)
        result = []
        for linear, norm in zip(self.qk_proj, (self.q_norm, self.k_norm), strict=True):
            assert linear.columns is not None
            own = norm(linear(x))[:, linear.columns.begin : linear.columns.end]
            result.append(own.view(x.shape[0], -1, self.head_size))
        query, key = result
        return query, key
