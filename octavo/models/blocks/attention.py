"""Specification of causal self-attention over paged keys and values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from octavo.checkpoints.base import Source
from octavo.errors import ConfigError
from octavo.kernels.routing import Gate
from octavo.layers.mrope import MRopeArray
from octavo.layers.ranges import RangeArray
from octavo.layers.rope_spec import RopeSpec
from octavo.layers.seen_lens import SeenLensArray
from octavo.layers.step_table import StepArray
from octavo.models.blocks.base import BlockSpec, LargestStep, Table
from octavo.models.blocks.disentangled import DisentangledSpec
from octavo.models.blocks.factors import Factors
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import HeadFactorsSpec, HeadNormsSpec, RMSNormSpec
from octavo.models.cache import AttentionCache, EncoderCache
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo.attention.base import AttentionBackend
    from octavo.layers.attention import Attention
    from octavo.layers.linear import Linear
    from octavo.models.blocks.base import Parts
    from octavo.system.tensor import HostTensor


@dataclass(frozen=True)
class Alibi:
    """Positions as a bias on the attention scores (Press et al., arXiv 2108.12409)."""

    slopes: tuple[float, ...]
    """Slope of each query head."""

    def nbytes(self, max_model_len: int) -> int:
        """Implement `Table`."""
        return 4 * len(self.slopes)


@dataclass(frozen=True)
class StepRope:
    """Rotary positions that each step brings, as `StepContext.rotary`.

    They are those of tokens with several coordinates, such as the patches of a picture.
    """

    is_neox: bool = True
    """Layout of the pairs, as in `RopeSpec`."""
    parts: int = 1
    """Number of equal parts of a head, each of which turns as a head of its own (Gemma 4)."""


@dataclass(frozen=True)
class SectionRope(StepRope):
    """Rotary positions with sections for time, height and width; see `octavo/layers/mrope.py`."""

    array: MRopeArray = field(kw_only=True)
    """Array of a step with the cosines and sines of its tokens."""


@dataclass(frozen=True)
class RelativeBias:
    """Learned bias of the attention scores for each distance (T5, arXiv:1910.10683; MPNet).

    The checkpoint has one table for all layers. Half of its rows, the buckets, are for positions
    before the query, and half for those after it; with causal attention all are for those before
    it. Long distances share buckets.
    """

    module: str
    """Module of the checkpoint, without the prefix of a layer."""
    buckets: int
    num_heads: int
    """Number of query heads in the checkpoint."""
    longest: int = 128
    """Distance from which on all distances have the same bucket."""
    causal: bool = False
    """True if no position after the query is seen (T5's decoder)."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Bucket of each distance from -`longest` to `longest`."""
        half = self.buckets if self.causal else self.buckets // 2
        exact = half // 2
        distances = np.arange(-self.longest, self.longest + 1)
        size = np.maximum(np.abs(distances), 1).astype(np.float32)
        # In float32, as transformers computes it: some distances are at the edge of a bucket.
        steps = np.log(size / np.float32(exact)) / np.float32(math.log(self.longest / exact))
        large = exact + (steps * np.float32(half - exact)).astype(np.int64)
        bucket = np.where(size < exact, np.abs(distances), np.minimum(large, half - 1))
        if self.causal:
            return tuple(np.where(distances > 0, 0, bucket).tolist())
        return tuple((bucket + half * (distances > 0)).tolist())


@dataclass(frozen=True)
class QueryScale:
    """Factor of the queries that grows with the position (Llama 4, Ministral 3).

    It is 1 + beta * log(1 + floor((position + first) / length)).
    """

    beta: float
    length: int
    first: int = 0
    """Number of the first position: 1 for Llama 4."""

    def nbytes(self, max_model_len: int) -> int:
        """Implement `Table`; upper bound for all types."""
        return 4 * max_model_len

    def compute(self, max_model_len: int, dtype: str) -> HostTensor:
        """Return the factor of each position: [max_model_len, 1]."""
        from octavo.system.tensor import dense, from_numpy

        steps = (np.arange(max_model_len) + self.first) // self.length
        return dense(from_numpy(1 + self.beta * np.log1p(steps)[:, None]), dtype)


@dataclass(frozen=True)
class Sinks:
    """Logits, one for each query head, that only join the sum of the probabilities (gpt-oss)."""

    name: str
    """Name of the tensor in the checkpoint, without the layer's prefix."""
    num_heads: int
    """Number of query heads in the checkpoint."""


@dataclass(frozen=True)
class AttentionSpec(BlockSpec):
    """Attention with any number of query heads for each head of keys and values."""

    qkv_proj: LinearSpec
    """Projection to all queries, all keys, all values, and all gates if there are any."""
    o_proj: LinearSpec
    num_heads: int
    num_kv_heads: int
    head_size: int
    """Number of elements of a head of queries or keys."""
    scale: float
    """Factor on the attention scores."""
    positions: RopeSpec | StepRope | Alibi | None
    """Position encoding: rotary or ALiBi; None: the attention uses no positions."""
    sliding_window: int | None = None
    """Number of positions that a token sees, itself included; None: all."""
    chunk_size: int | None = None
    """Number of positions of a chunk (Llama 4): a token sees only the positions of its own chunk.
    None: there are no chunks."""
    value_size: int | None = None
    """Number of elements of a head of values, at most `head_size`; None: `head_size`. The cache has
    room for `head_size` elements of each head of values (MiMo V2)."""
    value_scale: float = 1.0
    """Factor of the values (MiMo V2)."""
    soft_cap: float | None = None
    """Soft cap of the attention scores (Gemma 2)."""
    q_norm: RMSNormSpec | HeadNormsSpec | HeadFactorsSpec | None = None
    """Norm of the queries. Its size decides the scope: each head (Qwen3, Gemma 3), or all heads
    together (OLMo 2)."""
    k_norm: RMSNormSpec | HeadNormsSpec | None = None
    norms_rotated: bool = False
    """True if the norms apply to rotated queries and keys (HunYuan); False: before the rotation."""
    clip: float | None = None
    """Limit of queries, keys and values, which are cut to [-clip, clip] (MPT)."""
    first_head: int = 0
    """Index of the rank's first query head in the whole model."""
    first_kv_head: int = 0
    """Index of the rank's first head of keys and values in the whole model."""
    qk_proj: tuple[LinearSpec, LinearSpec] | None = None
    """Separate projections to a rank's queries and keys, if a norm covers the heads of all ranks.
    `qkv_proj` then computes only the rank's values. None: `qkv_proj` computes all three."""
    gated: bool = False
    """True if each head's result is multiplied by `gate_activation` of gates (Muse Glimmer)."""
    gate_activation: Gate = "sigmoid"
    gates_of_heads: bool = False
    """True if a head has one gate for all elements of its result (Laguna); False: one for each."""
    gates_follow_queries: bool = False
    """True if `qkv_proj` computes the gate of a head directly after its query (Qwen3-Next); False:
    all gates after the values."""
    query_scale: QueryScale | None = None
    sinks: Sinks | None = None
    out_norm: RMSNormSpec | None = None
    """Norm of the results of all heads together, the input of `o_proj` (BitNet)."""
    v_norm: RMSNormSpec | None = None
    """Norm of each head of the values (Gemma 4)."""
    values_are_keys: bool = False
    """True if the values are the keys before their own norm and rotation, with `v_norm` (Gemma 4).
    `qkv_proj` then has no values, and `v_norm` is required."""
    causal: bool = True
    """True if a token sees the tokens up to itself; False: all tokens of its text (encoders), or
    with a `sliding_window` those at a smaller distance."""
    in_encoder: bool = False
    """True for causal attention in an encoder, where no later step reads the keys and values."""
    unseen: int | None = None
    """Token of masks at the end of a text, which no token sees (ColBERT); only if attention is not
    causal. None: all tokens are seen."""
    ranges: RangeArray | None = None
    """Array of a step with the ranges of tokens that see each other in both directions; None: a
    token never sees a later one. Only if attention is causal."""
    bias: RelativeBias | None = None
    disentangled: DisentangledSpec | None = None
    """Products with vectors of distances (DeBERTa); if attention is causal, of queries only."""
    source: int | None = None
    """Index of an earlier layer whose keys and values this one reads (Gemma 4). `qkv_proj` then has
    queries only. None: the layer stores its own keys and values."""

    @property
    def is_by_rows(self) -> bool:
        """True if some tokens of a text can be computed alone once all keys and values are stored.

        Attention is then not causal, and does not depend on the place of a token in its text.
        """
        places = (self.sliding_window, self.unseen, self.bias, self.disentangled, self.source)
        has_alibi = isinstance(self.positions, Alibi)
        return not (self.causal or has_alibi) and all(it is None for it in places)

    def split(self, rank: Rank) -> AttentionSpec:
        """Return the attention of a rank's query heads, and of their heads of keys and values.

        Several ranks may compute the same head of keys and values.

        Raises:
            ConfigError: the model has fewer query heads than ranks, or a projection has too few
                outputs or inputs.
        """
        if rank.size > self.num_heads:
            raise ConfigError(
                f"tensor_parallel_size={rank.size} is more than the {self.num_heads} attention "
                "heads of the model; lower it to at most that number."
            )
        (first, end), (first_kv, end_kv) = self._share(rank)
        heads, kv_heads = end - first, end_kv - first_kv
        positions, size, value_size = self.positions, self.head_size, self.size_of_values
        queries = self.num_heads, first, end, size
        keys = self.num_kv_heads, first_kv, end_kv, size
        stacked = [queries, keys, (*keys[:3], value_size)]
        if self.source is not None:
            stacked = stacked[:1]
        elif self.values_are_keys:
            stacked = stacked[:2]
        if self.gates_follow_queries:
            stacked[0] = 2 * self.num_heads, 2 * first, 2 * end, size
        elif self.gated:
            stacked.append((*queries[:3], self.gate_size))
        before, parts = 0, []
        for number, a, b, each in stacked:
            parts.append((before + a * each, before + b * each))
            before += number * each
        qk_proj = None
        if any(norm and norm.size != size for norm in (self.q_norm, self.k_norm)):
            qk_proj = self.qkv_proj.split(parts[0]), self.qkv_proj.split(parts[1])
            parts = parts[2:]
        q_norm, k_norm = self.q_norm, self.k_norm
        if isinstance(q_norm, HeadNormsSpec) and isinstance(k_norm, HeadNormsSpec):
            q_norm, k_norm = q_norm.split(first, end), k_norm.split(first_kv, end_kv)
        if isinstance(positions, Alibi):
            positions = Alibi(positions.slopes[first : first + heads])
        o_proj, products = self.o_proj, self.disentangled
        return replace(
            self,
            qkv_proj=self.qkv_proj.split(*parts),
            o_proj=o_proj.split_inputs((first * value_size, end * value_size), rank)
            if rank.reduces and self.out_norm is None
            else o_proj.split(rank.share(o_proj.outputs)),
            num_heads=heads,
            num_kv_heads=kv_heads,
            positions=positions,
            q_norm=q_norm,
            k_norm=k_norm,
            first_head=first,
            first_kv_head=first_kv,
            qk_proj=qk_proj,
            disentangled=None if products is None else products.split(first, end),
        )

    @property
    def size_of_values(self) -> int:
        """Number of elements of a head of values, and of a head's result."""
        return self.head_size if self.value_size is None else self.value_size

    @property
    def gate_size(self) -> int:
        """Number of gates of a head."""
        if not self.gated:
            return 0
        return 1 if self.gates_of_heads else self.size_of_values

    def _share(self, rank: Rank) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return a rank's query heads, and its heads of keys and values, as (begin, end)."""
        return share_heads(self.num_heads, self.num_kv_heads, rank)

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the input projection, the norms, and the output projection."""
        yield from self.qkv_proj.weights(names.of("qkv_proj"))
        if self.qk_proj is not None:
            yield from self.qk_proj[0].weights(names.of("q_proj"))
            yield from self.qk_proj[1].weights(names.of("k_proj"))
        if self.q_norm is not None:
            yield from self.q_norm.weights(names.of("q_norm"))
        if self.k_norm is not None:
            yield from self.k_norm.weights(names.of("k_norm"))
        if self.sinks is not None:
            heads = (self.first_head, self.first_head + self.num_heads)
            name, whole = names.checkpoint + self.sinks.name, (self.sinks.num_heads,)
            source = Source(name, whole, parts=(heads,), dummy=0.0)
            yield Weight(f"{names.own}sinks", "vector", (self.num_heads,), (source,))
        if self.bias is not None:
            yield self._bias_weight(self.bias, names)
        if self.disentangled is not None:
            yield from self.disentangled.weights(names)
        if self.out_norm is not None:
            yield from self.out_norm.weights(names.of("out_norm"))
        if self.v_norm is not None:
            yield from self.v_norm.weights(names.of("v_norm"))
        yield from self.o_proj.weights(names.of("o_proj"))

    def _bias_weight(self, bias: RelativeBias, names: Names) -> Weight:
        """Return the biases of the rank's heads: float32 [heads, 2 * longest + 1]."""
        source = Source(
            f"{bias.module}.weight",
            (bias.buckets, bias.num_heads),
            "swap",
            order=bias.rows,
            parts=((self.first_head, self.first_head + self.num_heads),),
        )
        shape = (self.num_heads, len(bias.rows))
        return Weight(f"{names.own}bias", "vector", shape, (source,), dtype="float32")

    def caches(self) -> tuple[AttentionCache]:
        """Return the cache of the keys and values of each token.

        If ranges widen a window, all tokens stay: a step may compute only the end of a range.
        """
        if not self.causal or self.in_encoder:
            heads = self.num_kv_heads, self.head_size
            return (EncoderCache(*heads, first_kv_head=self.first_kv_head),)
        widens = self.ranges is not None and self.ranges.widens
        return (
            AttentionCache(
                self.num_kv_heads,
                self.head_size,
                None if widens else self.sliding_window,
                self.first_kv_head,
                self.chunk_size,
            ),
        )

    def arrays(self) -> tuple[StepArray, ...]:
        """Return the arrays of positions, of numbers of tokens that are seen, and of ranges."""
        arrays: list[StepArray] = []
        if isinstance(self.positions, SectionRope):
            arrays.append(self.positions.array)
        if self.unseen is not None:
            arrays.append(SeenLensArray(self.unseen))
        if self.ranges is not None:
            arrays.append(self.ranges)
        return tuple(arrays)

    def cache_layer(self) -> int | None:
        """Return the layer whose keys and values this one reads."""
        return self.source

    def in_stage(self, begin: int) -> AttentionSpec:
        """Implement `BlockSpec`."""
        return self if self.source is None else replace(self, source=self.source - begin)

    def tables(self) -> tuple[Table, ...]:
        """Return the tables of positions, of factors, of norms and of distances."""
        positions = None if isinstance(self.positions, StepRope) else self.positions
        tables: list[Table | None] = [positions, self.query_scale, self._value_factor()]
        for norm in (self.q_norm, self.k_norm, self.v_norm):
            tables += norm.tables() if isinstance(norm, RMSNormSpec) else ()
        if self.disentangled is not None:
            tables.append(self.disentangled.distances)
        return tuple(table for table in tables if table is not None)

    def scratch_nbytes(self, backend: AttentionBackend, largest: LargestStep) -> int:
        """Return the bytes that attention and the products of heads allocate."""
        from octavo.attention.base import LargestAttention
        from octavo.kernels.sizes import head_linear_nbytes

        threads = largest.num_threads
        heads = self.num_heads, self.num_kv_heads, self.head_size
        products = 0 if self.disentangled is None else head_linear_nbytes(self.head_size)
        return threads * products + backend.scratch_nbytes(
            LargestAttention(largest.num_tokens, largest.max_model_len, *heads, threads)
        )

    def build(self, parts: Parts, caches: tuple[int, ...]) -> Attention:
        """Implement `BlockSpec`."""
        from octavo.attention.base import AttentionParams
        from octavo.layers.attention import Attention
        from octavo.layers.rotary import build_cos_sin_cache
        from octavo.system.tensor import from_numpy

        rope = self.positions if isinstance(self.positions, RopeSpec) else None
        alibi = self.positions if isinstance(self.positions, Alibi) else None
        scale = self.query_scale
        value_factor, size = self._value_factor(), self.size_of_values
        columns = None
        if self.o_proj.parts is not None:
            part = self.first_head * size, (self.first_head + self.num_heads) * size
            columns = parts.columns("heads", self.o_proj.inputs, part)
        return Attention(
            ops=parts.ops,
            cache=caches[0],
            qkv_proj=self.qkv_proj.build(parts.of("qkv_proj")),
            o_proj=self.o_proj.build(parts.of("o_proj"), "mixer"),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            value_size=size,
            params=AttentionParams(
                scale=self.scale,
                sliding_window=self.sliding_window,
                chunk_size=self.chunk_size,
                causal=self.causal,
                logits_soft_cap=self.soft_cap,
                alibi_slopes=None
                if alibi is None
                else parts.table(alibi, lambda: from_numpy(np.array(alibi.slopes, np.float32))),
                sinks=None if self.sinks is None else parts.tensor("sinks"),
                position_bias=None if self.bias is None else parts.tensor("bias"),
                sees_ranges=self.ranges is not None,
            ),
            cos_sin_cache=None
            if rope is None
            else parts.table(rope, lambda: build_cos_sin_cache(rope, parts.max_model_len)),
            is_neox=not isinstance(self.positions, RopeSpec | StepRope) or self.positions.is_neox,
            rotated_parts=self.positions.parts if isinstance(self.positions, StepRope) else 0,
            q_norm=None if self.q_norm is None else self.q_norm.build(parts.of("q_norm")),
            k_norm=None if self.k_norm is None else self.k_norm.build(parts.of("k_norm")),
            gate_size=self.gate_size,
            gate_activation=self.gate_activation,
            value_factor=None
            if value_factor is None
            else parts.table(value_factor, lambda: value_factor.compute(parts.dtype)),
            gates_follow_queries=self.gates_follow_queries,
            query_factors=None
            if scale is None
            else parts.table(scale, lambda: scale.compute(parts.max_model_len, parts.dtype)),
            v_norm=None if self.v_norm is None else self.v_norm.build(parts.of("v_norm")),
            values_are_keys=self.values_are_keys,
            stores=self.source is None,
            norms_rotated=self.norms_rotated,
            clip=self.clip,
            qk_proj=self._build_qk_proj(parts),
            columns=columns,
            out_norm=None if self.out_norm is None else self.out_norm.build(parts.of("out_norm")),
            disentangled=None if self.disentangled is None else self.disentangled.build(parts),
        )

    def _value_factor(self) -> Factors | None:
        return None if self.value_scale == 1.0 else Factors((self.value_scale,), (1,))

    def _build_qk_proj(self, parts: Parts) -> tuple[Linear, Linear] | None:
        if self.qk_proj is None:
            return None
        assert self.q_norm is not None
        assert self.k_norm is not None
        linears, before = [], 0
        for name, spec, norm in zip("qk", self.qk_proj, (self.q_norm, self.k_norm), strict=True):
            assert spec.parts is not None
            ((begin, end),) = spec.parts
            columns = parts.columns(f"all_{name}", norm.size, (begin - before, end - before))
            linears.append(replace(spec.build(parts.of(f"{name}_proj")), columns=columns))
            before += norm.size
        return linears[0], linears[1]


def share_heads(
    num_heads: int, num_groups: int, rank: Rank
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the heads and the groups that a rank computes, each as (begin, end).

    A group is the heads that use the same keys and values. A rank computes whole groups, or a part
    of one group if the model has fewer groups than ranks. No rank has more heads than rank 0.
    """
    group = num_heads // num_groups
    if rank.size <= num_groups:
        begin, end = rank.share(num_groups)
        return (begin * group, end * group), (begin, end)
    each, more = divmod(rank.size, num_groups)
    # Each of the last groups is divided among one more rank.
    before = (num_groups - more) * each
    if rank.index < before:
        (kv, index), size = divmod(rank.index, each), each
    else:
        (kv, index), size = divmod(rank.index - before, each + 1), each + 1
        kv += num_groups - more
    begin, end = Rank(index, size).share(group)
    return (kv * group + begin, kv * group + end), (kv, kv + 1)
