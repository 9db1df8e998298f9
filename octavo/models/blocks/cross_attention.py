"""Specification of attention to the rows of an encoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.layers.encoder_lens import ENCODER_LENS
from octavo.layers.step_table import StepArray
from octavo.models.blocks.attention import share_heads
from octavo.models.blocks.base import BlockSpec, LargestStep
from octavo.models.blocks.linear import LinearSpec
from octavo.models.cache import CrossCache
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo.attention.base import AttentionBackend
    from octavo.layers.cross_attention import CrossAttention
    from octavo.models.blocks.base import Parts


@dataclass(frozen=True)
class CrossAttentionSpec(BlockSpec):
    """Attention whose keys and values are those of an encoder's rows (arXiv:1706.03762)."""

    q_proj: LinearSpec
    kv_proj: LinearSpec
    """Projection of the encoder's rows to all keys and all values, stacked."""
    o_proj: LinearSpec
    num_heads: int
    """Number of heads of queries."""
    num_kv_heads: int
    """Number of heads of keys and values; a divisor of `num_heads`."""
    head_size: int
    scale: float
    """Factor on the attention scores."""
    soft_cap: float | None = None
    """Cap of the attention scores."""
    first_head: int = 0
    first_kv_head: int = 0
    """Indices of the rank's first heads in the whole model."""

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights of the projections."""
        yield from self.q_proj.weights(names.of("q_proj"))
        yield from self.kv_proj.weights(names.of("kv_proj"))
        yield from self.o_proj.weights(names.of("o_proj"))

    def caches(self) -> tuple[CrossCache]:
        """Return the cache of the keys and values of each row."""
        return (CrossCache(self.num_kv_heads, self.head_size, first_kv_head=self.first_kv_head),)

    def arrays(self) -> tuple[StepArray, ...]:
        """Return the numbers of rows of the requests."""
        return (ENCODER_LENS,)

    def scratch_nbytes(self, backend: AttentionBackend, largest: LargestStep) -> int:
        """Return the bytes that attention allocates."""
        from octavo.attention.base import LargestAttention

        heads = self.num_heads, self.num_kv_heads, self.head_size
        longest = max(largest.max_model_len, largest.num_tokens)
        return backend.scratch_nbytes(
            LargestAttention(largest.num_tokens, longest, *heads, largest.num_threads)
        )

    def split(self, rank: Rank) -> CrossAttentionSpec:
        """Return the attention of a rank's query heads, and of their heads of keys and values.

        Raises:
            ConfigError: the model has fewer heads than ranks.
        """
        if rank.size > self.num_heads:
            raise ConfigError(
                f"tensor_parallel_size={rank.size} is more than the {self.num_heads} heads of "
                "cross attention of the model; lower it to at most that number."
            )
        (first, end), kv_heads = share_heads(self.num_heads, self.num_kv_heads, rank)
        own = first * self.head_size, end * self.head_size
        own_kv = kv_heads[0] * self.head_size, kv_heads[1] * self.head_size
        size = self.num_kv_heads * self.head_size
        o_proj = self.o_proj
        return replace(
            self,
            q_proj=self.q_proj.split(own),
            kv_proj=self.kv_proj.split(own_kv, (size + own_kv[0], size + own_kv[1])),
            o_proj=o_proj.split_inputs(own, rank)
            if rank.reduces
            else o_proj.split(rank.share(o_proj.outputs)),
            num_heads=end - first,
            num_kv_heads=kv_heads[1] - kv_heads[0],
            first_head=first,
            first_kv_head=kv_heads[0],
        )

    def build(self, parts: Parts, caches: tuple[int, ...]) -> CrossAttention:
        """Implement `BlockSpec`."""
        from octavo.attention.base import AttentionParams
        from octavo.layers.cross_attention import CrossAttention

        columns, size = None, self.head_size
        if self.o_proj.parts is not None:
            part = self.first_head * size, (self.first_head + self.num_heads) * size
            columns = parts.columns("heads", self.o_proj.inputs, part)
        block = CrossAttention(
            ops=parts.ops,
            cache=caches[0],
            q_proj=self.q_proj.build(parts.of("q_proj")),
            kv_proj=self.kv_proj.build(parts.of("kv_proj")),
            o_proj=self.o_proj.build(parts.of("o_proj"), "mixer"),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=size,
            params=AttentionParams(scale=self.scale, logits_soft_cap=self.soft_cap, causal=False),
            columns=columns,
        )
        parts.cross_attention.append(block)
        return block
