"""Arguments of the attention kernels, and the sizes of their tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor


def block_d(head_size: int) -> int:
    """Return the width of a tile that holds `head_size` numbers: a power of two, at least 16."""
    return int(max(16, triton.next_power_of_2(head_size)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Arguments that `attention` and `prefill` share.

    Attributes:
        query: [T, H, D].
        kv_cache: [blocks, 2, block_size, KVH, D], or latents [blocks, block_size, D], with any
            stride of blocks; uint8 for a cache in FP8.
        query_start_loc: int32 [R + 1].
        seq_lens: int32 [R].
        block_table: int32 [R, blocks].
        out: [T, H, V], written; V is the size of the values.
        scale: factor of the logits.
        sliding_window: positions visible, or None.
        chunk_size: positions of a chunk, or None.
        logits_soft_cap: or None.
        alibi_slopes: float32 [H], or None.
        sinks: [H] in the query's dtype, or None.
        causal: False: rows see all positions of their requests.
        position_bias: float32 [H, 2 * D + 1], contiguous, or None.
        product_columns: int32 [2 * D + 1], or None; see `octavo.attention.base.DistanceProducts`.
        query_products: [T, H, C], contiguous, or None.
        key_products: [T, H, C], contiguous, or None.
        ranges: int32 [T, 2], contiguous, or None; see `octavo.attention.base.AttentionMetadata`.
        format: format of the cache; see `octavo.kernels.triton.fp8`.
        native_fp8: True if the GPU converts FP8.
        upcast: multiply in float32. Triton's interpreter cannot multiply bfloat16.
    """

    query: Tensor
    kv_cache: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    out: Tensor
    scale: float
    sliding_window: int | None = None
    chunk_size: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    causal: bool = True
    position_bias: Tensor | None = None
    product_columns: Tensor | None = None
    query_products: Tensor | None = None
    key_products: Tensor | None = None
    ranges: Tensor | None = None
    format: int
    native_fp8: bool
    upcast: bool

    @property
    def latent(self) -> bool:
        """True if the cache has latents."""
        return self.kv_cache.dim() == 3

    @property
    def head_size(self) -> int:
        """Number of elements of a key, or of those of a latent that are the value."""
        return (self.out if self.latent else self.query).shape[2]

    def splits_floats(self, max_splits: int) -> int:
        """Return the number of floats of the splits of the step's decode rows."""
        rows = self.seq_lens.shape[0] * self.out.shape[1]
        return rows * max_splits * (block_d(self.head_size) + 4)

    @property
    def groups(self) -> int:
        """Number of the programs that compute a query: KV heads, or groups of query heads."""
        if not self.latent:
            return self.kv_cache.shape[3]
        heads, most = self.query.shape[1], self.most[0]
        return next(n for n in range(1, heads + 1) if heads % n == 0 and heads // n <= most)

    @property
    def most(self) -> tuple[int, int]:
        """Limits of the rows and of the KV of a tile.

        They are those of the registers and of 99 KiB of shared memory.
        """
        wide, lanes = self.query.element_size() == 4, block_d(self.head_size)
        if lanes > 256:
            return (16, 16) if wide else (32, 16)
        match wide, lanes > 128:
            case False, False:
                return 128, 64
            case True, True:
                return 32, 16
            case _:
                return 64, 32

    def arguments(self, block_m: int) -> dict[str, Any]:
        """Return the arguments that both kernels have; `block_m` is the number of rows."""
        query, out, cache = self.query, self.out, self.kv_cache
        head_size, size = self.head_size, query.shape[2]
        page = cache.shape[1 if self.latent else 2]
        return {
            "out": out,
            "query": query,
            "kv_cache": cache,
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "block_table": self.block_table,
            "alibi_slopes": out if self.alibi_slopes is None else self.alibi_slopes,
            "position_bias": out if self.position_bias is None else self.position_bias,
            **self._products(),
            "ranges": out if self.ranges is None else self.ranges,
            "sinks": out if self.sinks is None else self.sinks,
            "scale": self.scale,
            "soft_cap": self.logits_soft_cap or 0.0,
            "num_reqs": self.seq_lens.shape[0],
            "query_token_stride": query.stride(0),
            "query_head_stride": query.stride(1),
            "out_token_stride": out.stride(0),
            "out_head_stride": out.stride(1),
            "table_stride": self.block_table.stride(0),
            "GROUP": query.shape[1] // self.groups,
            "HEAD_SIZE": head_size,
            "VALUE_SIZE": out.shape[2],
            "REST": size - head_size if self.latent else None,
            "ROW": size if self.latent else self.groups * size,
            "BLOCK_STRIDE": cache.stride(0),
            "PAGE": page,
            "CAUSAL": self.causal,
            "WINDOW": self.sliding_window or 0,
            "LOCAL_CHUNK": self.chunk_size or 0,
            "SOFT_CAP": self.logits_soft_cap is not None,
            "ALIBI": self.alibi_slopes is not None,
            "BIAS_DISTANCE": None
            if self.position_bias is None
            else self.position_bias.shape[1] // 2,
            "RANGES": self.ranges is not None,
            "SINKS": self.sinks is not None,
            "FP8": self.format,
            "NATIVE_FP8": self.native_fp8,
            "UPCAST": self.upcast,
            "BLOCK_M": block_m,
            "BLOCK_N": self.most[1],
            "BLOCK_D": block_d(head_size),
            "BLOCK_REST": block_d(size - head_size),
            "enable_fp_fusion": False,
        }

    def _products(self) -> dict[str, Any]:
        """Return the arguments for products with vectors of distances."""
        given = self.query_products, self.key_products
        some = next((products for products in given if products is not None), self.out)
        columns = self.product_columns
        return {
            "query_products": some if given[0] is None else given[0],
            "key_products": some if given[1] is None else given[1],
            "product_columns": self.out if columns is None else columns,
            "products_stride": some.stride(0),
            "products_head_stride": some.stride(1),
            "PRODUCT_DISTANCE": None if columns is None else len(columns) // 2,
            "QUERY_PRODUCTS": given[0] is not None,
            "KEY_PRODUCTS": given[1] is not None,
        }
