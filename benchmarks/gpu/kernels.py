"""Limits of the GPU, and Octavo's kernels compared with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from gpu.base import Bench, Card
from octavo.attention.base import AttentionMetadata, AttentionParams, Rotary
from octavo.attention.triton import TritonAttention
from octavo.kernels.ops_logits import SAMPLING_ROW
from octavo.kernels.torch_tensors import from_torch
from octavo.kernels.triton.ops import TritonOps


def measure_card(bench: Bench) -> None:
    """Measure a large copy and a large product."""
    gpu, sizes = bench.gpu, bench.sizes
    a = torch.zeros(sizes.copy, dtype=torch.uint8, device=gpu.device)
    b = torch.empty_like(a)
    bandwidth = 2 * a.nbytes / gpu.seconds(lambda: b.copy_(a))
    n = sizes.product
    x, y = (torch.randn(n, n, device=gpu.device, dtype=torch.bfloat16) for _ in range(2))
    peak = 2 * n**3 / gpu.seconds(lambda: x @ y)
    bench.card = Card(gpu.name(), bandwidth, peak)
    bench.add("card: copy, read and written", f"{bandwidth / 1e9:,.0f} GB/s")
    bench.add(f"card: bfloat16 product of {n}^3", f"{peak / 1e12:,.0f} TFLOP/s")


def measure_kernels(bench: Bench) -> None:
    """Measure bandwidth or FLOP/s of each kernel, as a share of the GPU's."""
    gpu, sizes, card = bench.gpu, bench.sizes, bench.card
    device = gpu.device
    ops = TritonOps(device)
    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}

    def memory(what: str, nbytes: float, run: Callable[[], object], aim: float = 0.0) -> None:
        seconds = gpu.seconds(run)
        share = nbytes / seconds / card.bandwidth
        bench.add(
            f"kernel: {what}",
            f"{seconds * 1e6:,.0f} us, {share:.0%} of the copy's bandwidth",
            f"{aim:.0%}" if aim else "",
            share >= aim if aim else None,
        )

    x, residual = (torch.randn(*sizes.norm, **bf16) for _ in range(2))
    weight = torch.ones(sizes.norm[1], **bf16)
    memory(
        f"RMSNorm with residual, {shown(sizes.norm)}",
        4 * x.nbytes,
        lambda: ops.fused_add_rms_norm(x, residual, weight, 1e-5),
    )
    gate_up = torch.randn(sizes.gate[0], 2 * sizes.gate[1], **bf16)
    memory(
        f"SiLU and multiply, {shown(sizes.gate)}",
        1.5 * gate_up.nbytes,
        lambda: ops.act_and_mul(gate_up, "silu"),
    )
    write_kv(bench, memory)

    logits = torch.randn(*sizes.sampling, device=device)
    tokens = torch.empty(sizes.sampling[0], dtype=torch.int64, device=device)
    for name, temperature, top_p in (("greedy", 0.0, 1.0), ("top-p 0.9", 1.0, 0.9)):
        params = np.zeros(sizes.sampling[0], SAMPLING_ROW)
        params["temperature"], params["top_p"] = temperature, top_p
        params["seed"] = np.arange(len(params))
        rows = torch.from_numpy(params.view(np.int64).reshape(len(params), -1)).to(device)
        memory(
            f"sampling {shown(sizes.sampling)}, {name}; logits counted once",
            logits.nbytes,
            partial(ops.sample_into, logits, rows, tokens),
        )

    decodes = [(*size, torch.bfloat16) for size in sizes.decode]
    for batch, length, dtype in [*decodes, (*sizes.decode_fp8, torch.float8_e4m3fn)]:
        nbytes, run = attention(bench, batch, length, 1, dtype)
        fp8 = dtype != torch.bfloat16
        judged = length >= sizes.long_context and not fp8
        memory(
            f"attention, decode of {batch} x {length:,}{', FP8 cache' * fp8}",
            nbytes,
            run,
            0.7 if judged else 0.0,
        )
    _, run = attention(bench, 1, sizes.prefill, sizes.prefill, torch.bfloat16)
    heads, _, size = sizes.heads
    share = attention_flop(heads * size, sizes.prefill) / gpu.seconds(run) / card.peak
    bench.add(f"kernel: attention, prefill of {sizes.prefill:,}", f"{share:.0%} of the matrix peak")

    n, invariant = sizes.linear, TritonOps(device, batch_invariant=True)
    packed = ops.pack_weight(from_torch(torch.randn(n, n, dtype=torch.bfloat16)))
    for count in sizes.linear_rows:
        x = torch.randn(count, n, **bf16)
        plain, fixed = (gpu.seconds(partial(o.linear, x, packed)) for o in (ops, invariant))
        nbytes, flop = packed.nbytes + 2 * x.nbytes, 2 * count * n * n
        bench.add(
            f"kernel: batch-invariant product, {count} x {n} x {n}",
            f"{fixed / plain:.2f} of cuBLAS' time, {flop / fixed / card.peak:.0%} of the matrix "
            f"peak, {nbytes / fixed / card.bandwidth:.0%} of the copy's bandwidth",
        )


