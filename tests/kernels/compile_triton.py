"""Compile every Triton kernel for GPUs, without one, as the functions around them launch it.

    python -m tests.kernels.compile_triton CAPABILITY [...]

The script prints a line for each: the capability, shared memory, name, and constants. The
interpreter ignores types: code that runs there may fail to compile.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from octavo.kernels.base import Codes, QuantFormat
from octavo.kernels.triton import activation, gemm, kv_write, norm, quantized, sample, tokens
from octavo.kernels.triton.attention import attention, prefill

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
    for rows in (64 if half and not old else 1, 4096):
        wide = zeros(rows, 4096, dtype=dtype)
        gemm.linear(wide, zeros(4096, 4096, dtype=dtype), None, dtype, upcast=False)
        if rows != 64:
            products(wide)
    x, long = zeros(1, 8192, dtype=dtype), zeros(1024, 8192, dtype=dtype)
    gemm.linear(x, long, weight[:1024], torch.float32, upcast=False)

    heads, kv_heads, page = 8, 2, 16
    cases: list[tuple[int, int, dict[str, Any]]] = [
        (128, 0, {"sliding_window": 100, "logits_soft_cap": 30.0, "sinks": zeros(8, dtype=dtype)}),
        (80, 1, {"alibi_slopes": zeros(heads)}),
        (256, 2, {}),
    ]
    for head_size, format, features in cases[:2] if old else cases[2:] if half else cases[:1]:
        qkv = zeros(4, heads + 2 * kv_heads, head_size, dtype=dtype)
        query, key, value = qkv.split_with_sizes([heads, kv_heads, kv_heads], dim=1)
        cache_dtype = torch.uint8 if format else dtype
        cache = zeros(8, 2, page, kv_heads, head_size, dtype=cache_dtype)
        slots, ints = zeros(4, dtype=torch.int64), zeros(5, dtype=torch.int32)
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
        given: dict[str, Any] = {
            "sliding_window": None,
            "chunk_size": None,
            "logits_soft_cap": None,
            "alibi_slopes": None,
            "sinks": None,
        }
        shared: dict[str, Any] = {
            "query": query,
            "kv_cache": cache,
            "query_start_loc": ints,
            "seq_lens": ints[:4],
            "block_table": zeros(4, 8, dtype=torch.int32),
            "out": torch.empty_like(query),
            "scale": 0.1,
            "format": format,
            "native_fp8": target.arch >= 89,
            "upcast": False,
            **given | features,
        }
        prefill(**shared)
        for rows, programs in (("one", 4), ("decode", 1), ("tiles", 1)):
            attention(
                **shared,
                rows=rows,  # type: ignore[arg-type]
                split=256,
                max_splits=8,
                programs=programs,
                workspace=zeros(2**20),
                block_m=64 if rows == "tiles" else 16,
            )


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


for capability in sys.argv[1:]:
    target = GPUTarget("cuda", int(capability), 32)
    kernels(torch.bfloat16)
    if target.arch >= 90:
        kernels(torch.float32)
    logits, ids = zeros(3, 128256), zeros(3, dtype=torch.int64)
    sample.sample(logits, zeros(3, 4, dtype=torch.int64), ids)
    sample.apply_bitmask(logits, zeros(3, 4008, dtype=torch.int32), ids)
    tokens.take_tokens(ids, ids, ids, ids)
