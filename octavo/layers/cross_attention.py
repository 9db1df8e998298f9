"""Cross-attention block: a decoder's tokens attend to the rows of an encoder."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.attention.base import AttentionBackend, AttentionParams
from octavo.kernels.base import Ops
from octavo.layers.linear import Linear
from octavo.layers.shared import Columns
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


@dataclass(slots=True, kw_only=True)
class CrossAttention:
    """Attention of all tokens of a request to all rows of its encoder.

    `store` computes the keys and values of the rows once, before the request's first step.
    """

    ops: Ops
    cache: int
    """Index of the layer's cache in `StepContext.caches`."""
    q_proj: Linear
    kv_proj: Linear
    """Projection of the encoder's rows to keys and values, stacked."""
    o_proj: Linear
    """Projection from the heads' results to the hidden size."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    params: AttentionParams
    columns: Columns | None = None
    """Columns of these heads in the result of all heads, if other ranks have the others."""

    def store(
        self, rows: Tensor, kv_cache: Tensor, slots: Tensor, backend: AttentionBackend
    ) -> None:
        """Store the keys and values of encoders' rows.

        Args:
            rows: [rows, encoder's size].
            kv_cache: the layer's cache.
            slots: int64 [rows], slot of each row in the cache.
            backend: the attention backend.
        """
        heads = self.num_kv_heads, self.head_size
        key, value = self.kv_proj(rows).view(len(rows), 2, *heads).unbind(1)
        backend.write_kv(key, value, kv_cache, slots)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size]."""
        tokens = x.shape[0]
        query = self.q_proj(x).view(tokens, self.num_heads, self.head_size)
        if self.columns is None:
            out = self.ops.empty(tokens, self.num_heads, self.head_size, like=x)
            whole = out.view(tokens, -1)
        else:
            whole, own = self.columns.empty(tokens, x.dtype)
            out = own.view(tokens, self.num_heads, self.head_size)
        kv_cache, metadata = step.caches[self.cache], step.metadata[self.cache]
        step.backend.forward(query, kv_cache, metadata, out, self.params)
        if self.columns is not None:
            self.columns.join()
        return self.o_proj(whole)
