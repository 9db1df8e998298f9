"""The native operations of mixtures of experts, see csrc/routing.h and csrc/experts.cpp."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo import _native
from octavo._native import kernels
from octavo.kernels.lora import LoraTable
from octavo.kernels.native_base import (
    DTYPE_CODES,
    GATES,
    QUANT_FORMATS,
    NativeMemory,
    check_logits,
    check_rows,
)
from octavo.kernels.ops_experts import PlacedExperts, TokenSlots
from octavo.kernels.routing import ExpertActivation, Gate, Routing, Score
from octavo.kernels.weights import PackedWeight, QuantizedWeight, StackedWeight
from octavo.system.tensor import Tensor, from_numpy

_UNGATED: dict[Gate, int] = {"gelu": 4, "relu2": 10}
"""Codes of Unary in csrc/args.h, for experts without a gate."""

_SCORES: dict[Score, int] = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2, "none": 3}


def _activation(activation: ExpertActivation | None) -> dict[str, float]:
    """Return the arguments of kernels for the activation between the products."""
    if activation is None:
        return {"gated": GATES[None], "activation": -1, "limit": 0.0}
    if activation.gated:
        return {"gated": GATES[activation.name], "activation": -1, "limit": activation.limit}
    code = _UNGATED[activation.name]
    return {"gated": GATES[None], "activation": code, "limit": activation.limit}


class NativeExpertOps(NativeMemory):
    """The operations of `Ops` for mixtures of experts."""

    def stack(
        self,
        weights: Sequence[PackedWeight | QuantizedWeight | None],
        bias: Tensor | None = None,
        cached: _native.ExpertLayer | None = None,
    ) -> StackedWeight:
        addresses = [0 if weight is None else weight.data.data_ptr() for weight in weights]
        table = from_numpy(np.array(addresses, np.int64))
        return StackedWeight(tuple(weights), bias, table, cached)

    def route(
        self,
        logits: Tensor,
        routing: Routing,
        bias: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        tokens, experts = check_logits(logits)
        assert routing.top_k <= experts
        assert experts % routing.groups == 0
        for of_experts in (bias, factors):
            assert of_experts is None or of_experts.shape == (experts,)
            assert of_experts is None or of_experts.dtype == "float32"
        ids = self._empty(tokens, routing.top_k, dtype="int32")
        weights = self._empty(tokens, routing.top_k, dtype="float32")
        kernels.route(
            logits=logits.data_ptr(),
            logits_stride=logits.stride(0),
            bias=0 if bias is None else bias.data_ptr(),
            factors=0 if factors is None else factors.data_ptr(),
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
            tokens=tokens,
            experts=experts,
            top_k=routing.top_k,
            groups=routing.groups,
            top_groups=routing.top_groups,
            group_best=routing.group_best,
            score=_SCORES[routing.score],
            softmax_chosen=routing.softmax_chosen,
            renormalize=routing.renormalize,
            tolerance=routing.tolerance,
            soft_cap=routing.soft_cap,
            epsilon=routing.epsilon,
            least=routing.least,
            scale=routing.scale,
        )
        return ids, weights

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
        """Compute both products as one set of tasks; see csrc/experts.cpp."""
        check_rows(x)
        (tokens, top_k), stacked = ids.shape, up or down
        assert stacked is not None
        assert ids.dtype == "int32"
        assert ids.is_contiguous()
        assert factors is None or (factors.shape == ids.shape and factors.is_contiguous())
        assert counts is None or (
            counts.dtype == "int64" and counts.shape == (len(stacked.weights),)
        )
        assert slots is None or len(slots.counts) * slots.size == tokens
        if up is not None:
            gated = activation is not None and activation.gated
            width = up.first.n // (2 if gated else 1)
            inner = self._result(inner, tokens * top_k, width, dtype=x.dtype)
        assert inner is not None
        if down is not None:
            out = self._result(out, tokens * top_k, down.first.n, dtype=x.dtype)
        places = self._empty(tokens, top_k, dtype="int32")
        compute = kernels.experts if stacked.cached is None else stacked.cached.experts
        compute(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            ids=ids.data_ptr(),
            factors=0 if factors is None else factors.data_ptr(),
            places=places.data_ptr(),
            inner=inner.data_ptr(),
            inner_stride=inner.stride(0),
            out=0 if out is None else out.data_ptr(),
            out_stride=0 if out is None else out.stride(0),
            tokens=tokens,
            top_k=top_k,
            experts=len(stacked.weights),
            hidden=x.shape[1],
            up_outputs=0 if up is None else up.first.n,
            down_inputs=inner.shape[1],
            down_outputs=0 if down is None else down.first.n,
            **_activation(activation),
            dtype=DTYPE_CODES[x.dtype],
            counts=0 if counts is None else counts.data_ptr(),
            slot_tokens=0 if slots is None else slots.counts.data_ptr(),
            slots=0 if slots is None else len(slots.counts),
            slot_size=0 if slots is None else slots.size,
            own_slot=0 if slots is None else slots.own,
            loads=0 if placed is None or placed.loads is None else placed.loads.data_ptr(),
            shares=0 if placed is None else placed.shares.data_ptr(),
            **self._stacked("up", up, x.shape[1], x.dtype),
            **self._stacked("down", down, inner.shape[1], x.dtype),
        )
        result = inner if down is None else out
        assert result is not None
        return result, places

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
        """Read the table when the kernel runs; see csrc/expert_lora.cpp."""
        check_rows(x)
        (tokens, top_k), pairs = ids.shape, ids.shape[0] * ids.shape[1]
        assert x.shape == (tokens if activation else pairs, table.inputs)
        assert out.shape == (pairs, table.bounds[-1])
        assert out.is_contiguous()
        assert out.dtype == x.dtype
        for given, shape in ((ids, ids.shape), (places, ids.shape), (slots, (tokens,))):
            assert given.dtype == "int32"
            assert given.shape == shape
            assert given.is_contiguous()
        assert factors is None or (factors.shape == ids.shape and factors.is_contiguous())
        pair_slots, gathered = self._empty(pairs, dtype="int32"), None
        if activation is not None:
            width = out.shape[1] // (2 if activation.gated else 1)
            inner = self._result(inner, pairs, width, dtype=x.dtype)
            gathered = self._empty(pairs, table.inputs, dtype=x.dtype)
        kernels.add_expert_lora(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            factors=0 if factors is None else factors.data_ptr(),
            ids=ids.data_ptr(),
            places=places.data_ptr(),
            slots=slots.data_ptr(),
            slices=table.slices.ctypes.data,
            bounds=table.bounds.ctypes.data,
            pair_slots=pair_slots.data_ptr(),
            gathered=0 if gathered is None else gathered.data_ptr(),
            out=out.data_ptr(),
            inner=0 if inner is None else inner.data_ptr(),
            out_stride=out.stride(0),
            inner_stride=0 if inner is None else inner.stride(0),
            tokens=tokens,
            top_k=top_k,
            experts=table.experts,
            k=table.inputs,
            num_slices=table.slices.shape[1],
            max_rank=table.max_rank,
            **_activation(activation),
            dtype=DTYPE_CODES[x.dtype],
        )
        return out if inner is None else inner

    def take_expert_rows(
        self,
        rows: Tensor,
        ids: Tensor,
        places: Tensor,
        experts: int,
        share: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sort the pairs when the kernel runs; see csrc/expert_lora.cpp."""
        (tokens, top_k), own_places = ids.shape, self._empty(*ids.shape, dtype="int32")
        own = self._empty(tokens * top_k, rows.shape[1], dtype=rows.dtype)
        args = _expert_rows(rows, own, ids, places, own_places, share)
        kernels.take_expert_rows(**args, experts=experts)
        return own, own_places

    def put_expert_rows(
        self,
        rows: Tensor,
        own: Tensor,
        ids: Tensor,
        places: Tensor,
        own_places: Tensor,
        share: Tensor | None = None,
    ) -> None:
        args = _expert_rows(rows, own, ids, places, own_places, share)
        kernels.put_expert_rows(**args, experts=0)

    @staticmethod
    def _stacked(
        name: str, stacked: StackedWeight | None, inputs: int, dtype: str
    ) -> dict[str, int]:
        """Return the arguments of `kernels.experts` for one of the products."""
        data = bias = group = order = form = 0
        plain = True
        if stacked is not None:
            weight, data = stacked.first, stacked.addresses.data_ptr()
            assert weight.k == inputs
            assert weight.panel == _native.panel(), (
                "weights were packed for another instruction set"
            )
            if stacked.bias is not None:
                assert stacked.bias.shape == (len(stacked.weights), weight.n)
                assert stacked.bias.dtype == dtype
                assert stacked.bias.is_contiguous()
                bias = stacked.bias.data_ptr()
            if isinstance(weight, QuantizedWeight):
                plain, group, form = False, weight.group_size, QUANT_FORMATS[weight.format]
                if weight.order is not None:
                    order = weight.order.data_ptr() - weight.data.data_ptr()
            else:
                assert weight.dtype == dtype
        values = {"": data, "_bias": bias, "_group": group, "_order": order, "_format": form}
        return {f"{name}{key}": value for key, value in values.items()} | {f"{name}_plain": plain}

    def sum_experts(
        self, x: Tensor, places: Tensor, weights: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        check_rows(x)
        tokens, top_k = places.shape
        assert places.dtype == "int32"
        assert weights is None or weights.shape == places.shape
        out = self._result(out, tokens, x.shape[1], dtype=x.dtype)
        kernels.sum_experts(
            x=x.data_ptr(),
            places=places.data_ptr(),
            weights=0 if weights is None else weights.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            out_stride=out.stride(0),
            tokens=tokens,
            top_k=top_k,
            dim=x.shape[1],
            dtype=DTYPE_CODES[x.dtype],
        )
        return out


def _expert_rows(
    rows: Tensor,
    own: Tensor,
    ids: Tensor,
    places: Tensor,
    own_places: Tensor,
    share: Tensor | None,
) -> dict[str, int]:
    """Return the arguments of the kernels that copy rows of several processes."""
    (tokens, top_k), n = ids.shape, rows.shape[1]
    check_rows(rows)
    check_rows(own)
    assert own.shape == (tokens * top_k, n)
    assert own.dtype == rows.dtype
    for given in (ids, places, own_places):
        assert given.dtype == "int32"
        assert given.shape == ids.shape
        assert given.is_contiguous()
    assert share is None or (share.dtype == "int32" and share.is_contiguous())
    return {
        "all": rows.data_ptr(),
        "own": own.data_ptr(),
        "all_stride": rows.stride(0),
        "own_stride": own.stride(0),
        "ids": ids.data_ptr(),
        "places": places.data_ptr(),
        "own_places": own_places.data_ptr(),
        "share": 0 if share is None else share.data_ptr(),
        "tokens": tokens,
        "top_k": top_k,
        "n": n,
        "dtype": DTYPE_CODES[rows.dtype],
    }