def write_kv(bench: Bench, memory: Callable[..., None]) -> None:
    """Measure the rotary embedding with the write to the cache, to slots in random order."""
    device, tokens = bench.gpu.device, bench.sizes.written
    heads, kv_heads, size = bench.sizes.heads
    backend = TritonAttention(device, tokens)
    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    shape = backend.kv_cache_shape(tokens // 16 + 1, 16, kv_heads, size)
    cache = torch.zeros(shape, **bf16)
    query = torch.randn(tokens, heads, size, **bf16)
    key, value = (torch.randn(tokens, kv_heads, size, **bf16) for _ in range(2))
    slots = 16 + torch.randperm(tokens, device=device)
    table = torch.rand(tokens, size, device=device)
    rotary = Rotary(
        TritonOps().rotary_embedding,
        torch.arange(tokens, device=device),
        query,
        table,
    )
    memory(
        f"rotary embedding and KV write, {tokens:,} tokens",
        2 * (query.nbytes + key.nbytes + value.nbytes) + table.nbytes,
        lambda: backend.write_kv(key, value, cache, slots, rotary),
    )


def attention(
    bench: Bench, batch: int, length: int, query_len: int, dtype: torch.dtype
) -> tuple[int, Callable[[], None]]:
    """Make a call of attention for the last `query_len` tokens of `batch` contexts.

    The blocks of the contexts are in random order.

    Returns:
        The bytes of the cache, and the call.
    """
    device, page = bench.gpu.device, 16
    heads, kv_heads, size = bench.sizes.heads
    longest = max(context for _, context in bench.sizes.decode)
    backend = TritonAttention(device, longest)
    blocks = batch * -(-length // page)
    shape = backend.kv_cache_shape(blocks + 1, page, kv_heads, size)
    cache = torch.randn(shape, dtype=torch.bfloat16, device=device).to(dtype)
    order = 1 + torch.randperm(blocks, dtype=torch.int32, device=device)
    counts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    metadata = AttentionMetadata(
        num_reqs=batch,
        num_tokens=batch * query_len,
        max_query_len=query_len,
        max_seq_len=length,
        query_start_loc=counts * query_len,
        seq_lens=torch.full_like(counts[1:], length),
        block_table=order.view(batch, -1),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
    )
    query = torch.randn(batch * query_len, heads, size, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(query)
    run = partial(backend.forward, query, cache, metadata, out, AttentionParams(size**-0.5))
    return cache[1:].nbytes, run


def attention_flop(width: int, length: int) -> float:
    """Return the FLOP of causal attention over a prompt: two products of half the token pairs."""
    return 2.0 * width * length**2


def shown(shape: tuple[int, int]) -> str:
    """Format a shape."""
    return " x ".join(f"{n:,}" for n in shape)
