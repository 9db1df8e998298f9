"""Table of operations for CUDA: Triton kernels, and torch's own where those are as good."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from octavo._native import ExpertLayer
from octavo.errors import ConfigError
from octavo.kernels.base import Gelu
from octavo.kernels.lora import LoraTable, LoraWeight
from octavo.kernels.ops_experts import PlacedExperts, TokenSlots
from octavo.kernels.replaced import ReplacedTable, ReplacedWeight
from octavo.kernels.routing import ExpertActivation, Gate, Routing
from octavo.kernels.torch_tensors import as_torch, into, torch_dtype
from octavo.kernels.triton import activation as _activation
from octavo.kernels.triton import experts, gemm, lora, norm, quantized, sample
from octavo.kernels.triton import routing as _routing
from octavo.kernels.triton.states import TritonStateOps
from octavo.kernels.weights import Codes, PackedWeight, QuantFormat, QuantizedWeight, StackedWeight
from octavo.system.tensor import HostTensor


class TritonOps(TritonStateOps):
    """Implementation of `Ops` for CUDA, or for a CPU by Triton's interpreter.

    Args:
        device: the device of the tensors.
        batch_invariant: True if the number of rows must not change a bit of a row of `linear`.
        upcast: multiply in float32: Triton's interpreter cannot multiply bfloat16.
    """

    name = "triton"

    def __init__(
        self,
        device: str | torch.device = "cpu",
        *,
        batch_invariant: bool = False,
        upcast: bool = False,
    ) -> None:
        super().__init__(device)
        self.batch_invariant = batch_invariant
        self.upcast = upcast
        # Have cuBLAS add the parts of a split sum in float32, too.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def call(self, function: Callable[[int, int], object], tokens: int, requests: int) -> None:
        """See `Ops`: captured graphs replay kernels only."""
        raise ConfigError(
            "the model has blocks that run Python code, which graphs on a GPU cannot repeat; use "
            "device=cpu with attention_backend=cpu."
        )

    def linear(
        self,
        x: Tensor,
        weight: PackedWeight | QuantizedWeight,
        bias: Tensor | None = None,
        out_dtype: str | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Use cuBLAS, or the kernels whose sums have one order for every number of rows."""
        dtype = x.dtype if out_dtype is None else torch_dtype(out_dtype)
        if isinstance(weight, QuantizedWeight):
            assert isinstance(weight, quantized.CodesWeight), "blocks have no kernels on CUDA yet"
            return into(out, quantized.linear(x, weight, bias, dtype, upcast=self.upcast))
        table = cast(Tensor, weight.data)
        if self.batch_invariant:
            return into(out, gemm.linear(x, table, bias, dtype, upcast=self.upcast))
        if dtype == x.dtype:
            return into(out, F.linear(x, table, bias))
        if x.is_cuda:  # rounded once, to the wider type
            y = torch.mm(x, table.T, out_dtype=dtype)
            return into(out, y if bias is None else y + bias)
        return super().linear(x, weight, bias, out_dtype, out)

    def head_linear(
        self, x: Tensor, weight: PackedWeight, num_heads: int, out: Tensor | None = None
    ) -> Tensor:
        """Use the kernel of `gemm`, whose sums have one order for every number of rows."""
        return gemm.head_linear(x, weight, num_heads, out, upcast=self.upcast)

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
        """Pack on the device; see `quantized.CodesWeight`."""
        assert out is None
        own = None if order is None else self.to_device(order)
        return quantized.pack(n, k, format, group_size, parts, own)

    def pack_lora(
        self,
        a: HostTensor,
        b: HostTensor,
        scale: float,
        dtype: str,
        out: Tensor | None = None,
        affine: HostTensor | None = None,
    ) -> LoraWeight:
        """Pack on the host, and copy once."""
        left, right = as_torch(a), as_torch(b)
        more = None if affine is None else as_torch(affine)
        return lora.pack(left, right, scale, torch_dtype(dtype), out, more, self.device)

    def put_adapter_tables(self, tables: Sequence[LoraTable | ReplacedTable]) -> None:
        lora.put_tables(tables, self.device)

    def add_lora(self, out: Tensor, x: Tensor, slots: Tensor, table: LoraTable) -> None:
        """Run a kernel for each product; a row's bits do not depend on other rows."""
        lora.add_lora(out, x, slots, table, lora.best_precision(x), upcast=self.upcast)

    def add_lora_embedding(self, out: Tensor, ids: Tensor, slots: Tensor, table: LoraTable) -> None:
        """Take columns of A, and run the kernel of the second product of `add_lora`."""
        lora.add_lora_embedding(out, ids, slots, table, lora.best_precision(out))

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
        """Sort the pairs by slot and expert, and run the kernels of `add_lora`."""
        lora.add_expert_lora(
            out,
            x,
            ids,
            places,
            slots,
            table,
            lora.best_precision(x),
            of_tokens=activation is not None,
            factors=factors,
            upcast=self.upcast,
        )
        return out if activation is None else into(inner, experts.activate(out, activation))

    def pack_replaced(
        self,
        weight: HostTensor,
        bias: HostTensor | None,
        dtype: str,
        table: ReplacedTable,
        out: Tensor | None = None,
    ) -> ReplacedWeight:
        """Copy the weight as it is."""
        own = None if bias is None else as_torch(bias)
        return lora.pack_replaced(
            as_torch(weight), own, torch_dtype(dtype), table, out, self.device
        )

    def replace_linear(self, out: Tensor, x: Tensor, slots: Tensor, table: ReplacedTable) -> None:
        """Run one kernel; a row's bits do not depend on other rows."""
        lora.replace_linear(out, x, slots, table, upcast=self.upcast)

    def replace_embedding(
        self, out: Tensor, ids: Tensor, slots: Tensor, table: ReplacedTable
    ) -> None:
        """Run one kernel."""
        lora.replace_embedding(out, ids, slots, table)

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        weight_offset: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        return norm.rms_norm(x, weight, eps, weight_offset, out)

    def fused_add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        weight_offset: float = 0.0,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        normed, total = norm.fused_add_rms_norm(x, residual, weight, eps, weight_offset)
        return (normed, total) if out is None else (into(out[0], normed), into(out[1], total))

    def act_and_mul(self, gate_up: Tensor, activation: Gate, out: Tensor | None = None) -> Tensor:
        return into(out, _activation.act_and_mul(gate_up, activation))

    def gelu(self, x: Tensor, approximate: Gelu, out: Tensor | None = None) -> Tensor:
        return into(out, _activation.gelu(x, approximate))

    def silu(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return into(out, _activation.act(x, "silu"))

    def stack(
        self,
        weights: Sequence[PackedWeight | QuantizedWeight | None],
        bias: Tensor | None = None,
        cached: ExpertLayer | None = None,
    ) -> StackedWeight:
        assert cached is None, "only the native operations read experts from a file"
        return experts.stack(weights, bias)

    def route(
        self,
        logits: Tensor,
        routing: Routing,
        bias: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return _routing.route(logits, routing, bias, factors)

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
        """Run one kernel for each product."""
        assert counts is None, "on a CPU only"
        assert slots is None, "on a CPU only"
        assert placed is None, "on a CPU only"
        given = None if up is not None else inner
        result, places = experts.experts(
            x, ids, up, down, activation, factors, given, upcast=self.upcast
        )
        return into(inner if down is None else out, result), places

    def sum_experts(
        self, x: Tensor, places: Tensor, weights: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        return into(out, experts.sum_experts(x, places, weights))

    def sample(self, x: Tensor, params: NDArray[np.void]) -> Tensor:
        """Run one program for each row, without sorting."""
        rows = self.to_device(params.view(np.int64).reshape(len(params), -1))
        out = torch.empty(len(x), dtype=torch.int64, device=x.device)
        sample.sample(x, rows, out)
        return out

    def sample_into(self, x: Tensor, params: Tensor, out: Tensor) -> None:
        """Run `sample` with all data on the device: `SAMPLING_ROW` [M] as int64 [M, 5]; out [M]."""
        sample.sample(x, params, out)

    def apply_bitmask_(self, x: Tensor, bitmask: Tensor, rows: Tensor) -> None:
        """Mask in one pass over the rows with a mask."""
        sample.apply_bitmask(x, bitmask, rows)
