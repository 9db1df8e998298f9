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
    """Return tanh(x), by the exponential: Triton's interpreter lacks the math library's tanh."""
    e = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -y, y)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + e^-x), by the exponential of a negative number, which does not overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, e, 1.0) / (1.0 + e)


@triton.jit
def softplus(x):
    """Return log(1 + e^x), with a small relative error for every x.

    log(1 + e) is log(u) e / (u - 1) with u = 1 + e rounded (Goldberg, "What every computer
    scientist should know about floating-point arithmetic", theorem 4).
    """
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x < 0.0, 0.0, x) + log1p


@triton.jit
def _activate(x, KIND: tl.constexpr):
    if KIND == "silu":
        e = tl.exp(-tl.abs(x))
        y = x * tl.where(x < 0.0, e, 1.0) / (1.0 + e)
    elif KIND == "gelu_tanh":
        y = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == "sigmoid":
        y = sigmoid(x)
    elif KIND == "relu2":
        y = tl.where(x > 0.0, x * x, 0.0)
    elif KIND == "swigluoai":
        y = x * sigmoid(1.702 * x)
    else:
        tl.static_assert(KIND == "gelu")
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return y


@triton.jit
def _act(
    x,
    out,
    up,
    stride,
    columns,
    limit,
    MUL: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < columns
    v = tl.load(x + row * stride + at, mask=mask, other=0.0).to(tl.float32)
    if LIMIT:
        v = tl.where(v > limit, limit, v)  # NaN stays
    y = _activate(v, KIND).to(out.dtype.element_ty)
    if MUL:
        factor = tl.load(up + row * stride + at, mask=mask, other=0.0).to(tl.float32)
        if LIMIT:
            factor = tl.where(factor > limit, limit, factor)
            factor = tl.where(factor < -limit, -limit, factor)
        if KIND == "swigluoai":
            factor += 1.0
        y = (y.to(tl.float32) * factor).to(out.dtype.element_ty)
    tl.store(out + row * columns + at, y, mask=mask)


def act_and_mul(gate_up: Tensor, activation: Gate, limit: float = 0.0) -> Tensor:
    """Implement `Ops.act_and_mul`; `limit` is that of `ExpertActivation`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _launch(gate, up, activation, limit)


def act(x: Tensor, activation: Gate) -> Tensor:
    """Return the activation of x [T, D]."""
    return _launch(x, None, activation)


def _launch(x: Tensor, up: Tensor | None, kind: str, limit: float = 0.0) -> Tensor:
    """Return act(x) [T, D], times `up` if given, whose rows are as far apart as those of x."""
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows:
        _act[(rows, triton.cdiv(columns, _BLOCK))](
            x,
            out,
            x if up is None else up,
            x.stride(0),
            columns,
            limit,
            MUL=up is not None,
            KIND=kind,
            LIMIT=limit != 0.0,
            BLOCK=_BLOCK,
        )
    return out


def gelu(x: Tensor, approximate: Gelu) -> Tensor:
    """Implement `Ops.gelu`."""
    kind = "gelu_tanh" if approximate == "tanh" else "gelu"
    return _launch(x.view(-1, x.shape[-1]), None, kind).view(x.shape)
