"""The operations in plain torch: the truth in tests, and for devices without a native kernel.

Written to be read; not batch-invariant, since torch chooses its own order of summation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.kernels.base import Codes, Gelu, PackedWeight, QuantizedWeight


class ReferenceOps:
    """`Ops` by torch; see there for shapes and meaning."""

    name = "reference"

    def pack_weight(self, weight: Tensor | Sequence[Tensor]) -> PackedWeight:
        """The rows as they are."""
        data = weight.contiguous() if isinstance(weight, Tensor) else torch.cat(list(weight))
        return PackedWeight(data, data.shape[0], data.shape[1], data.dtype, panel=0)

    def linear(
        self,
        x: Tensor,
        weight: PackedWeight | QuantizedWeight,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Computed in float32 whatever the dtype; with quantized weights, group by group."""
        assert weight.panel == 0, "weight was packed by another table"
        if isinstance(weight, QuantizedWeight):
            return self._linear_q(x, weight, bias, out_dtype)
        y = F.linear(x.float(), weight.data.float(), None if bias is None else bias.float())
        return y.to(out_dtype or x.dtype)

    def _linear_q(
        self,
        x: Tensor,
        weight: QuantizedWeight,
        bias: Tensor | None,
        out_dtype: torch.dtype | None,
    ) -> Tensor:
        columns = weight.data.tensor_split([weight.k * weight.n], dim=0)
        raise NotImplementedError(columns)

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        weight_offset: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """As Hugging Face's LlamaRMSNorm, or Gemma2RMSNorm with an offset."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if weight_offset == 0.0:
            y = normed.to(x.dtype) * weight
        else:
            y = (normed * (weight.float() + weight_offset)).to(x.dtype)
        return y if out is None else out.copy_(y)

    def fused_add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        weight_offset: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Two steps."""
        total = x + residual
        return self.rms_norm(total, weight, eps, weight_offset), total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Computed in float32, rounded once."""
        wide_bias = None if bias is None else bias.float()
        return F.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps).to(x.dtype)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """As Hugging Face's LlamaMLP."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_and_mul(self, gate_up: Tensor, approximate: Gelu) -> Tensor:
        """As Hugging Face's GemmaMLP."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate=approximate) * up

    def gelu(self, x: Tensor, approximate: Gelu) -> Tensor:
        """Torch's own."""
        return F.gelu(x, approximate=approximate)

    def relu(self, x: Tensor) -> Tensor:
        """Torch's own."""
        return torch.relu(x)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Computed in float32, rounded once."""
        return (cap * torch.tanh(x.float() / cap)).to(x.dtype)

    def exp(self, x: Tensor) -> Tensor:
        """Torch's own."""
        return torch.exp(x)

    def log(self, x: Tensor) -> Tensor:
        """Torch's own."""
        return torch.log(x)

    def rotary_embedding(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        cos_sin_cache: Tensor,
        is_neox: bool = True,
    ) -> None:
        """Computed in float32, rounded once."""
        half = cos_sin_cache.shape[1] // 2
        cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
        for x in (query, key):
            pairs = (slice(half), slice(half, 2 * half))
            if not is_neox:
                pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
            a, b = x[..., pairs[0]].float(), x[..., pairs[1]].float()
            turned = a * cos - b * sin, b * cos + a * sin
            x[..., pairs[0]], x[..., pairs[1]] = turned[0].to(x.dtype), turned[1].to(x.dtype)

    def softmax(self, x: Tensor) -> Tensor:
        """Torch's own."""
        return torch.softmax(x, dim=-1)

    def log_softmax(self, x: Tensor) -> Tensor:
        """Torch's own."""
        return torch.log_softmax(x, dim=-1)

    def argmax(self, x: Tensor) -> Tensor:
        """By a comparison with the maximum: torch.argmax says nothing about equals."""
        x = x.nan_to_num(-torch.inf, torch.inf, -torch.inf)
        return (x == x.amax(-1, keepdim=True)).int().argmax(-1)

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """By a stable sort."""
        x = x.nan_to_num(-torch.inf, torch.inf, -torch.inf)
        values, indices = torch.sort(x, dim=-1, descending=True, stable=True)
        return values[:, :k].contiguous(), indices[:, :k].contiguous()

    def embedding(self, weight: Tensor, ids: Tensor) -> Tensor:
        """Torch's own."""
        return F.embedding(ids, weight)
