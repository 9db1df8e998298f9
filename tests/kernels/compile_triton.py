"""Compiles every Triton kernel for a GPU, without one, as the functions around them launch it.

    python -m tests.kernels.compile_triton CAPABILITY

Prints a line for each. The interpreter knows no types: what it runs need not compile.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from octavo.kernels.triton import activation, gemm, kv_write, norm, sample, tokens
from octavo.kernels.triton.attention import attention

TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
target = GPUTarget("cuda", int(sys.argv[1]), 32)
compiled: set[str] = set()


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def compile_instead(
    self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any
) -> None:
    options = {k: kwargs.pop(k) for k in list(kwargs) if k not in self.arg_names}
    given = dict(zip(self.arg_names, args, strict=False)) | kwargs
    constants = {p.name: given[p.name] for p in self.params if p.is_constexpr}
    signature = {
        name: "constexpr" if name in constants else type_of(given[name]) for name in self.arg_names
    }
    key = f"{self.__name__} {list(signature.values())} {list(constants.values())}"
    if key not in compiled:
        compiled.add(key)
        source = ASTSource(self, signature, constexprs=constants)
        kernel = triton.compile(source, target=target, options=options)
        print(
            f"{self.__name__} {list(constants.values())}: {len(kernel.asm['cubin'])} bytes",
            flush=True,
        )


JITFunction.run = compile_instead  # type: ignore[method-assign]


def kernels(dtype: torch.dtype) -> None:
    x, weight = torch.zeros(4, 64, dtype=dtype), torch.zeros(64, dtype=dtype)
    norm.rms_norm(x, weight, 1e-5, 0.0, None)
    norm.rms_norm(x, weight, 1e-5, 1.0, None)
    norm.fused_add_rms_norm(x, x, weight, 1e-5, 0.0)
    for gate in ("silu", "gelu", "gelu_tanh"):
        activation.act_and_mul(x, gate)
    activation.gelu(x, "none")
    for bias in (None, weight):
        gemm.linear(x, torch.zeros(64, 64, dtype=dtype), bias, torch.float32, upcast=False)

    heads, kv_heads, page = 8, 2, 16
    cases: list[tuple[int, int, dict[str, Any]]] = [
        (128, 0, {"sliding_window": 100}),
        (256, 0, {"logits_soft_cap": 30.0}),
        (80, 0, {"alibi_slopes": torch.zeros(heads)}),
        (64, 1, {}),
        (64, 2, {}),
    ]
    for head_size, format, features in cases if dtype == torch.bfloat16 else cases[2:3]:
        qkv = torch.zeros(4, heads + 2 * kv_heads, head_size, dtype=dtype)
        query, key, value = qkv.split_with_sizes([heads, kv_heads, kv_heads], dim=1)
        cache_dtype = torch.uint8 if format else dtype
        cache = torch.zeros(8, 2, page, kv_heads, head_size, dtype=cache_dtype)
        slots, ints = torch.zeros(4, dtype=torch.int64), torch.zeros(5, dtype=torch.int32)
        kv_write.write_kv(key, value, cache, slots, format=format)
        kv_write.write_kv(
            key,
            value,
            cache,
            slots,
            format=format,
            query=query,
            positions=slots,
            cos_sin_cache=torch.zeros(32, head_size),
            is_neox=head_size != 80,
        )
        for block_m, programs in ((16, 4), (64, 1)):
            given: dict[str, Any] = {
                "sliding_window": None,
                "logits_soft_cap": None,
                "alibi_slopes": None,
            }
            attention(
                query,
                cache,
                ints,
                ints[:4],
                torch.zeros(4, 8, dtype=torch.int32),
                torch.empty_like(query),
                scale=0.1,
                format=format,
                split=256,
                max_splits=8,
                programs=programs,
                workspace=torch.zeros(2**20),
                block_m=block_m,
                upcast=False,
                **given | features,
            )


kernels(torch.bfloat16)
if target.arch >= 90:
    kernels(torch.float32)
logits, ids = torch.zeros(3, 5000), torch.zeros(3, dtype=torch.int64)
sample.sample(logits, torch.zeros(3, 4, dtype=torch.int64), ids)
sample.apply_bitmask(logits, torch.zeros(3, 157, dtype=torch.int32), ids)
tokens.take_tokens(ids, ids, ids, ids)
