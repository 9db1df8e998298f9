"""Operations in plain torch: the reference for tests, and for devices without a native kernel.

They favor readability and are not batch-invariant: torch chooses the order of summation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from octavo._native import ExpertLayer
from octavo.kernels.base import Activation, Arrived, Gelu, HostCopy, Ops, activate
from octavo.kernels.dequantize import INT4_LEVELS, NF4_LEVELS, dequantize
from octavo.kernels.lora import LoraTable, LoraWeight, affine_panels
from octavo.kernels.ops_experts import PlacedExperts, TokenSlots
from octavo.kernels.ops_logits import LongArray
from octavo.kernels.reference_states import ReferenceStateOps
from octavo.kernels.replaced import ReplacedTable, ReplacedWeight
from octavo.kernels.routing import ExpertActivation, Gate, Routing, Score
from octavo.kernels.sampling_weights import sampling_weights
from octavo.kernels.torch_tensors import (
    Copying,
    as_torch,
    dtype_name,
    from_torch,
    into,
    torch_dtype,
)
from octavo.kernels.weights import (
    Codes,
    OnlineFormat,
    PackedWeight,
    QuantFormat,
    QuantizedWeight,
    StackedWeight,
)
from octavo.system.block_types import BLOCK_TYPES
from octavo.system.tensor import HostTensor, from_numpy

LEVELS = torch.from_numpy(INT4_LEVELS)
"""Values of the codes of int4_levels, times 16; see csrc/quant.h."""

_CHUNK = 2**19  # elements per chunk where temporaries are large

_TRIES = (0.96, 0.8, 1.04, 0.84, -0.76, 1.0)


_GATES: dict[Gate, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: torch.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "swigluoai": lambda x: x * torch.sigmoid(1.702 * x),
    "softplus": F.softplus,
}


def _gated(gate_up: Tensor, activation: ExpertActivation) -> Tensor:
    """Return act(gate) * up of gate and up, stacked."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation.limit:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.name == "swigluoai":
        up = up + 1
    return _GATES[activation.name](gate) * up


def _activated(x: Tensor, activation: ExpertActivation | None) -> Tensor:
    """Return the input of an expert's second product, given the result of the first one."""
    if activation is None:
        return x
    return _gated(x, activation) if activation.gated else _GATES[activation.name](x)


def _either(dtype: str | None, x: Tensor) -> torch.dtype:
    """Return the type of a name; that of x if there is no name."""
    return x.dtype if dtype is None else torch_dtype(dtype)


def _in_groups(rows: Tensor, group: int) -> Tensor:
    """Reshape [R, K] to [R, ceil(K / group), group], padded with zeros."""
    return F.pad(rows, (0, -rows.shape[1] % group)).view(
        len(rows), -(-rows.shape[1] // group), group
    )


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b, or 0 where b is close to 0."""
    return torch.where(b.abs() < 1e-35, 0.0, a / b)


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Generate random words with Philox4x32-10.

    J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2,
    3", SC'11, section 3.3.

    Args:
        counter: uint32 [4, ...].
        key: uint32 [2, ...]; broadcasts with the counter.

    Returns:
            uint32 of the counter's shape.
    """
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = counter.astype(np.uint64)
    k0, k1 = key.astype(np.uint64)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & low, (p0 >> shift) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3)).astype(np.uint32)


