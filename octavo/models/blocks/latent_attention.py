"""Specification of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.layers.rope_spec import RopeSpec
from octavo.models.blocks.attention import QueryScale
from octavo.models.blocks.base import BlockSpec, LargestStep, Table
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import Ones, RMSNormSpec, ones
from octavo.models.cache import LatentCache
from octavo.models.weights import Names, Weight
from octavo.quantization.dequantized import as_numbers
from octavo.quantization.transposed import TransposedHeads
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo.attention.base import AttentionBackend
    from octavo.layers.latent_attention import LatentAttention
    from octavo.models.blocks.base import Parts


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec(BlockSpec):
    """Attention whose keys and values of all heads are products of one latent of each token.

    It is always computed in the absorbed form: queries are multiplied by the keys' weight, and the
    results by the values' weight, so that all heads attend to the latents themselves. Prompts and
    generated tokens use the same sums, so their bits do not depend on the schedule.
    """

    in_proj: LinearSpec
    """Projection to the input of `q_b_proj` (without `q_b_proj`: to all queries), to the latent and
    to the rotated part of the keys."""
    q_norm: RMSNormSpec | None
    """Norm of the input of `q_b_proj`; None without `q_b_proj`."""
    q_b_proj: LinearSpec | None
    """Projection to the queries; None if `in_proj` computes them."""
    kv_norm: RMSNormSpec
    """Norm of the latent."""
    kv_b_proj: tuple[LinearSpec, ...]
    """Projection from the latent to the key and the value of each head in turn; or (GGUF) two
    projections: that to keys, transposed, and that to values. The rows for keys and those for
    values are used separately, as plain weights."""
    o_proj: LinearSpec
    num_heads: int
    key_size: int
    """Size of the part of a head's key that is not rotated (qk_nope_head_dim)."""
    rope_size: int
    """Size of the rotated part of a key, which all heads share (qk_rope_head_dim)."""
    value_size: int
    """Size of a head's value (v_head_dim)."""
    latent_size: int
    """Size of the latent (kv_lora_rank)."""
    scale: float
    """Factor on the attention scores."""
    positions: RopeSpec | None
    """Rotary positions of the rotated part; None: nothing is rotated (Kimi Linear)."""
    query_scale: QueryScale | None = None
    heads: tuple[int, int] | None = None
    """Heads (begin, end) that a rank computes; None: all."""

    @property
    def _heads(self) -> tuple[int, int]:
        return self.heads or (0, self.num_heads)

    @property
    def _num_own(self) -> int:
        begin, end = self._heads
        return end - begin

    def split(self, rank: Rank) -> LatentAttentionSpec:
        """Return the attention of a rank's heads. Each rank computes and caches all latents.

        Raises:
            ConfigError: the model has fewer heads than ranks.
        """
        if rank.size > self.num_heads:
            raise ConfigError(
                f"tensor_parallel_size={rank.size} is more than the {self.num_heads} attention "
                "heads of the model; lower it to at most that number."
            )
        begin, end = rank.share(self.num_heads)
        size = self.key_size + self.rope_size
        queries = begin * size, end * size
        values = begin * self.value_size, end * self.value_size
        in_proj, q_b_proj, o_proj = self.in_proj, self.q_b_proj, self.o_proj
        if q_b_proj is not None:
            q_b_proj = q_b_proj.split(queries)
        else:
            in_proj = in_proj.split(queries, (self.num_heads * size, in_proj.outputs))
        return replace(
            self,
            in_proj=in_proj,
            q_b_proj=q_b_proj,
            o_proj=o_proj.split_inputs(values, rank)
            if rank.reduces
            else o_proj.split(rank.share(o_proj.outputs)),
            heads=(begin, end),
        )

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights in the order of their use."""
        yield from self.in_proj.weights(names.of("in_proj"))
        if self.q_norm is not None:
            yield from self.q_norm.weights(names.of("q_norm"))
        if self.q_b_proj is not None:
            yield from self.q_b_proj.weights(names.of("q_b_proj"))
        yield from self.kv_norm.weights(names.of("kv_norm"))
        yield self._head_weight("key", names)
        yield self._head_weight("value", names)
        yield from self.o_proj.weights(names.of("o_proj"))

    def _head_weight(self, part: str, names: Names) -> Weight:
        """Return the rows of `kv_b_proj` for keys or values, for `Ops.head_linear`.

        The rows for keys are transposed, since they multiply queries. Both parts are plain, even if
        the other weights are quantized.
        """
        is_key = part == "key"
        size = self.key_size if is_key else self.value_size
        outputs, inputs = (self.latent_size, size) if is_key else (size, self.latent_size)
        separate = len(self.kv_b_proj) > 1
        both, first = self.key_size + self.value_size, 0 if is_key else self.key_size
        if separate:
            both, first, size = outputs, 0, outputs
        begin, end = self._heads
        rows = tuple((h * both + first, h * both + first + size) for h in range(begin, end))
        proj = self.kv_b_proj[0 if is_key else -1]
        plain = as_numbers(proj.forms)
        (weight,) = replace(proj.split(*rows), forms=(plain,)).weights(names.of(f"{part}_heads"))
        return replace(
            weight,
            shape=(self._num_own * outputs, inputs),
            whole=None if self.heads is None else self.num_heads * outputs,
            form=TransposedHeads(plain, self._num_own) if is_key and not separate else plain,
        )

    def caches(self) -> tuple[LatentCache]:
        """Return the cache of each token's latent and rotated key."""
        return (LatentCache(self.latent_size + self.rope_size),)

    def tables(self) -> tuple[Table, ...]:
        """Return the tables of cosines and sines, and of factors of queries."""
        tables = Ones(1), self.positions, self.query_scale
        return tuple(table for table in tables if table is not None)

    def scratch_nbytes(self, backend: AttentionBackend, largest: LargestStep) -> int:
        """Return the bytes that attention and the products of heads allocate."""
        from octavo.attention.base import LargestAttention
        from octavo.kernels.sizes import head_linear_nbytes

        tokens, threads = largest.num_tokens, largest.num_threads
        size = self.latent_size + self.rope_size
        attention = backend.scratch_nbytes(
            LargestAttention(
                tokens, largest.max_model_len, self._num_own, 1, size, threads, latent=True
            )
        )
        inputs = max(self.key_size, self.latent_size)
        return attention + threads * head_linear_nbytes(inputs)

    def build(self, parts: Parts, caches: tuple[int, ...]) -> LatentAttention:
        """Implement `BlockSpec`."""
        from octavo.kernels.weights import PackedWeight
        from octavo.layers.latent_attention import LatentAttention
        from octavo.layers.rotary import build_cos_sin_cache

        rope, scale, columns = self.positions, self.query_scale, None
        if self.o_proj.parts is not None:
            begin, end = (head * self.value_size for head in self._heads)
            columns = parts.columns("heads", self.o_proj.inputs, (begin, end))
        key_heads = parts.of("key_heads").linear("weight")
        value_heads = parts.of("value_heads").linear("weight")
        assert isinstance(key_heads, PackedWeight)
        assert isinstance(value_heads, PackedWeight)
        return LatentAttention(
            ops=parts.ops,
            cache=caches[0],
            in_proj=self.in_proj.build(parts.of("in_proj")),
            q_norm=None if self.q_norm is None else self.q_norm.build(parts.of("q_norm")),
            q_b_proj=None if self.q_b_proj is None else self.q_b_proj.build(parts.of("q_b_proj")),
            kv_norm=self.kv_norm.build(parts.of("kv_norm")),
            key_heads=key_heads,
            value_heads=value_heads,
            o_proj=self.o_proj.build(parts.of("o_proj"), "mixer"),
            num_heads=self._num_own,
            key_size=self.key_size,
            rope_size=self.rope_size,
            value_size=self.value_size,
            latent_size=self.latent_size,
            scale=self.scale,
            one=ones(1, parts),
            cos_sin_cache=None
            if rope is None
            else parts.table(rope, lambda: build_cos_sin_cache(rope, parts.max_model_len)),
            is_neox=rope is None or rope.is_neox,
            query_factors=None
            if scale is None
            else parts.table(scale, lambda: scale.compute(parts.max_model_len, parts.dtype)),
            columns=columns,
        )
