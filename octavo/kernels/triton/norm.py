"""RMSNorm, alone and fused with the residual."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    out,
    residual_out,
    x_token_stride,
    x_head_stride,
    residual_stride,
    out_token_stride,
    out_head_stride,
    heads,
    dim,
    eps,
    weight_offset,
    ADD: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = row // heads
    head = row % heads
    columns = tl.arange(0, BLOCK)
    mask = columns < dim
    v = tl.load(x + token * x_token_stride + head * x_head_stride + columns, mask=mask, other=0.0)
    v = v.to(tl.float32)
    if ADD:
        v += tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0).to(
            tl.float32
        )
        total = v.to(residual_out.dtype.element_ty)
        tl.store(residual_out + row * dim + columns, total, mask=mask)
        v = total.to(tl.float32)
    v = v / tl.sqrt(tl.sum(v * v, axis=0) / dim + eps)
    w = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    # Llama rounds, then multiplies; Gemma multiplies by (1 + weight) in float32.
    if OFFSET:
        v = v * (w + weight_offset)
    else:
        v = v.to(out.dtype.element_ty).to(tl.float32) * w
    tl.store(
        out + token * out_token_stride + head * out_head_stride + columns,
        v.to(out.dtype.element_ty),
        mask=mask,
    )


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float, out: Tensor | None
) -> Tensor:
    """Implement `Ops.rms_norm`."""
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = 1 if x.dim() == 2 else x.shape[1]
    dim = x.shape[-1]
    if x.numel():
        _rms_norm[(x.shape[0] * heads,)](
            x,
            x,
            weight,
            out,
            out,
            x.stride(0),
            x.stride(1) if x.dim() == 3 else 0,
            0,
            out.stride(0),
            out.stride(1) if x.dim() == 3 else 0,
            heads,
            dim,
            eps,
            weight_offset,
            ADD=False,
            OFFSET=weight_offset != 0.0,
            BLOCK=triton.next_power_of_2(dim),
            num_warps=_num_warps(dim),
            enable_fp_fusion=False,
        )
    return out


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    """Implement `Ops.fused_add_rms_norm`."""
    tokens, dim = x.shape
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if tokens:
        _rms_norm[(tokens,)](
            x,
            residual,
            weight,
            out,
            total,
            x.stride(0),
            0,
            residual.stride(0),
            dim,
            0,
            1,
            dim,
            eps,
            weight_offset,
            ADD=True,
            OFFSET=weight_offset != 0.0,
            BLOCK=triton.next_power_of_2(dim),
            num_warps=_num_warps(dim),
            enable_fp_fusion=False,
        )
    return out, total


def _num_warps(dim: int) -> int:
    return 1 if dim <= 256 else 4 if dim <= 4096 else 8
