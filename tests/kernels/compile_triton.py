"""Compile every Triton kernel for GPUs, without one, as the functions around them launch it.

    python -m tests.kernels.compile_triton CAPABILITY [...]

The script prints a line for each: the capability, shared memory, name, and constants. The
interpreter ignores types: code that runs there may fail to compile.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from octavo.kernels.lora import SLICE_WORDS, LoraTable
from octavo.kernels.ops_states import StateRates, Wkv7Inputs, Wkv7Parameters
from octavo.kernels.replaced import ReplacedTable
from octavo.kernels.routing import Routing
from octavo.kernels.triton import (
    activation,
    experts,
    gemm,
    kv_write,
    lora,
    norm,
    quantized,
    routing,
    sample,
    tokens,
)
from octavo.kernels.triton.attention import attention
from octavo.kernels.triton.attention_prefill import prefill
from octavo.kernels.triton.attention_step import Step
from octavo.kernels.triton.ops import TritonOps
from octavo.kernels.weights import Codes, PackedWeight, QuantFormat, StackedWeight
from octavo.models.state_cache import StateMetadata

target = GPUTarget("cuda", 0, 32)
compiled: set[str] = set()


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of which only the address is used."""
    return torch.empty(shape, dtype=dtype, device="meta")


def compile_instead(
    self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any
) -> None:
    kwargs["debug"] = False
    backend = make_backend(target)
    binder = create_function_from_signature(self.signature, self.params, backend)
    bound, specialization, options = binder(*args, **kwargs)
    options, signature, constants, attributes = self._pack_args(
        backend, kwargs, bound, specialization, options
    )
    key = f"{target.arch} {self.__name__} {signature} {constants} {attributes}"
    if key not in compiled:
        compiled.add(key)
        source = ASTSource(self, signature, constants, attributes)
        kernel = triton.compile(source, target=target, options=options.__dict__)
        # Rounding products before they are added gives the reference's bytes.
        assert self.__name__ != "_to_int8" or "fma.rn" not in kernel.asm["ptx"]
        shared = kernel.metadata.shared
        print(target.arch, shared, self.__name__, list(constants.values()), flush=True)


JITFunction.run = compile_instead  # type: ignore[method-assign]
SHARED: dict[str, Any] = {
    "query_start_loc": zeros(5, dtype=torch.int32),
    "seq_lens": zeros(4, dtype=torch.int32),
    "block_table": zeros(4, 8, dtype=torch.int32),
    "scale": 0.1,
    "native_fp8": True,
    "upcast": False,
}


def kernels(dtype: torch.dtype) -> None:
    """Launch all kernels that depend on the type of the activations.

    Each variant is compiled at least once, for one of the GPUs and types, and the largest products
    for all: everything for all would take a minute.
    """
    old, half = target.arch < 90, dtype == torch.bfloat16
    x, weight = zeros(4, 4096, dtype=dtype), zeros(4096, dtype=dtype)
    if old or not half:
        norm.rms_norm(x, weight, 1e-5, 0.0, None)
    if old:
        norm.rms_norm(x, weight, 1e-5, 1.0, None)
    if old or half:
        norm.fused_add_rms_norm(x, x, weight, 1e-5, 0.0)
    for gate in ("silu", "gelu_tanh") if old else ("gelu", "relu2") if half else ("sigmoid",):
        activation.act_and_mul(x, gate)
    activation.gelu(x, "none")
    if old:
        activation.act_and_mul(x, "swigluoai", 7.0)
    for rows in (64 if half and not old else 1, 4096):
        wide = zeros(rows, 4096, dtype=dtype)
        gemm.linear(wide, zeros(4096, 4096, dtype=dtype), None, dtype, upcast=False)
        plain = PackedWeight(zeros(4096, 4096, dtype=dtype), 4096, 4096, "", 0)
        if rows == 4096:
            mixture(wide, plain)
        if rows != 64:
            products(wide)
    x, long = zeros(1, 8192, dtype=dtype), zeros(1024, 8192, dtype=dtype)
    gemm.linear(x, long, weight[:1024], torch.float32, upcast=False)

    heads, kv_heads, page = 8, 2, 16
    cases: list[tuple[int, int, dict[str, Any]]] = [
        (128, 0, {"sliding_window": 100, "logits_soft_cap": 30.0, "sinks": zeros(8, dtype=dtype)}),
        (80, 1, {"alibi_slopes": zeros(heads)}),
        (64, 0, {"causal": False, "position_bias": zeros(heads, 257), "sliding_window": 100}),
        (512, 2 if half else 0, {}),
    ]
    of_distances = {"product_columns": zeros(257, dtype=torch.int32)}
    of_distances |= {f"{name}_products": zeros(4, 8, 64, dtype=dtype) for name in ("query", "key")}
    cases[2][2].update(of_distances)
    for head_size, format, features in cases[:3] if old else cases[3:]:
        qkv = zeros(4, heads + 2 * kv_heads, head_size, dtype=dtype)
        query, key, value = qkv.split_with_sizes([heads, kv_heads, kv_heads], dim=1)
        cache_dtype = torch.uint8 if format else dtype
        cache = zeros(8, 2, page, kv_heads, head_size, dtype=cache_dtype)
        slots = zeros(4, dtype=torch.int64)
        kv_write.write_kv(key, value, cache, slots, format=format)
        kv_write.write_kv(
            key,
            value,
            cache,
            slots,
            format=format,
            query=query,
            positions=slots,
            cos_sin_cache=zeros(32, head_size),
            is_neox=head_size != 80,
        )
        step = Step(
            query=query,
            kv_cache=cache,
            out=torch.empty_like(query),
            format=format,
            **SHARED,
            **features,
        )
        attend(step, ("one", 4), ("tiles", 1), *([("decode", 1)] if old else []))
    attend(replace(step, ranges=zeros(4, 2, dtype=torch.int32)), ("tiles", 1))
    if half:
        latents(zeros(4, 16, 576, dtype=dtype), 512, 1 if old else 0)


