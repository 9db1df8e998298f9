"""Operations with recurrent states, computed token by token, so that a step's size changes no bit.

A program has a tile of columns of a request's state in registers, and walks the request's tokens.
`causal_conv` and `token_shift` compute all tokens at once; they read a copy of the states, since
another program may already have replaced a state.
"""

from __future__ import annotations

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.ops_states import (
    ConvActivation,
    StateRates,
    StateSlots,
    Wkv7Inputs,
    Wkv7Parameters,
)
from octavo.kernels.reference import ReferenceOps
from octavo.kernels.torch_tensors import into
from octavo.kernels.triton.activation import sigmoid, softplus

_CHANNELS = 256  # of a program of `causal_conv` and `token_shift`
_COLUMNS = 32  # of a program's tile of a state


@triton.jit
def _only_if(condition, mask, at):
    """Return the mask of a tile of places if a condition holds, otherwise nothing.

    Triton's interpreter cannot apply `&` to a tile and a single condition.
    """
    return mask & (tl.where(condition, 0, -1) + 0 * at >= 0)


@triton.jit
def _row(x, token, stride, at, mask):
    """Load numbers of a token's row in float32."""
    return tl.load(x + token.to(tl.int64) * stride + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_state(state, sources, request, stride, at, mask):
    """Return a tile of the state before a request's first token in the step."""
    source = tl.load(sources + request)
    there = _only_if(source >= 0, mask, at)
    return tl.load(state + source.to(tl.int64) * stride + at, mask=there, other=0.0)


@triton.jit
def _store_state(state, slots, snapshots, token, stride, at, mask, numbers):
    """Write a tile of the state after a token to its slots."""
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        tl.store(state + slot * stride + at, numbers, mask=mask)
    slot = tl.load(snapshots + token).to(tl.int64)
    if slot >= 0:
        tl.store(state + slot * stride + at, numbers, mask=mask)


@triton.jit
def _request_of(token, query_start_loc, num_reqs):
    """Return the request of a token."""
    low = tl.full([], 0, tl.int32)
    high = low + num_reqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) <= token:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["num_reqs"])
