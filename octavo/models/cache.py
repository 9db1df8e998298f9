"""What the layers of a model keep of the tokens that they have seen: kinds of cache. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.system.dtypes import DTYPE_NBYTES


class CacheSpec(Protocol):
    """What one layer keeps: a frozen dataclass for each kind, with all that its bytes depend on.

    Layers with equal specs share block tables (`kv_cache/groups.py`); the kind decides which blocks
    a request needs (`kv_cache/kinds/`).
    """

    def block_nbytes(self, block_size: int, dtype: str) -> int:
        """Bytes of one block of one layer.

        Args:
            block_size: tokens.
            dtype: of the cache: "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2" or "int8".
        """
        ...


@dataclass(frozen=True)
class AttentionCache:
    """Keys and values of each token, in pages."""

    num_kv_heads: int
    head_size: int
    """Elements of a head of keys or values."""
    sliding_window: int | None = None
    """Positions that a token sees, itself included; None: all before it."""
    first_kv_head: int = 0
    """The number of the first head, where other ranks cache others."""

    def block_nbytes(self, block_size: int, dtype: str) -> int:
        """See `CacheSpec`. In int8 each head of a token has a float32 scale."""
        scale = DTYPE_NBYTES["float32"] if dtype == "int8" else 0
        head = self.head_size * DTYPE_NBYTES[dtype] + scale
        return 2 * block_size * self.num_kv_heads * head