def attend(step: Step, *variants: tuple[Any, int]) -> None:
    """Launch attention, for rows of some kinds shared by some programs."""
    step = replace(step, native_fp8=target.arch >= 89)
    prefill(step)
    for rows, programs in variants:
        attention(
            step,
            rows=rows,
            split=256,
            max_splits=8,
            programs=programs,
            workspace=zeros(2**20),
            block_m=64 if rows == "tiles" else 16,
        )


def latents(query: torch.Tensor, value_size: int, format: int) -> None:
    """Launch the kernels of latent attention."""
    size, dtype = query.shape[2], query.dtype
    cache = zeros(8, 16, size, dtype=torch.uint8 if format else dtype)
    slots = zeros(4, dtype=torch.int64)
    kv_write.write_latents(query[:, 0], cache, format, slots)
    out = zeros(4, 16, value_size, dtype=dtype)
    step = Step(query=query, kv_cache=cache, out=out, format=format, **SHARED)
    attend(step, ("one", 4), ("tiles", 1))
    weight = PackedWeight(zeros(16 * 512, 128, dtype=dtype), 16 * 512, 128, "", 0)
    gemm.head_linear(query[:, :, :128], weight, 16, zeros(4, 16, 512, dtype=dtype), upcast=False)


def products(x: torch.Tensor) -> None:
    """Launch the products with quantized weights; the first has the largest tiles."""
    n, k = 4096, x.shape[1]
    formats: list[tuple[QuantFormat, int]] = [
        ("int4_zeros", 128),
        ("int8", 0),
        ("fp8", 0),
        ("int4_levels", 32),
        ("int8_groups", 128),
    ]
    few = 1 if x.dtype == torch.float32 else 2 if target.arch < 90 else None
    for format, group in formats[:few]:
        groups = k // (group or k)
        codes, scales = zeros(n, k, dtype=torch.uint8), zeros(n, groups)
        part = Codes(codes, scales, zeros(n, groups, dtype=torch.uint8))
        weight = quantized.pack(n, k, format, group, [part], None)
        quantized.linear(x, weight, None, x.dtype, upcast=False)
        if format in ("int4_zeros", "int8") and x.dtype == torch.bfloat16:
            mixture(x, weight)


