"""Kinds of cache: the state of computed tokens that a model's blocks keep."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from octavo.errors import ConfigError
from octavo.layers.encoder_lens import ENCODER_LENS
from octavo.layers.seen_lens import SEEN_LENS
from octavo.system.dtypes import DTYPE_NBYTES

if TYPE_CHECKING:
    from octavo.attention.base import AttentionBackend, AttentionMetadata
    from octavo.layers.step_table import StepTable
    from octavo.system.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Pages:
    """Division of one layer's KV block into the pieces that KV connectors copy and check.

    Attributes:
        count: number of pages, which are contiguous and have the same size.
        chunks: number of chunks of a page; they have the same size, and each has a checksum.
    """

    count: int
    chunks: int


class CacheSpec(Protocol):
    """Cache of one block (such as the attention) of a layer: a frozen dataclass for each kind.

    Its memory consists of KV blocks of `block_size` tokens. Layers with equal specs share block
    tables (`kv_cache/groups.py`). The kind decides the contents of KV blocks, and which KV blocks a
    request needs (`kv_cache/kinds/`).
    """

    rolls_back: bool
    """True if computed tokens can be dropped, as speculative decoding does."""

    def block_nbytes(self, block_size: int, dtype: str) -> int:
        """Return the bytes of one KV block of one layer.

        Args:
            block_size: number of tokens of a KV block.
            dtype: type of the cache: "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2" or
                "int8".
        """
        ...

    def view(self, memory: Tensor, block_size: int, dtype: str, backend: AttentionBackend) -> Any:
        """Return a layer's cache in the form that its block uses: an entry of `StepContext.caches`.

        Args:
            memory: uint8 [num_blocks, at least `block_nbytes`]; zeros at first.
            block_size: number of tokens of a KV block.
            dtype: type of the cache.
            backend: the attention backend.

        Raises:
            ConfigError: the backend does not support the cache.
        """
        ...

    def metadata(
        self, table: StepTable[Tensor], group: int, max_query_len: int, max_seq_len: int
    ) -> Any:
        """Return the locations of a step's tokens in the cache: an entry of `StepContext.metadata`.

        Args:
            table: the arrays of the step.
            group: the index of the cache's group in these arrays.
            max_query_len: largest number of tokens of a request in the step.
            max_seq_len: longest context in the step.
        """
        ...

    def pages(self) -> Pages:
        """Return the division of a KV block for KV connectors.

        Raises:
            ConfigError: KV connectors do not support this kind of cache.
        """
        ...


@dataclass(frozen=True)
class AttentionCache:
    """Keys and values of each token, in pages."""

    num_kv_heads: int
    head_size: int
    """Number of elements of a head of keys, and of the room for a head of values."""
    sliding_window: int | None = None
    """Number of positions that a token sees, itself included; None: all before it."""
    first_kv_head: int = 0
    """Index of the rank's first head in the whole model."""
    chunk_size: int | None = None
    """Number of positions of a chunk: a token sees only those of its own chunk; None: no chunks."""

    rolls_back = True

    @property
    def sees_all(self) -> bool:
        """True if a token sees all tokens before it."""
        return self.sliding_window is None and self.chunk_size is None

    def block_nbytes(self, block_size: int, dtype: str) -> int:
        """Implement `CacheSpec`. In int8 each head of a token has a float32 scale."""
        scale = DTYPE_NBYTES["float32"] if dtype == "int8" else 0
        head = self.head_size * DTYPE_NBYTES[dtype] + scale
        return 2 * block_size * self.num_kv_heads * head

    def view(
        self, memory: Tensor, block_size: int, dtype: str, backend: AttentionBackend
    ) -> Tensor:
        """Return the backend's tensor of keys and values; see `AttentionBackend`."""
        from octavo.attention.base import KV_CACHE_DTYPES

        nbytes = self.block_nbytes(block_size, dtype)
        if memory.shape[1] > nbytes and not backend.pads_blocks:
            raise ConfigError(
                f"attention_backend={backend.name} does not support layers that cache "
                "blocks of different sizes; use attention_backend=cpu or reference."
            )
        kind = KV_CACHE_DTYPES.get(dtype, dtype)
        heads = self.num_kv_heads, self.head_size
        shape = backend.kv_cache_shape(len(memory), block_size, *heads, kind)
        tensor: Tensor = backend.typed(memory[:, :nbytes], kind).view(shape)
        return tensor

    def metadata(
        self, table: StepTable[Tensor], group: int, max_query_len: int, max_seq_len: int
    ) -> AttentionMetadata:
        """Implement `CacheSpec`."""
        return _attention_metadata(table, group, max_query_len, max_seq_len)

    def pages(self) -> Pages:
        """Return a page of keys and one of values, each with a chunk for each head."""
        return Pages(2, self.num_kv_heads)


