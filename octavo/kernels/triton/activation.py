"""Activations of the MLP: SiLU and GELU, alone or multiplied by the other half."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.base import Gelu
from octavo.kernels.routing import Gate

_BLOCK = 1024


@triton.jit
def tanh(x):
    """Compute by the exponential: Triton's interpreter lacks the math library's tanh."""
    e = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -y, y)


@triton.jit
def _activate(x, KIND: tl.constexpr):
    if KIND == "silu":
        e = tl.exp(-tl.abs(x))
        y = x * tl.where(x < 0.0, e, 1.0) / (1.0 + e)
    elif KIND == "gelu_tanh":
        y = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == "sigmoid":
        e = tl.exp(-tl.abs(x))
        y = tl.where(x < 0.0, e, 1.0) / (1.0 + e)
    elif KIND == "relu2":
        y = tl.where(x > 0.0, x * x, 0.0)
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return y


@triton.jit
def _act(x, out, up, stride, columns, MUL: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < columns
    y = _activate(tl.load(x + row * stride + at, mask=mask, other=0.0).to(tl.float32), KIND)
    y = y.to(out.dtype.element_ty)
    if MUL:
        factor = tl.load(up + row * stride + at, mask=mask, other=0.0).to(tl.float32)
        y = (y.to(tl.float32) * factor).to(out.dtype.element_ty)
    tl.store(out + row * columns + at, y, mask=mask)


def act_and_mul(gate_up: Tensor, activation: Gate) -> Tensor:
    """Implement `Ops.act_and_mul`."""
    tokens, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, columns, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        gate, up = gate_up.chunk(2, dim=-1)
        _act[(tokens, triton.cdiv(columns, _BLOCK))](
            gate, out, up, gate_up.stride(0), columns, MUL=True, KIND=activation, BLOCK=_BLOCK
        )
    return out


def gelu(x: Tensor, approximate: Gelu) -> Tensor:
    """Implement `Ops.gelu`."""
    out = torch.empty_like(x)
    if x.numel():
        kind = "gelu_tanh" if approximate == "tanh" else "gelu"
        rows = x.view(-1, x.shape[-1])
        columns = rows.shape[1]
        _act[(len(rows), triton.cdiv(columns, _BLOCK))](
            rows, out, rows, columns, columns, MUL=False, KIND=kind, BLOCK=_BLOCK
        )
    return out