def token_numbers(params: NDArray[np.void], vocab_size: int) -> NDArray[np.float64]:
    """Return the random number in (0, 1) of each token of the vocabulary.

    Token 64 g + 16 j + i has word j of the Philox counter (position, stream, 16 g + i, 0).

    Args:
        params: `SAMPLING_ROW` [M].
        vocab_size: V.

    Returns:
        float64 [M, V].
    """
    seeds, rows = params["seed"][:, None], len(params)
    blocks = np.arange(-(-vocab_size // 64) * 16, dtype=np.uint32)
    counter = np.zeros((4, rows, len(blocks)), np.uint32)
    counter[0], counter[1] = params["position"][:, None], params["stream"][:, None]
    counter[2] = blocks
    key = np.stack([seeds & 0xFFFFFFFF, seeds >> 32]).astype(np.uint32)
    words = philox4x32(counter, key).reshape(4, rows, -1, 16)
    words = words.transpose(1, 2, 0, 3).reshape(rows, -1)[:, :vocab_size]
    numbers: NDArray[np.float64] = 1.0 - (words + np.float64(0.5)) * 2.0**-32
    return numbers


def to_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize the last dimension to whole numbers up to 127; return them and their scales."""
    most = x.abs().amax(-1, keepdim=True)
    inverse = _ratio(torch.full_like(most, 127.0), most)
    return torch.round(x * inverse), torch.where(most < 1e-35, 0.0, most / 127)


def to_two_terms(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize the groups of x [rows, groups, size] as `to_bytes` does, outliers in two terms.

    A group whose largest magnitude has more than four times the mean square of those of its row
    has a second term: what rounding left, in steps that are 254 times as fine.

    Returns:
        Whole numbers, for outliers with fractions, [rows, groups, size]; scales [rows, groups, 1].
    """
    q, scales = to_bytes(x)
    squares = x.abs().amax(-1, keepdim=True).square()
    outliers = squares > 4 * squares.mean(1, keepdim=True)
    exact = x * _ratio(torch.full_like(scales, 127.0), x.abs().amax(-1, keepdim=True))
    return q + torch.where(outliers, torch.round((exact - q) * 254) / 254, 0.0), scales


def _quantize_int8(groups: Tensor) -> tuple[Tensor, Tensor]:
    q, scales = to_bytes(groups)
    return (q + 128).to(torch.uint8), scales[..., 0]


def _quantize_fp8(groups: Tensor) -> tuple[Tensor, Tensor]:
    most = groups.abs().amax(-1, keepdim=True)
    scales = torch.where(most < 1e-35, 0.0, most / 448)
    numbers = torch.where(scales == 0, 0.0, groups / scales).clamp(-448, 448)
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8), scales[..., 0]


def _quantize_levels(groups: Tensor) -> tuple[Tensor, Tensor]:
    levels = LEVELS.to(groups.device)
    middles = (levels[1:] + levels[:-1]) / 2
    most = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best, scale = torch.zeros_like(most), torch.zeros_like(most)
    for place in _TRIES:
        inverse = _ratio(place * levels[0].expand_as(most), most)
        q = levels[torch.bucketize(groups * inverse, middles)]
        vq, qq = (groups * q).sum(-1, keepdim=True), (q * q).sum(-1, keepdim=True)
        gain = _ratio(vq * vq, qq)
        scale = torch.where(gain > best, vq / qq, scale)
        best = torch.maximum(best, gain)
    scale = (16 * scale).half().float()
    q = torch.bucketize(groups * _ratio(torch.full_like(scale, 16.0), scale), middles)
    return q.to(torch.uint8), scale[..., 0]


_QUANTIZERS: dict[OnlineFormat, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "int8": _quantize_int8,
    "int4_levels": _quantize_levels,
    "fp8": _quantize_fp8,
}


class ReferenceOps(ReferenceStateOps):
    """Implementation of `Ops` in torch; see `Ops` for shapes and meaning.

    Args:
        device: the device of the tensors.
    """

    name = "reference"
    packs_weights = False

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)

    def to_device(self, x: HostTensor | NDArray[Any]) -> Tensor:
        tensor = as_torch(x)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def to_host(self, x: Tensor) -> NDArray[Any]:
        array: NDArray[Any] = from_torch(x.cpu()).numpy()
        return array

    def copy_to_host(self, x: Tensor) -> HostCopy:
        return Copying(x) if x.is_cuda else Arrived(x.numpy())

    def copy_(self, out: Tensor, x: Tensor) -> None:
        out.copy_(x)

    def copy_blocks(
        self, caches: Sequence[Tensor], src_dst_pairs: Sequence[tuple[int, int]]
    ) -> None:
        src, dst = self.to_device(np.array(src_dst_pairs, np.int64).reshape(-1, 2)).unbind(1)
        for cache in caches:
            cache[dst] = cache[src]

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        return like.new_empty(shape)

    def call(self, function: Callable[[int, int], object], tokens: int, requests: int) -> None:
        """See `Ops`."""
        function(tokens, requests)

    def pack_weight(
        self,
        weight: HostTensor | Sequence[HostTensor],
        dtype: str | None = None,
        out: HostTensor | None = None,
    ) -> PackedWeight:
        """Copy the rows without changing their layout."""
        assert out is None
        parts = [weight] if isinstance(weight, HostTensor) else weight
        data = torch.cat([self.to_device(part) for part in parts])
        data = data if dtype is None else data.to(torch_dtype(dtype))
        return PackedWeight(data, data.shape[0], data.shape[1], dtype_name(data.dtype), panel=0)

    def linear(
        self,
        x: Tensor,
        weight: PackedWeight | QuantizedWeight,
        bias: Tensor | None = None,
        out_dtype: str | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute in float32 for every dtype; with quantized weights, group by group."""
        assert weight.panel == 0, "weight was packed by another table"
        if isinstance(weight, QuantizedWeight):
            return into(out, self._linear_q(x, weight, bias, out_dtype))
        y = F.linear(
            x.float(), cast(Tensor, weight.data).float(), None if bias is None else bias.float()
        )
        return into(out, y.to(_either(out_dtype, x)))

    def head_linear(
        self, x: Tensor, weight: PackedWeight, num_heads: int, out: Tensor | None = None
    ) -> Tensor:
        """Compute in float32 for every dtype."""
        assert weight.panel == 0, "weight was packed by another table"
        rows = cast(Tensor, weight.data).float().view(num_heads, -1, weight.k)
        return into(out, torch.einsum("thk,hnk->thn", x.float(), rows).to(x.dtype))

    def _linear_q(
        self,
        x: Tensor,
        weight: QuantizedWeight,
        bias: Tensor | None,
        out_dtype: str | None,
    ) -> Tensor:
        if weight.format in BLOCK_TYPES:
            q, scales = to_two_terms(_in_groups(x.float(), 32))
            y = (q * scales).flatten(1) @ cast(Tensor, weight.data).T
            return (y if bias is None else y + bias.float()).to(_either(out_dtype, x))
        if weight.format == "fp8":
            data = cast(Tensor, weight.data).double()
            rows = (data[..., :-1] * data[..., -1:]).flatten(1)[:, : weight.k]
            y = (x.double() @ rows.T).float()
            return (y if bias is None else y + bias.float()).to(_either(out_dtype, x))
        if weight.order is not None:
            x = x[:, cast(Tensor, weight.order).long()]
        wide = _in_groups(x.float(), weight.group_size or weight.k)
        q, scales = to_two_terms(wide)
        y = torch.zeros(x.shape[0], weight.n)
        for group in range(q.shape[1]):
            numbers, scale = weight.data[:, group, :-1], weight.data[:, group, -1]
            # Exact: multiples of 1 / 16 below 2^20, with int8 whole numbers below 2^31.
            dots = (q[:, group].double() @ numbers.double().T).float()
            y += dots * scales[:, group] * scale
        if bias is not None:
            y += bias.float()
        return y.to(_either(out_dtype, x))

    def pack_lora(
        self,
        a: HostTensor,
        b: HostTensor,
        scale: float,
        dtype: str,
        out: Tensor | None = None,
        affine: HostTensor | None = None,
    ) -> LoraWeight:
        """Keep the matrices as they are; `out` is not supported."""
        assert out is None
        left, right = (self.to_device(x).to(torch_dtype(dtype)) for x in (a, b))
        panels = None
        if affine is not None:
            panels = self.to_device(from_numpy(affine_panels(affine.numpy())))
        return LoraWeight(left, right, a.shape[0], b.shape[0], a.shape[1], scale, panels)

    def put_adapter_tables(self, tables: Sequence[LoraTable | ReplacedTable]) -> None:
        """Do nothing: `add_lora` reads the tables themselves."""

    def add_lora(self, out: Tensor, x: Tensor, slots: Tensor, table: LoraTable) -> None:
        """Compute slot by slot."""
        for slot, weights in enumerate(table.weights):
            rows = slots == slot
            for i, weight in enumerate(weights):
                if weight is not None:
                    inner = x[rows].float() @ weight.a.float().T * weight.scale
                    columns = out[:, table.bounds[i] : table.bounds[i + 1]]
                    total = columns[rows] + inner @ weight.b.float().T
                    if weight.affine is not None:
                        gain, offset = weight.affine.swapaxes(0, 1).reshape(2, -1)[:, : weight.n]
                        total = total * gain + offset
                    columns[rows] = total.to(out.dtype)

    def add_lora_embedding(self, out: Tensor, ids: Tensor, slots: Tensor, table: LoraTable) -> None:
        """Compute slot by slot."""
        for slot, (weight,) in enumerate(table.weights):
            if weight is not None:
                rows = (slots == slot) & (ids >= 0) & (ids < table.inputs)
                inner = weight.a.float().T[ids[rows]] * weight.scale
                out[rows] = (out[rows] + inner @ weight.b.float().T).to(out.dtype)

    def pack_replaced(
        self,
        weight: HostTensor,
        bias: HostTensor | None,
        dtype: str,
        table: ReplacedTable,
        out: Tensor | None = None,
    ) -> ReplacedWeight:
        """Keep both as they are; `out` is not supported."""
        assert out is None
        own = None if bias is None else self.to_device(bias).to(torch_dtype(dtype))
        return ReplacedWeight(self.to_device(weight).to(torch_dtype(dtype)), own)

    def replace_linear(self, out: Tensor, x: Tensor, slots: Tensor, table: ReplacedTable) -> None:
        """Compute slot by slot."""
        for slot, own in enumerate(table.weights):
            if own is not None:
                rows = slots == slot
                y = x[rows].float() @ own.weight.float().T
                out[rows] = (y if own.bias is None else y + own.bias.float()).to(out.dtype)

    def replace_embedding(
        self, out: Tensor, ids: Tensor, slots: Tensor, table: ReplacedTable
    ) -> None:
        """Compute slot by slot."""
        for slot, own in enumerate(table.weights):
            if own is not None:
                rows = (slots == slot) & (ids >= 0) & (ids < table.shape[0])
                out[rows] = own.weight[ids[rows]]

    def quantize_weight(
        self,
        weight: Sequence[HostTensor],
        format: OnlineFormat,
        group_size: int,
        out: HostTensor | None = None,
    ) -> QuantizedWeight:
        """Quantize a few rows at a time, so that temporaries stay small."""
        assert out is None
        n, k = sum(part.shape[0] for part in weight), weight[0].shape[1]

        def codes() -> Iterator[Codes]:
            for part in weight:
                for rows in self.to_device(part).split(max(1, _CHUNK // k)):
                    numbers, scales = _QUANTIZERS[format](_in_groups(rows.float(), group_size or k))
                    yield Codes(numbers.flatten(1)[:, :k], scales)

        return self.pack_quantized(n, k, format, group_size, codes(), out)

    def pack_quantized(
        self,
        n: int,
        k: int,
        format: QuantFormat,
        group_size: int,
        parts: Iterable[Codes],
        out: HostTensor | None = None,
        order: NDArray[np.int32] | None = None,
    ) -> QuantizedWeight:
        """Store numbers in units of their scales [N, groups, group], a scale after each group."""
        assert out is None
        rows = []
        for part in parts:
            codes, scales = cast(Tensor, part.codes), cast(Tensor, part.scales)
            match format:
                case "int8":
                    numbers = codes.float() - 128
                case "int4_levels":
                    numbers = LEVELS[codes.long()] / 16
                case "nf4":
                    numbers = torch.from_numpy(NF4_LEVELS)[codes.long()]
                case "int4":
                    numbers = codes.float() - 8
                case "int4_zeros" | "int8_groups":
                    assert part.zeros is not None
                    zeros = cast(Tensor, part.zeros).float().repeat_interleave(group_size, 1)[:, :k]
                    numbers = codes.float() - zeros
                case "fp8":
                    numbers = codes.view(torch.float8_e4m3fn).float()
            rows.append(torch.cat([_in_groups(numbers, group_size or k), scales[..., None]], 2))
        data = torch.cat(rows)
        assert data.shape[0] == n
        own = None if order is None else self.to_device(order)
        return QuantizedWeight(data, n, k, format, group_size, panel=0, order=own)

    def pack_blocks(
        self,
        blocks: Sequence[HostTensor],
        block_type: QuantFormat,
        k: int,
        out: HostTensor | None = None,
    ) -> QuantizedWeight:
        """Store float32 numbers [N, K]."""
        assert out is None
        data = np.concatenate(
            [dequantize(self.to_host(cast(Tensor, b)), block_type) for b in blocks]
        )
        return QuantizedWeight(torch.from_numpy(data), len(data), k, block_type, 0, panel=0)

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        weight_offset: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute like Hugging Face's LlamaRMSNorm, or Gemma2RMSNorm with an offset."""
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
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        normed, total = out or (None, None)
        total = into(total, x + residual)
        return self.rms_norm(total, weight, eps, weight_offset, normed), total

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        weight_offset: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        wide_bias = None if bias is None else bias.float()
        wide_weight = weight.float() + weight_offset
        normed = F.layer_norm(x.float(), weight.shape, wide_weight, wide_bias, eps)
        return into(out, normed.to(x.dtype))

    def fused_add_layer_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        weight_offset: float = 0.0,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        normed, total = out or (None, None)
        total = into(total, x + residual)
        return self.layer_norm(total, weight, bias, eps, weight_offset, normed), total

    def rms(self, x: Tensor, least: float = 0.0, *, inverse: bool = False) -> Tensor:
        root = x.float().square().mean(-1, keepdim=True).clamp(min=least).sqrt()
        return (1 / root if inverse else root).to(x.dtype)

    def cutoff(self, x: Tensor, multiplier: float) -> Tensor:
        wide = x.float()
        deviation, mean = torch.std_mean(wide, -1, correction=0, keepdim=True)
        return (wide - (mean + multiplier * deviation)).relu().to(x.dtype)

    def act_and_mul(self, gate_up: Tensor, activation: Gate, out: Tensor | None = None) -> Tensor:
        """Compute like Hugging Face's LlamaMLP and GemmaMLP."""
        return into(out, _gated(gate_up, ExpertActivation(activation)))

    def linear_act_and_mul(
        self,
        x: Tensor,
        weight: PackedWeight | QuantizedWeight,
        bias: Tensor | None,
        activation: Gate,
        out: Tensor | None = None,
    ) -> Tensor:
        return self.act_and_mul(self.linear(x, weight, bias), activation, out)

    def linear_act(
        self,
        x: Tensor,
        weight: PackedWeight | QuantizedWeight,
        bias: Tensor | None,
        activation: Activation,
        out: Tensor | None = None,
    ) -> Tensor:
        return cast(Tensor, activate(self, self.linear(x, weight, bias), activation, out))

    def gelu(self, x: Tensor, approximate: Gelu, out: Tensor | None = None) -> Tensor:
        return into(out, F.gelu(x, approximate=approximate))

    def silu(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return into(out, F.silu(x))

    def relu(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return into(out, torch.relu(x))

    def sigmoid(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return into(out, torch.sigmoid(x))

    def xielu(self, x: Tensor, alphas: Tensor, out: Tensor | None = None) -> Tensor:
        wide = x.float()
        positive, negative = F.softplus(alphas.float())
        rest = torch.expm1(wide.clamp(max=-1e-6)) - wide
        result = torch.where(wide > 0, positive * wide * wide, (negative + 0.5) * rest)
        return into(out, (result + 0.5 * wide).to(x.dtype))

    def add(self, x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        return into(out, x + y)

    def multiply(
        self,
        x: Tensor,
        factor: Tensor,
        activation: Gate | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if factor.dim() == 2 < x.dim():
            factor = factor[:, None]
        return into(out, x * (factor if activation is None else _GATES[activation](factor)))

    def sum_parts(
        self,
        x: Tensor,
        parts: int,
        bias: Tensor | None,
        out_dtype: str,
        out: Tensor | None = None,
    ) -> Tensor:
        first, *others = x.view(len(x), parts, -1).unbind(1)
        for part in [*others, *([] if bias is None else [bias])]:
            first = first + part
        return into(out, first.to(torch_dtype(out_dtype)))

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def scale_(self, x: Tensor, factor: float) -> None:
        x.mul_(factor)

    def clamp_(self, x: Tensor, bound: float) -> None:
        x.clamp_(-bound, bound)

    def clip(self, x: Tensor, bounds: Tensor, out: Tensor | None = None) -> Tensor:
        clipped = torch.minimum(torch.maximum(x.float(), bounds[0]), bounds[1]).to(x.dtype)
        return clipped if out is None else out.copy_(clipped)

    def soft_cap_(self, x: Tensor, cap: float) -> None:
        x.copy_(cap * torch.tanh(x.float() / cap))

    def exp(self, x: Tensor) -> Tensor:
        return torch.exp(x)

    def log(self, x: Tensor) -> Tensor:
        return torch.log(x)

    def rotary_embedding(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        cos_sin_cache: Tensor,
        is_neox: bool = True,
    ) -> None:
        half = cos_sin_cache.shape[1] // 2
        cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
        for x in (query, key):
            pairs = (slice(half), slice(half, 2 * half))
            if not is_neox:
                pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
            a, b = x[..., pairs[0]].float(), x[..., pairs[1]].float()
            turned = a * cos - b * sin, b * cos + a * sin
            x[..., pairs[0]], x[..., pairs[1]] = turned[0].to(x.dtype), turned[1].to(x.dtype)

    def stack(
        self,
        weights: Sequence[PackedWeight | QuantizedWeight | None],
        bias: Tensor | None = None,
        cached: ExpertLayer | None = None,
    ) -> StackedWeight:
        assert cached is None, "only the native operations read experts from a file"
        addresses = [0 if weight is None else weight.data.data_ptr() for weight in weights]
        return StackedWeight(tuple(weights), bias, torch.tensor(addresses))

    def route(
        self,
        logits: Tensor,
        routing: Routing,
        bias: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        functions: dict[Score, Callable[[Tensor], Tensor]] = {
            "softmax": lambda x: torch.softmax(x, -1),
            "sigmoid": torch.sigmoid,
            "sqrt_softplus": lambda x: F.softplus(x).sqrt(),
            "none": lambda x: x,
        }
        if routing.soft_cap:
            logits = routing.soft_cap * torch.tanh(logits / routing.soft_cap)
        scores = functions[routing.score](logits)
        choice = scores if bias is None else scores + bias
        choice = choice.nan_to_num(-torch.inf, torch.inf, -torch.inf)
        if routing.groups > 1:
            grouped = choice.view(len(choice), routing.groups, -1)
            best = grouped.topk(routing.group_best, -1).values.sum(-1)
            chosen = best.sort(dim=-1, descending=True, stable=True).indices[
                :, : routing.top_groups
            ]
            kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, value=True)
            choice = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
        weights = scores.gather(1, ids)
        if routing.tolerance:
            for i in range(routing.top_k):
                most, rest = weights[:, i : i + 1], scores.scatter(1, ids[:, :i], -torch.inf)
                far = (most - scores) / scores.abs().maximum(most) > routing.tolerance
                near = rest.masked_fill(far, -torch.inf).softmax(-1)
                weights[:, i] = near.gather(1, ids[:, i : i + 1])[:, 0]
        if routing.softmax_chosen:
            weights = torch.softmax(weights, -1)
        if routing.renormalize:
            total = weights.sum(-1, keepdim=True) + routing.epsilon
            weights = weights / total.clamp(min=routing.least)
        weights = weights * routing.scale
        return ids.int(), weights if factors is None else weights * factors[ids]

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        up: StackedWeight | None,
        down: StackedWeight | None,
        activation: ExpertActivation | None,
        factors: Tensor | None = None,
        inner: Tensor | None = None,
        out: Tensor | None = None,
        counts: Tensor | None = None,
        slots: TokenSlots | None = None,
        placed: PlacedExperts | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sort the pairs by expert, and multiply the rows of one expert after the other."""
        assert counts is None, "on a CPU only"
        assert slots is None, "on a CPU only"
        assert placed is None, "on a CPU only"
        top_k, stacked = ids.shape[1], up or down
        assert stacked is not None
        order = ids.flatten().sort(stable=True).indices
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        lengths = torch.bincount(ids.flatten(), minlength=len(stacked.weights)).tolist()
        rows = order // top_k
        results = []
        for expert, begin in enumerate(accumulate([0, *lengths[:-1]])):
            own = slice(begin, begin + lengths[expert])
            if stacked.weights[expert] is None:
                results.append((own, None, None))
                continue
            if up is not None:
                taken = x[rows[own]]
                if factors is not None:
                    factor = factors.flatten()[order[own], None]
                    taken = (taken.float() * factor).to(x.dtype)
                middle = self._expert(taken, up, expert)
                middle = _activated(middle, activation)
            else:
                assert inner is not None
                middle = inner[own]
            last = None if down is None else self._expert(middle, down, expert)
            results.append((own, middle, last))
        made_inner = self._collect(results, 1, len(order), inner if up is not None else None)
        if down is None:
            return made_inner, places.view(ids.shape).int()
        return self._collect(results, 2, len(order), out), places.view(ids.shape).int()

    def _expert(self, x: Tensor, stacked: StackedWeight, expert: int) -> Tensor:
        weight = stacked.weights[expert]
        assert weight is not None
        return self.linear(x, weight, None if stacked.bias is None else stacked.bias[expert])

    @staticmethod
    def _collect(results: list[Any], part: int, rows: int, out: Tensor | None) -> Tensor:
        """Return the rows of all experts; those of other ranks' experts are left as they are."""
        made = [(result[0], result[part]) for result in results if result[part] is not None]
        if out is None:
            out = made[0][1].new_zeros(rows, made[0][1].shape[1])
        for own, values in made:
            out[own] = values
        return out

    def add_expert_lora(
        self,
        out: Tensor,
        x: Tensor,
        ids: Tensor,
        places: Tensor,
        slots: Tensor,
        table: LoraTable,
        activation: ExpertActivation | None = None,
        factors: Tensor | None = None,
        inner: Tensor | None = None,
    ) -> Tensor:
        """Compute the pairs of a slot and an expert, one after the other."""
        top_k, of_rows = ids.shape[1], places.flatten().long()
        if activation is not None:
            rows = x.repeat_interleave(top_k, 0)
            if factors is not None:
                rows = (rows.float() * factors.flatten()[:, None]).to(x.dtype)
            x = torch.empty_like(rows)
            x[of_rows] = rows
        pairs = torch.empty_like(of_rows)
        index = slots[:, None] * table.experts + ids
        pairs[of_rows] = torch.where(slots[:, None] < 0, -1, index).flatten().long()
        self.add_lora(out, x, pairs, table)
        return out if activation is None else into(inner, _activated(out, activation))

    def take_expert_rows(
        self,
        rows: Tensor,
        ids: Tensor,
        places: Tensor,
        experts: int,
        share: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        order = ids.flatten().argsort(stable=True)
        own_places = torch.empty_like(ids).flatten()
        own_places[order] = torch.arange(len(order), dtype=torch.int32)
        return rows[places.flatten()[order].long()], own_places.view(ids.shape)

    def put_expert_rows(
        self,
        rows: Tensor,
        own: Tensor,
        ids: Tensor,
        places: Tensor,
        own_places: Tensor,
        share: Tensor | None = None,
    ) -> None:
        wanted = torch.ones_like(ids, dtype=torch.bool) if share is None else share[ids.long()] != 0
        rows[places[wanted].long()] = own[own_places[wanted].long()]

    def sum_experts(
        self, x: Tensor, places: Tensor, weights: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        rows = x[places.long()].float()
        if weights is not None:
            rows = rows * weights[..., None]
        return into(out, rows.sum(1).to(x.dtype))

    def softmax(self, x: Tensor) -> Tensor:
        return torch.softmax(x, dim=-1)

    def log_softmax(self, x: Tensor) -> Tensor:
        return torch.log_softmax(x, dim=-1)

    def argmax(self, x: Tensor) -> Tensor:
        """Compare with the maximum: torch.argmax does not specify the order of equals."""
        x = x.nan_to_num(-torch.inf, torch.inf, -torch.inf)
        return (x == x.amax(-1, keepdim=True)).int().argmax(-1)

    def row_max(self, x: Tensor) -> Tensor:
        return x.amax(-1)

    def sample(self, x: Tensor, params: NDArray[np.void]) -> Tensor:
        """Rank the whole vocabulary."""
        weights = torch.from_numpy(sampling_weights(cast(Ops, self), x, params)).to(x.device)
        numbers = torch.from_numpy(token_numbers(params, x.shape[1])).to(x.device)
        arrivals = -torch.log(numbers) / weights  # a weight of 0 never arrives
        first = arrivals.amin(-1, keepdim=True)
        tokens = (arrivals == first).int().argmax(-1)
        return torch.where(self.row_max(x).isfinite(), tokens, -1)

    def apply_bitmask_(self, x: Tensor, bitmask: Tensor, rows: Tensor) -> None:
        """Mask a few rows at a time, so that temporaries stay small."""
        vocab_size = x.shape[1]
        shifts = torch.arange(32, dtype=torch.int32, device=x.device)
        step = max(1, _CHUNK // vocab_size)
        for at in range(0, len(rows), step):
            words, some = bitmask[at : at + step], rows[at : at + step]
            denied = ((words.unsqueeze(-1) >> shifts) & 1).view(len(some), -1)[:, :vocab_size] == 0
            x[some] = x[some].masked_fill_(denied, -torch.inf)

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        x = x.nan_to_num(-torch.inf, torch.inf, -torch.inf)
        values, indices = torch.sort(x, dim=-1, descending=True, stable=True)
        return values[:, :k].contiguous(), indices[:, :k].contiguous()

    def gather(self, x: Tensor, ids: LongArray) -> NDArray[np.float32]:
        return self.to_host(x.gather(1, self.to_device(ids)))

    def ranks(self, x: Tensor, ids: LongArray) -> LongArray:
        token = self.to_device(ids)[:, None]
        value = x.gather(1, token)
        lower = torch.arange(x.shape[1], device=x.device) < token
        ahead = (x > value) | ((x == value) & lower)
        return self.to_host(ahead.sum(-1) + 1)

    def set_at_(self, x: Tensor, rows: LongArray, columns: LongArray | None, value: float) -> None:
        at = (self.to_device(rows),)
        x[at if columns is None else (*at, self.to_device(columns))] = value

    def add_at_(
        self, x: Tensor, rows: LongArray, columns: LongArray, values: NDArray[np.float32]
    ) -> None:
        x[self.to_device(rows), self.to_device(columns)] += self.to_device(values)

    def penalize_(
        self,
        x: Tensor,
        rows: LongArray,
        columns: LongArray,
        counts: NDArray[np.float32],
        penalties: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]],
    ) -> None:
        number, *given = (self.to_device(array) for array in (counts, *penalties))
        repetition, frequency, presence = given
        at = self.to_device(rows), self.to_device(columns)
        values = x[at]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * number
        values -= presence * (number > 0)
        x[at] = values

    def change_rows(self, x: Tensor, rows: LongArray, change: Callable[[Ops, Any], object]) -> None:
        at = self.to_device(rows)
        own = x[at]
        change(cast(Ops, self), own)
        x[at] = own

    def embedding(
        self,
        weight: Tensor | PackedWeight | QuantizedWeight,
        ids: Tensor,
        dtype: str | None = None,
    ) -> Tensor:
        table = weight.data if isinstance(weight, PackedWeight | QuantizedWeight) else weight
        rows = F.embedding(ids, cast(Tensor, table))
        return rows.to(_either(dtype, rows)) if isinstance(weight, QuantizedWeight) else rows