def _causal_conv(
    x,
    weight,
    bias,
    before,
    state,
    out,
    query_start_loc,
    sources,
    slots,
    snapshots,
    num_reqs,
    channels,
    x_stride,
    state_stride,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < channels
    request = _request_of(token, query_start_loc, num_reqs)
    begin = tl.load(query_start_loc + request)
    known = tl.load(sources + request) >= 0
    first = before + request.to(tl.int64) * (TAPS - 1) * channels
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        place = token - (TAPS - 1) + tap
        inside = place >= begin
        v = _row(x, place, x_stride, at, _only_if(inside, mask, at))
        if tap < TAPS - 1:
            old = first + (place - begin + TAPS - 1) * channels + at
            v += tl.load(old, mask=_only_if(known & (place < begin), mask, at), other=0.0)
        total += v * tl.load(weight + at * TAPS + tap, mask=mask, other=0.0).to(tl.float32)
        if tap > 0:
            to = (tap - 1) * channels + at
            _store_state(state, slots, snapshots, token, state_stride, to, mask, v)
    if HAS_BIAS:
        total += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        total *= sigmoid(total)
    tl.store(out + token.to(tl.int64) * channels + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_reqs"])
def _token_shift(
    x,
    mix,
    before,
    state,
    out,
    query_start_loc,
    sources,
    slots,
    snapshots,
    num_reqs,
    channels,
    x_stride,
    state_stride,
    MIXES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < channels
    request = _request_of(token, query_start_loc, num_reqs)
    is_first = tl.load(query_start_loc + request) == token
    known = tl.load(sources + request) >= 0
    v = _row(x, token, x_stride, at, mask)
    last = _row(x, token - 1, x_stride, at, _only_if(is_first == 0, mask, at))
    old = before + request.to(tl.int64) * channels + at
    last += tl.load(old, mask=_only_if(is_first & known, mask, at), other=0.0)
    for i in tl.static_range(MIXES):
        share = tl.load(mix + i * channels + at, mask=mask, other=0.0)
        to = out + (token.to(tl.int64) * MIXES + i) * channels + at
        tl.store(to, (v + (last - v) * share).to(out.dtype.element_ty), mask=mask)
    _store_state(state, slots, snapshots, token, state_stride, at, mask, v)


@triton.jit
def _gated_delta_rule(
    query,
    key,
    value,
    decay,
    beta,
    a_log,
    dt_bias,
    state,
    out,
    query_start_loc,
    sources,
    slots,
    snapshots,
    query_stride,
    key_stride,
    value_stride,
    decay_stride,
    beta_stride,
    state_stride,
    out_stride,
    beta_scale,
    SHARE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    i_in = i < KEY_SIZE
    j_in = j < VALUE_SIZE
    mask = i_in[:, None] & j_in[None, :]
    at = head * KEY_SIZE * VALUE_SIZE + i[:, None] * VALUE_SIZE + j[None, :]
    s = _load_state(state, sources, request, state_stride, at, mask)
    rate = tl.exp(tl.load(a_log + head))
    of_key = head // SHARE * KEY_SIZE + i
    if BY_CHANNEL:
        of_decay = head * KEY_SIZE + i
        decay_in = i_in
    else:
        of_decay = head + 0 * i
        decay_in = i >= 0
    shift = tl.load(dt_bias + of_decay, mask=decay_in, other=0.0)
    begin = tl.load(query_start_loc + request)
    for step in range(tl.load(query_start_loc + request + 1) - begin):
        token = begin + step
        q = _row(query, token, query_stride, of_key, i_in)
        q *= 1.0 / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6)
        k = _row(key, token, key_stride, of_key, i_in)
        k *= 1.0 / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6)
        v = _row(value, token, value_stride, head * VALUE_SIZE + j, j_in)
        g = tl.exp(-rate * softplus(_row(decay, token, decay_stride, of_decay, decay_in) + shift))
        b = tl.load(beta + token.to(tl.int64) * beta_stride + head).to(tl.float32)
        s *= g[:, None]
        u = beta_scale * sigmoid(b) * (v - tl.sum(k[:, None] * s, axis=0))
        s += k[:, None] * u[None, :]
        y = tl.sum(q[:, None] * s, axis=0) / tl.sqrt(KEY_SIZE + 0.0)
        to = out + token.to(tl.int64) * out_stride + head * VALUE_SIZE + j
        tl.store(to, y.to(out.dtype.element_ty), mask=j_in)
        _store_state(state, slots, snapshots, token, state_stride, at, mask, s)


@triton.jit
def _ssd(
    x,
    dt,
    b,
    c,
    a_log,
    dt_bias,
    skip,
    state,
    out,
    query_start_loc,
    sources,
    slots,
    snapshots,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    state_stride,
    out_stride,
    dt_min,
    dt_max,
    SHARE: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.arange(0, BLOCK_N)
    j = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    i_in = i < STATE_SIZE
    j_in = j < HEAD_SIZE
    mask = i_in[:, None] & j_in[None, :]
    at = head * STATE_SIZE * HEAD_SIZE + i[:, None] * HEAD_SIZE + j[None, :]
    s = _load_state(state, sources, request, state_stride, at, mask)
    rate = tl.exp(tl.load(a_log + head))
    shift = tl.load(dt_bias + head)
    through = tl.load(skip + head)
    of_group = head // SHARE * STATE_SIZE + i
    begin = tl.load(query_start_loc + request)
    for step in range(tl.load(query_start_loc + request + 1) - begin):
        token = begin + step
        v = _row(x, token, x_stride, head * HEAD_SIZE + j, j_in)
        time = tl.load(dt + token.to(tl.int64) * dt_stride + head).to(tl.float32)
        time = softplus(time + shift)
        time = tl.where(time < dt_min, dt_min, tl.where(time > dt_max, dt_max, time))
        added = _row(b, token, b_stride, of_group, i_in)
        s = tl.exp(-rate * time) * s + added[:, None] * (time * v)[None, :]
        read = _row(c, token, c_stride, of_group, i_in)
        y = tl.sum(read[:, None] * s, axis=0) + through * v
        to = out + token.to(tl.int64) * out_stride + head * HEAD_SIZE + j
        tl.store(to, y.to(out.dtype.element_ty), mask=j_in)
        _store_state(state, slots, snapshots, token, state_stride, at, mask, s)


@triton.jit
def _selective_scan(
    x,
    dt,
    b,
    c,
    gate,
    a_log,
    dt_bias,
    skip,
    state,
    out,
    query_start_loc,
    sources,
    slots,
    snapshots,
    channels,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    gate_stride,
    state_stride,
    STATE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    request = tl.program_id(0)
    i = tl.arange(0, BLOCK_N)
    j = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    i_in = i < STATE_SIZE
    j_in = j < channels
    mask = i_in[:, None] & j_in[None, :]
    at = i[:, None] * channels + j[None, :]
    s = _load_state(state, sources, request, state_stride, at, mask)
    rates = tl.exp(tl.load(a_log + at, mask=mask, other=0.0))
    shift = tl.load(dt_bias + j, mask=j_in, other=0.0)
    through = tl.load(skip + j, mask=j_in, other=0.0)
    begin = tl.load(query_start_loc + request)
    for step in range(tl.load(query_start_loc + request + 1) - begin):
        token = begin + step
        v = _row(x, token, x_stride, j, j_in)
        time = softplus(_row(dt, token, dt_stride, j, j_in) + shift)
        added = _row(b, token, b_stride, i, i_in)
        s = tl.exp(-rates * time[None, :]) * s + added[:, None] * (time * v)[None, :]
        read = _row(c, token, c_stride, i, i_in)
        y = tl.sum(read[:, None] * s, axis=0) + through * v
        g = _row(gate, token, gate_stride, j, j_in)
        y *= g * sigmoid(g)
        to = out + token.to(tl.int64) * channels + j
        tl.store(to, y.to(out.dtype.element_ty), mask=j_in)
        _store_state(state, slots, snapshots, token, state_stride, at, mask, s)


@triton.jit
def _wkv7(
    receptance,
    decay,
    key,
    value,
    rate,
    gate,
    first,
    first_share,
    removal,
    key_rate,
    bonus,
    weight,
    bias,
    state,
    out,
    query_start_loc,
    sources,
    slots,
    snapshots,
    receptance_stride,
    decay_stride,
    key_stride,
    value_stride,
    rate_stride,
    gate_stride,
    first_stride,
    first_share_stride,
    state_stride,
    out_stride,
    eps,
    HAS_FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a head of a request. Index i counts a key's elements, j a value's."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    own = i < SIZE
    mask = own[:, None] & own[None, :]
    at = head * SIZE * SIZE + i[:, None] * SIZE + i[None, :]
    s = _load_state(state, sources, request, state_stride, at, mask)
    of_head = head * SIZE + i
    removing = tl.load(removal + of_head, mask=own, other=0.0)
    adding = tl.load(key_rate + of_head, mask=own, other=0.0)
    extra = tl.load(bonus + of_head, mask=own, other=0.0)
    factor = tl.load(weight + of_head, mask=own, other=0.0)
    term = tl.load(bias + of_head, mask=own, other=0.0)
    begin = tl.load(query_start_loc + request)
    for step in range(tl.load(query_start_loc + request + 1) - begin):
        token = begin + step
        r = _row(receptance, token, receptance_stride, of_head, own)
        w = sigmoid(_row(decay, token, decay_stride, of_head, own))
        w = tl.exp(-0.6065306597126334 * w)  # e ** (-1 / 2)
        k = _row(key, token, key_stride, of_head, own)
        v = _row(value, token, value_stride, of_head, own)
        a = sigmoid(_row(rate, token, rate_stride, of_head, own))
        if HAS_FIRST:
            share = sigmoid(_row(first_share, token, first_share_stride, of_head, own))
            v += share * (_row(first, token, first_stride, of_head, own) - v)
        kappa = k * removing
        norm = tl.sqrt(tl.sum(kappa * kappa, axis=0))
        kappa /= tl.where(norm < 1e-12, 1e-12, norm)
        k *= 1.0 + (a - 1.0) * adding
        removed = tl.sum(kappa[:, None] * s, axis=0)
        s = w[:, None] * s - (kappa * a)[:, None] * removed[None, :]
        s += k[:, None] * v[None, :]
        y = tl.sum(r[:, None] * s, axis=0)
        mean = tl.sum(y, axis=0) / SIZE
        apart = tl.where(own, y - mean, 0.0)
        variance = tl.sum(apart * apart, axis=0) / SIZE
        y = apart / tl.sqrt(variance + eps) * factor + term
        y += tl.sum(r * extra * k, axis=0) * v
        y *= _row(gate, token, gate_stride, of_head, own)
        to = out + token.to(tl.int64) * out_stride + of_head
        tl.store(to, y.to(out.dtype.element_ty), mask=own)
        _store_state(state, slots, snapshots, token, state_stride, at, mask, s)


def _places(slots: StateSlots) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments of all kernels that locate states."""
    return cast(
        tuple[Tensor, Tensor, Tensor, Tensor],
        (slots.query_start_loc, slots.sources, slots.slots, slots.snapshots),
    )


def _before(state: Tensor, slots: StateSlots) -> Tensor:
    """Return a copy of the states before the requests' first tokens."""
    return state.index_select(0, cast(Tensor, slots.sources).clamp(min=0))


def _heads(out: Tensor | None, like: Tensor) -> Tensor:
    """Return memory for a result [T, H, D] with dense heads."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device) if out is None else out


def _tile(columns: int) -> int:
    return min(_COLUMNS, int(triton.next_power_of_2(columns)))


def _warps(numbers: int) -> int:
    """Return the number of warps for a tile of a state: 32 numbers for each thread."""
    return max(1, min(8, numbers // 1024))


class TritonStateOps(ReferenceOps):
    """The operations of `Ops` that read and write recurrent states in slots."""

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
        """Compute all tokens at once."""
        (tokens, channels), taps = x.shape, weight.shape[1]
        result = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
        if tokens:
            _causal_conv[(tokens, triton.cdiv(channels, _CHANNELS))](
                x,
                weight,
                x if bias is None else bias,
                _before(state, slots),
                state,
                result,
                *_places(slots),
                len(slots.sources),
                channels,
                x.stride(0),
                state.stride(0),
                TAPS=taps,
                HAS_BIAS=bias is not None,
                SILU=activation == "silu",
                BLOCK=_CHANNELS,
            )
        return into(out, result)

    def token_shift(self, x: Tensor, mix: Tensor, state: Tensor, slots: StateSlots) -> Tensor:
        """Compute all tokens at once."""
        (tokens, channels), mixes = x.shape, len(mix)
        out = torch.empty(tokens, mixes, channels, dtype=x.dtype, device=x.device)
        if tokens:
            _token_shift[(tokens, triton.cdiv(channels, _CHANNELS))](
                x,
                mix,
                _before(state, slots),
                state,
                out,
                *_places(slots),
                len(slots.sources),
                channels,
                x.stride(0),
                state.stride(0),
                MIXES=mixes,
                BLOCK=_CHANNELS,
            )
        return out

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
        """Run a program for a tile of columns of each head of each request."""
        (tokens, heads, size), (_, key_heads, key_size) = value.shape, query.shape
        out = _heads(out, value)
        block_k, block_v = triton.next_power_of_2(key_size), _tile(size)
        if tokens:
            _gated_delta_rule[(len(slots.sources), heads, triton.cdiv(size, block_v))](
                query,
                key,
                value,
                decay,
                beta,
                a_log,
                dt_bias,
                state,
                out,
                *_places(slots),
                query.stride(0),
                key.stride(0),
                value.stride(0),
                decay.stride(0),
                beta.stride(0),
                state.stride(0),
                out.stride(0),
                beta_scale,
                SHARE=heads // key_heads,
                KEY_SIZE=key_size,
                VALUE_SIZE=size,
                BY_CHANNEL=decay.shape[1] != heads,
                BLOCK_K=block_k,
                BLOCK_V=block_v,
                num_warps=_warps(block_k * block_v),
            )
        return out

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
        """Run a program for a tile of columns of each head of each request."""
        (tokens, heads, size), (_, groups, state_size) = x.shape, b.shape
        out = _heads(out, x)
        block_n, block_p = triton.next_power_of_2(state_size), _tile(size)
        if tokens:
            _ssd[(len(slots.sources), heads, triton.cdiv(size, block_p))](
                x,
                dt,
                b,
                c,
                rates.a_log,
                rates.dt_bias,
                rates.skip,
                state,
                out,
                *_places(slots),
                x.stride(0),
                dt.stride(0),
                b.stride(0),
                c.stride(0),
                state.stride(0),
                out.stride(0),
                rates.dt_min,
                rates.dt_max,
                SHARE=heads // groups,
                STATE_SIZE=state_size,
                HEAD_SIZE=size,
                BLOCK_N=block_n,
                BLOCK_P=block_p,
                num_warps=_warps(block_n * block_p),
            )
        return out

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
        """Run a program for a tile of channels of each request."""
        (tokens, channels), state_size = x.shape, b.shape[1]
        result = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
        block_n, block_c = triton.next_power_of_2(state_size), _tile(channels)
        if tokens:
            _selective_scan[(len(slots.sources), triton.cdiv(channels, block_c))](
                x,
                dt,
                b,
                c,
                gate,
                rates.a_log,
                rates.dt_bias,
                rates.skip,
                state,
                result,
                *_places(slots),
                channels,
                x.stride(0),
                dt.stride(0),
                b.stride(0),
                c.stride(0),
                gate.stride(0),
                state.stride(0),
                STATE_SIZE=state_size,
                BLOCK_N=block_n,
                BLOCK_C=block_c,
                num_warps=_warps(block_n * block_c),
            )
        return into(out, result)

    def wkv7(
        self,
        inputs: Wkv7Inputs,
        parameters: Wkv7Parameters,
        state: Tensor,
        slots: StateSlots,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run a program for each head of each request, whose result is normed as a whole."""
        value = cast(Tensor, inputs.value)
        tokens, heads, size = value.shape
        out = _heads(out, value)
        names = ("receptance", "decay", "key", "value", "rate", "gate")
        first = (value, value) if inputs.first is None else inputs.first
        given = [cast(Tensor, x) for x in (*(getattr(inputs, name) for name in names), *first)]
        names = ("removal", "key_rate", "bonus", "weight", "bias")
        block = triton.next_power_of_2(size)
        if tokens:
            _wkv7[(len(slots.sources), heads)](
                *given,
                *(getattr(parameters, name) for name in names),
                state,
                out,
                *_places(slots),
                *(x.stride(0) for x in given),
                state.stride(0),
                out.stride(0),
                parameters.eps,
                HAS_FIRST=inputs.first is not None,
                SIZE=size,
                BLOCK=block,
                num_warps=_warps(block * block),
            )
        return out
