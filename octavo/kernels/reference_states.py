"""Operations on recurrent states in plain torch, token by token; see `reference.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.kernels.ops_states import (
    ConvActivation,
    StateRates,
    StateSlots,
    Wkv7Inputs,
    Wkv7Parameters,
)
from octavo.kernels.torch_tensors import into


def requests_of(slots: StateSlots) -> Iterator[tuple[int, slice]]:
    """Yield the source and the tokens of each request of a step."""
    sources = cast(Tensor, slots.sources).tolist()
    bounds = cast(Tensor, slots.query_start_loc).tolist()
    for source, begin, end in zip(sources, bounds, bounds[1:], strict=False):
        yield source, slice(begin, end)


def store_states(state: Tensor, slots: StateSlots, tokens: slice, states: Tensor) -> None:
    """Write the states [tokens, ...] after some tokens to their slots in `state` [slots, D]."""
    for all_targets in (slots.slots, slots.snapshots):
        targets = cast(Tensor, all_targets)[tokens].long()
        state[targets[targets >= 0]] = states[targets >= 0].flatten(1)


class ReferenceStateOps:
    """The operations of `StateOps`."""

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        slots: StateSlots,
        activation: ConvActivation,
        out: Tensor | None = None,
    ) -> Tensor:
        result, past = torch.empty_like(x, dtype=torch.float32), weight.shape[1] - 1
        for source, tokens in requests_of(slots):
            before = state.new_zeros(past, x.shape[1])
            if source >= 0:
                before = state[source].view_as(before)
            windows = torch.cat([before, x[tokens].float()]).unfold(0, past + 1, 1)
            result[tokens] = (windows * weight.float()).sum(-1)
            store_states(state, slots, tokens, windows[..., 1:].transpose(1, 2))
        if bias is not None:
            result += bias.float()
        result = F.silu(result) if activation == "silu" else result
        return into(out, result.to(x.dtype))

    def gated_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        slots: StateSlots,
        beta_scale: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute like the recurrent forms of Qwen3-Next and Kimi Linear in Hugging Face."""
        (tokens, heads, size), (_, key_heads, key_size) = value.shape, query.shape
        rate = F.softplus(decay.float() + dt_bias).view(tokens, heads, -1)
        factors = torch.exp(-a_log.exp()[:, None] * rate)[..., None]  # [T, H, DK or 1, 1]
        betas = beta_scale * torch.sigmoid(beta.float())[..., None]
        unit = [
            x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)
            for x in (query, key)
        ]
        queries, keys = (x.repeat_interleave(heads // key_heads, 1)[..., None] for x in unit)
        result = torch.empty_like(value, dtype=torch.float32)
        for source, at in requests_of(slots):
            s = state.new_zeros(heads, key_size, size)
            if source >= 0:
                s = state[source].view_as(s)
            for t in range(at.start, at.stop):
                s = s * factors[t]
                u = betas[t] * (value[t].float() - (keys[t] * s).sum(1))
                s = s + keys[t] * u[:, None]
                result[t] = (queries[t] * s).sum(1) / key_size**0.5
                store_states(state, slots, slice(t, t + 1), s[None])
        return into(out, result.to(value.dtype))

    def ssd(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        rates: StateRates,
        state: Tensor,
        slots: StateSlots,
        out: Tensor | None = None,
    ) -> Tensor:
        a_log, bias, skip = (
            cast(Tensor, parameter) for parameter in (rates.a_log, rates.dt_bias, rates.skip)
        )
        heads, group = x.shape[1], x.shape[1] // b.shape[1]
        step = F.softplus(dt.float() + bias).clamp(rates.dt_min, rates.dt_max)[..., None]
        decay = torch.exp(-torch.exp(a_log)[:, None] * step)[..., None]
        keys, queries = (z.float().repeat_interleave(group, 1) for z in (b, c))
        added = keys[..., None] * (step * x.float())[..., None, :]
        result = skip[:, None] * x.float()
        for source, tokens in requests_of(slots):
            last = torch.zeros_like(added[:1]).squeeze(0) if source < 0 else state[source]
            last, states = last.view(heads, b.shape[2], x.shape[2]), []
            for t in range(tokens.start, tokens.stop):
                last = decay[t] * last + added[t]
                result[t] += (queries[t][..., None] * last).sum(1)
                states.append(last)
            if states:
                store_states(state, slots, tokens, torch.stack(states))
        return into(out, result.to(x.dtype))

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        gate: Tensor,
        rates: StateRates,
        state: Tensor,
        slots: StateSlots,
        out: Tensor | None = None,
    ) -> Tensor:
        a_log, bias, skip = (
            cast(Tensor, parameter) for parameter in (rates.a_log, rates.dt_bias, rates.skip)
        )
        step = F.softplus(dt.float() + bias)
        decay = torch.exp(-torch.exp(a_log) * step[:, None])  # [T, N, C]
        added = b.float()[..., None] * (step * x.float())[:, None]
        result = skip * x.float()
        for source, tokens in requests_of(slots):
            last = torch.zeros_like(a_log) if source < 0 else state[source].view_as(a_log)
            states = []
            for t in range(tokens.start, tokens.stop):
                last = decay[t] * last + added[t]
                result[t] += (c[t].float()[:, None] * last).sum(0)
                states.append(last)
            if states:
                store_states(state, slots, tokens, torch.stack(states))
        return into(out, (result * F.silu(gate.float())).to(x.dtype))

    def token_shift(self, x: Tensor, mix: Tensor, state: Tensor, slots: StateSlots) -> Tensor:
        rows, before = x.float(), torch.zeros_like(x, dtype=torch.float32)
        for source, at in requests_of(slots):
            before[at][1:] = rows[at][:-1]
            if source >= 0:
                before[at.start] = state[source]
            store_states(state, slots, at, rows[at])
        rows, change = rows[:, None], (before - rows)[:, None]
        return (rows + change * mix).to(x.dtype)

    def wkv7(
        self,
        inputs: Wkv7Inputs,
        parameters: Wkv7Parameters,
        state: Tensor,
        slots: StateSlots,
        out: Tensor | None = None,
    ) -> Tensor:
        _, heads, size = inputs.value.shape
        rows = ("receptance", "decay", "key", "value", "rate", "gate")
        r, decay, k, v, rate, gate = (cast(Tensor, getattr(inputs, name)).float() for name in rows)
        factors = ("removal", "key_rate", "bonus", "weight", "bias")
        removal, key_rate, bonus, weight, bias = (
            cast(Tensor, getattr(parameters, name)).view(heads, size) for name in factors
        )
        if inputs.first is not None:
            first, share = (cast(Tensor, x).float() for x in inputs.first)
            v = v + torch.sigmoid(share) * (first - v)
        w, a = torch.exp(-math.exp(-0.5) * torch.sigmoid(decay)), torch.sigmoid(rate)
        kappa = F.normalize(k * removal, dim=-1)
        k = k * (1 + (a - 1) * key_rate)
        read = torch.empty_like(v)
        for source, at in requests_of(slots):
            s = state.new_zeros(heads, size, size)
            if source >= 0:
                s = state[source].view_as(s)
            for t in range(at.start, at.stop):
                removed = (kappa[t][..., None] * s).sum(1)
                s = w[t][..., None] * s - (kappa[t] * a[t])[..., None] * removed[:, None]
                s = s + k[t][..., None] * v[t][:, None]
                read[t] = (r[t][..., None] * s).sum(1)
                store_states(state, slots, slice(t, t + 1), s[None])
        own = (r * bonus * k).sum(-1, keepdim=True) * v
        result = gate * (F.layer_norm(read, (size,), eps=parameters.eps) * weight + bias + own)
        return into(out, result.to(inputs.value.dtype))
