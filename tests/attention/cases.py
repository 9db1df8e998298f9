"""Synthetic steps of attention: requests with a history, their blocks scattered over a cache."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionParams,
    DistanceProducts,
)
from octavo.kernels.torch_tensors import dtype_name

NOWHERE = 1 << 30  # a block that cannot be read


@cache
def random(seed: int, heads: int, head_size: int) -> Tensor:
    """Return a random request of up to 1024 tokens."""
    return torch.randn(1024, heads, head_size, generator=torch.Generator().manual_seed(seed))


def cached(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return heads [..., D] as a cache of the given type stores them, in float64."""
    if dtype is None:
        return x
    if dtype == torch.int8:
        most = x.float().abs().amax(-1, keepdim=True)
        inverse = torch.full_like(most, 127) / most  # 127 / most would be rounded twice
        return torch.round(x.float() * inverse).double() * (most / 127)
    return x.float().clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).double()


def new_cache(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a cache of NaN."""
    if dtype.itemsize == 1:
        return torch.full(shape, 255, dtype=torch.uint8).view(dtype)
    return torch.full(shape, torch.nan, dtype=dtype)


@dataclass(frozen=True)
class Case:
    """Requests as (context length, tokens of this step), and the shape of the model."""

    requests: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # a cache of bytes
    scale: float = 0.3
    window: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    seeds: tuple[int, ...] = ()  # of each request; its place if not given
    history: AttentionBackend | None = None  # writes the cache in its layout; None: the tested one
    value_size: int | None = None  # of latents, which are one head of keys; None: keys and values
    chunk: int | None = None
    small: int | None = None  # size of values that are smaller than keys
    causal: bool = True
    unseen: int = 0  # tokens at the end of each text that none sees, but for the first token
    bias_distance: int | None = None  # of a position bias
    product_distance: int | None = None  # of products with vectors of distances
    multiplied: tuple[str, ...] = ("queries", "keys")  # by these vectors
    ranges: tuple[
        tuple[int, int], ...
    ] = ()  # of tokens that see each other, in requests that reach them
    widens: bool = True  # ranges reach beyond a window

    def params(self) -> AttentionParams:
        slopes = 2.0 ** -torch.arange(1, self.heads + 1) if self.alibi else None
        sinks = self.sink_logits().to(self.dtype) if self.sinks else None
        return AttentionParams(
            self.scale,
            self.window,
            self.soft_cap,
            slopes,
            sinks,
            self.chunk,
            self.causal,
            self.position_bias(),
            self.products(),
            bool(self.ranges),
        )

    def range_of(self, request: int) -> Tensor:
        """Return the range of each token of a request's step: int32 [tokens, 2]."""
        context, new = self.requests[request]
        found = torch.tensor([[2**31 - 1, 0]], dtype=torch.int32).repeat(context, 1)
        for begin, end in self.ranges:
            if end <= context:
                found[begin:end, 1] = end
                if self.widens:
                    found[begin:end, 0] = begin
        return found[context - new :]

    def products(self) -> DistanceProducts | None:
        """Return random products of the step, and a random column of each distance."""
        if self.product_distance is None:
            return None
        columns, most, tensors = 11, self.product_distance, dict.fromkeys(("queries", "keys"))
        for i, name in enumerate(self.multiplied):
            parts = []
            for r, (context, _) in enumerate(self.requests):
                seed = (self.seeds[r] if self.seeds else r) + 1000 * (i + 1)
                parts.append(random(seed, self.heads, columns)[:context])
            tensors[name] = torch.cat(parts).to(self.dtype)
        generator = torch.Generator().manual_seed(98)
        of_distance = torch.randint(columns, (2 * most + 1,), generator=generator)
        return DistanceProducts(of_distance.int(), **tensors)

    def position_bias(self) -> Tensor | None:
        """Return random biases [heads, 2 * bias_distance + 1], all of them different."""
        if self.bias_distance is None:
            return None
        size = self.heads, 2 * self.bias_distance + 1
        return 2 * torch.randn(size, generator=torch.Generator().manual_seed(99))

    def seen_len(self, context: int) -> int:
        """Return the number of tokens of a text that its tokens may see."""
        return max(min(context, 1), context - self.unseen)

    def sink_logits(self) -> Tensor:
        """Return sinks [heads], some below and some above all other logits."""
        return 8.0 * torch.arange(-1, self.heads - 1)

    def tensors(self, request: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of the whole context of a request."""
        seed = self.seeds[request] if self.seeds else request
        qkv = random(seed, self.heads + 2 * self.kv_heads, self.head_size)
        qkv = qkv[: self.requests[request][0]].to(self.dtype)
        query, key, value = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return 2 * query, key, key if self.value_size else value[..., : self.small]

    @cache  # noqa: B019
    def truth(self) -> Tensor:
        """Return the step's results in float64, by one dense matrix for each head."""
        outs = []
        for r, (context, new) in enumerate(self.requests):
            query, key, value = (x.double() for x in self.tensors(r))
            group = self.heads // self.kv_heads
            key, value = (
                cached(x, self.cache_dtype).repeat_interleave(group, 1).transpose(0, 1)
                for x in (key, value)
            )
            value = value[..., : self.value_size]
            logits = query[context - new :].transpose(0, 1) @ key.mT
            at, other = torch.arange(context - new, context)[:, None], torch.arange(context)
            if (products := self.products()) is not None:
                most, first = len(products.columns) // 2, sum(n for n, _ in self.requests[:r])
                column = products.columns[most + (other - at).clamp(-most, most)].long()
                for tensor, rows in ((products.queries, at), (products.keys, other)):
                    if tensor is not None:
                        logits += tensor.double()[first + rows, :, column].permute(2, 0, 1)
            logits *= self.scale
            if self.soft_cap is not None:
                logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
            if self.alibi:
                slopes = 2.0 ** -torch.arange(1, self.heads + 1).double()
                logits -= slopes[:, None, None] * (other - at).abs()
            if (bias := self.position_bias()) is not None:
                most = bias.shape[1] // 2
                logits += bias.double()[:, most + (other - at).clamp(-most, most)]
            seen = (other - at).abs() < (self.window or context)
            if self.causal:
                seen &= other <= at
            if self.chunk is not None:
                seen &= other // self.chunk == at // self.chunk
            if self.ranges:
                begin, end = self.range_of(r).split(1, dim=1)
                begin = torch.minimum(begin, at)
                seen |= (other >= begin) & (other < torch.maximum(end, at + 1))
            seen &= other < self.seen_len(context)
            logits = logits.masked_fill(~seen, -torch.inf)
            if self.sinks:
                sinks = self.sink_logits().double()[:, None, None].expand(-1, new, 1)
                logits = torch.cat([logits, sinks], -1)
            weights = logits.softmax(-1)[..., :context].masked_fill(~seen, 0)  # NaN: none is seen
            outs.append((weights @ value).transpose(0, 1))
        return torch.cat(outs)

    def run(self, backend: AttentionBackend, *, views: bool = False) -> Tensor:
        """Return the step's results by a backend.

        Data that must not be read is NaN, or a block that does not exist. With views, the query is
        a view of a fused tensor and so is the result.
        """
        blocks_of = [-(-context // self.block_size) for context, _ in self.requests]
        num_blocks = 1 + sum(blocks_of)  # no request uses block 0
        order = 1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1))
        free = order.int().tolist()
        cache_dtype = self.cache_dtype or self.dtype
        kind = self.head_size, dtype_name(cache_dtype)
        shape = (
            backend.latent_cache_shape(num_blocks, self.block_size, *kind)
            if self.value_size
            else backend.kv_cache_shape(num_blocks, self.block_size, self.kv_heads, *kind)
        )
        kv_cache = new_cache(shape, cache_dtype)
        table = torch.full((len(blocks_of), max([1, *blocks_of]) + 1), NOWHERE, dtype=torch.int32)
        starts, slot_mapping, queries = [0], [], []
        for r, (context, new) in enumerate(self.requests):
            query, key, value = self.tensors(r)
            table[r, : blocks_of[r]] = torch.tensor([free.pop() for _ in range(blocks_of[r])])
            positions = torch.arange(context)
            slots = table[r].long()[positions // self.block_size] * self.block_size
            slots += positions % self.block_size
            if self.window is not None:
                needed = max(0, context - new - self.window + 1)
            elif self.chunk is not None:
                needed = (context - new) // self.chunk * self.chunk
            if self.window is not None and self.ranges and new:
                needed = min(needed, int(self.range_of(r)[:, 0].min()))
            if self.window is not None or self.chunk is not None:
                slots[:needed] = -1
                table[r, : needed // self.block_size] = NOWHERE
            # The history as one chunk, this step's tokens as views of a fused tensor
            old = context - new
            if self.value_size:
                backend.write_latents(key[:old, 0].contiguous(), kv_cache, slots[:old])
                backend.write_latents(key[old:, 0], kv_cache, slots[old:])
            else:
                (self.history or backend).write_kv(
                    key[:old].contiguous(), value[:old].contiguous(), kv_cache, slots[:old]
                )
                backend.write_kv(key[old:], value[old:], kv_cache, slots[old:])
            starts.append(starts[-1] + new)
            slot_mapping.append(slots[old:])
            queries.append(query[old:])
        metadata = AttentionMetadata(
            num_reqs=len(self.requests),
            num_tokens=starts[-1],
            max_query_len=max([0, *(new for _, new in self.requests)]),
            max_seq_len=max([0, *(context for context, _ in self.requests)]),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([self.seen_len(n) for n, _ in self.requests], dtype=torch.int32),
            block_table=table,
            slot_mapping=torch.cat([torch.empty(0, dtype=torch.int64), *slot_mapping]),
            ranges=torch.cat([self.range_of(r) for r in range(len(self.requests))])
            if self.ranges
            else None,
        )
        query = torch.cat([torch.empty(0, self.heads, self.head_size, dtype=self.dtype), *queries])
        size = self.value_size or self.small or self.head_size
        out = torch.full((*query.shape[:2], size), torch.nan, dtype=self.dtype)
        if views:
            extra = torch.full((starts[-1], 3, self.head_size), torch.nan, dtype=self.dtype)
            query = torch.cat([query, extra], dim=1)[:, : self.heads]
            out = torch.full((starts[-1], self.heads + 1, size), 5.0, dtype=self.dtype)
        results = out[:, : self.heads]
        if self.value_size:
            backend.attend_latents(query, kv_cache, metadata, results, self.scale)
        else:
            backend.forward(query, kv_cache, metadata, results, self.params())
        assert (out[:, self.heads :] == 5).all()
        return results


ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def assert_near(got: Tensor, truth: Tensor, largest: float = 1) -> None:
    bound = 1e-5 * (1 + truth.abs()) + ROUNDING[got.dtype] * truth.abs()
    if got.dtype == torch.bfloat16:  # probabilities may be rounded too, by the largest value
        bound = bound + ROUNDING[got.dtype] * largest
    assert got.shape == truth.shape
    assert ((got.double() - truth).abs() <= bound).all()