@dataclass(frozen=True)
class EncoderCache(AttentionCache):
    """Keys and values of a step, for attention that sees all of a text.

    No later step reads them, and no other layer: all layers use the same memory.
    """

    rolls_back = False

    def metadata(
        self, table: StepTable[Tensor], group: int, max_query_len: int, max_seq_len: int
    ) -> AttentionMetadata:
        """Implement `CacheSpec`. Attention sees the tokens that the array `SEEN_LENS` counts."""
        metadata = _attention_metadata(table, group, max_query_len, max_seq_len)
        return replace(metadata, seq_lens=table.extra.get(SEEN_LENS, table.seq_lens))

    def pages(self) -> Pages:
        """Raise ConfigError: there is nothing to keep."""
        raise ConfigError(
            "kv_transfer_config is not supported with encoders, which keep no keys and values; "
            "leave it out."
        )


@dataclass(frozen=True)
class CrossCache(AttentionCache):
    """Keys and values of an encoder's rows, in pages: those of a request never change.

    All of its tokens see them all.
    """

    @property
    def sees_all(self) -> bool:
        """False: a token sees no tokens before it."""
        return False

    def metadata(
        self, table: StepTable[Tensor], group: int, max_query_len: int, max_seq_len: int
    ) -> AttentionMetadata:
        """Implement `CacheSpec`. Attention sees the rows that the array `ENCODER_LENS` counts."""
        metadata = _attention_metadata(table, group, max_query_len, max_seq_len)
        return replace(metadata, seq_lens=table.extra[ENCODER_LENS.name])


@dataclass(frozen=True)
class LatentCache:
    """Latent of each token, in pages: one vector for the keys and values of all heads.

    Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) computes it. Ranks with different
    heads have equal caches.
    """

    size: int
    """Number of elements of a latent, with those of the rotated key."""

    rolls_back = True

    def block_nbytes(self, block_size: int, dtype: str) -> int:
        """Implement `CacheSpec`. In int8 each latent has a float32 scale.

        The size is a multiple of 16 bytes, so that half of a block is a multiple of 8 bytes.
        """
        return -(-self._numbers_nbytes(block_size, dtype) // 16) * 16

    def _numbers_nbytes(self, block_size: int, dtype: str) -> int:
        scale = DTYPE_NBYTES["float32"] if dtype == "int8" else 0
        return block_size * (self.size * DTYPE_NBYTES[dtype] + scale)

    def view(
        self, memory: Tensor, block_size: int, dtype: str, backend: AttentionBackend
    ) -> Tensor:
        """Return the backend's tensor of latents; see `AttentionBackend`."""
        from octavo.attention.base import KV_CACHE_DTYPES

        kind = KV_CACHE_DTYPES.get(dtype, dtype)
        shape = backend.latent_cache_shape(len(memory), block_size, self.size, kind)
        nbytes = self._numbers_nbytes(block_size, dtype)
        tensor: Tensor = backend.typed(memory[:, :nbytes], kind).view(shape)
        return tensor

    def metadata(
        self, table: StepTable[Tensor], group: int, max_query_len: int, max_seq_len: int
    ) -> AttentionMetadata:
        """Implement `CacheSpec`."""
        return _attention_metadata(table, group, max_query_len, max_seq_len)

    def pages(self) -> Pages:
        """Return the two halves of a block: connectors copy bytes, whatever these contain."""
        return Pages(2, 1)


def _attention_metadata(
    table: StepTable[Tensor], group: int, max_query_len: int, max_seq_len: int
) -> AttentionMetadata:
    from octavo.attention.base import AttentionMetadata

    return AttentionMetadata(
        num_reqs=len(table.seq_lens),
        num_tokens=len(table.input_ids),
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        query_start_loc=table.query_start_loc,
        seq_lens=table.seq_lens,
        block_table=table.block_tables[group],
        slot_mapping=table.slot_mappings[group],
    )