def adapters(dtype: torch.dtype, rank: int) -> None:
    """Launch the changes of adapters, for few rows and for many."""

    def on_device(table: LoraTable) -> LoraTable:
        slices = zeros(*table.slices.shape, SLICE_WORDS, dtype=torch.int64)
        table.on_device = lora.DeviceTable(slices, slices, zeros(96, 4, dtype=torch.int32))
        return table

    table = on_device(LoraTable(8, [4096, 1024, 1024], 4096, rank))
    of_experts = on_device(LoraTable(8, [2048, 2048], 4096, rank, experts=8))
    words, ids = zeros(8, 2, dtype=torch.int64), zeros(4096, dtype=torch.int64)
    head = ReplacedTable(8, (4096, 4096), has_bias=True, is_embedding=False)
    embedding = ReplacedTable(8, (32000, 4096), has_bias=False, is_embedding=True)
    head.on_device = embedding.on_device = lora.DeviceTable(words, words)
    precision: lora.Precision = "ieee" if dtype == torch.float32 else "tf32x3"
    for rows in (8, 4096):
        x, slots = zeros(rows, 4096, dtype=dtype), zeros(rows, dtype=torch.int32)
        lora.add_lora(zeros(rows, 6144, dtype=dtype), x, slots, table, precision, upcast=False)
        order, bounds = zeros(rows, dtype=torch.int64), zeros(65, dtype=torch.int64)
        pairs = experts.Pairs(slots, order, slots.view(-1, 2), bounds)
        out = zeros(rows, 4096, dtype=dtype)
        lora.add_pairs(out, x, order, of_experts, precision, pairs, order, upcast=False)
        lora.replace_linear(zeros(rows, 4096), x, slots, head, upcast=False)
    of_tokens = on_device(LoraTable(8, [4096], 32000, rank))
    lora.add_lora_embedding(out, ids, slots, of_tokens, precision)
    lora.replace_embedding(out, ids, slots, embedding)


def states(dtype: torch.dtype) -> None:
    """Launch the operations with recurrent states, of the sizes of published models."""
    ops, ints = TritonOps("meta"), zeros(5, dtype=torch.int32)
    slots = StateMetadata(ints, ints[:4], ints[:4], ints[:4])
    x, state = zeros(4, 512, dtype=dtype), zeros(2, 4 * 128 * 128)
    ops.causal_conv(x, zeros(512, 4, dtype=dtype), None, state, slots, "silu")
    ops.token_shift(x, zeros(6, 512), state, slots)
    rows, a = x.view(4, 4, 128), zeros(512)
    ops.gated_delta_rule(rows, rows, rows, x[:, :4], x[:, :4], a[:4], a[:4], state, slots)
    ops.gated_delta_rule(rows, rows, rows, x, x[:, :4], a[:4], a, state, slots)
    rates, heads = StateRates(a[:8], a[:8], a[:8]), x.view(4, 8, 64)
    ops.ssd(heads, x[:, :8], rows[:, :1], rows[:, :1], rates, state, slots)
    rates = StateRates(zeros(16, 512), a, a)
    ops.selective_scan(x, x, x[:, :16], x[:, :16], x, rates, state, slots)
    parameters = Wkv7Parameters(a, a, a, a, a, 1e-5)
    ops.wkv7(Wkv7Inputs(*[heads] * 6, (heads, heads)), parameters, state, slots)


def mixture(x: torch.Tensor, weight: PackedWeight | quantized.CodesWeight) -> None:
    """Launch the product of 8 experts with one form of weights, and the sum of their results."""
    addresses, rows = zeros(8, dtype=torch.int64), len(x) * 2
    one: tuple[Any, ...] = (weight,) * 8, zeros(8, weight.n, dtype=x.dtype), addresses
    stacked = StackedWeight(*one)
    if isinstance(weight, quantized.CodesWeight):
        orders = zeros(8, weight.k, dtype=torch.int32)
        more = {"scales": addresses, "zeros": addresses, "orders": orders}
        stacked = experts.StackedCodes(*one, **more)
    places, order = zeros(len(x), 2, dtype=torch.int32), zeros(rows, dtype=torch.int64)
    pairs = experts.Pairs(places.flatten(), order, places, zeros(9, dtype=torch.int64))
    scores = zeros(len(x), 8)
    rules = Routing(2, "softmax", groups=2, tolerance=0.1, renormalize=True)
    routing.route(scores, rules, scores[0], scores[0])
    routing.route(scores, Routing(4, "sqrt_softplus", softmax_chosen=True), None, None)
    results = experts.multiply(x, order, stacked, pairs, upcast=False)
    experts.sum_experts(results, places, zeros(len(x), 2))


for capability in sys.argv[1:]:
    target = GPUTarget("cuda", int(capability), 32)
    kernels(torch.bfloat16)
    if target.arch >= 90:
        kernels(torch.float32)
    adapters(torch.float16 if target.arch < 90 else torch.bfloat16, 16)
    adapters(torch.float32 if target.arch < 90 else torch.bfloat16, 64)
    states(torch.bfloat16 if target.arch < 90 else torch.float32)
    logits, ids = zeros(3, 128256), zeros(3, dtype=torch.int64)
    sample.sample(logits, zeros(3, 4, dtype=torch.int64), ids)
    sample.apply_bitmask(logits, zeros(3, 4008, dtype=torch.int32), ids)
    tokens.take_tokens(ids, ids, ids, ids)
