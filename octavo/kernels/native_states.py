"""The native operations of recurrent states, see csrc/state.h."""

from __future__ import annotations

from octavo._native import kernels
from octavo.kernels.native_base import DTYPE_CODES, NativeMemory, check_rows
from octavo.kernels.ops_states import (
    ConvActivation,
    StateRates,
    StateSlots,
    Wkv7Inputs,
    Wkv7Parameters,
)
from octavo.kernels.sizes import MAX_TAPS
from octavo.system.tensor import Tensor

_FIRST = "first_value", "value_rate"


def _slot_addresses(slots: StateSlots, tokens: int) -> dict[str, int]:
    """Return the arguments of kernels that read and write states in slots."""
    requests = len(slots.sources)
    for array, size in (
        (slots.query_start_loc, requests + 1),
        (slots.sources, requests),
        (slots.slots, tokens),
        (slots.snapshots, tokens),
    ):
        assert array.dtype == "int32"
        assert array.shape == (size,)
        assert array.is_contiguous()
    return {
        "query_start_loc": slots.query_start_loc.data_ptr(),
        "sources": slots.sources.data_ptr(),
        "slots": slots.slots.data_ptr(),
        "snapshots": slots.snapshots.data_ptr(),
        "num_reqs": requests,
    }


def _check_state(state: Tensor, numbers: int) -> None:
    """Assert that the rows of `state` are the states of the slots."""
    check_rows(state)
    assert state.shape[1] == numbers
    assert state.dtype == "float32"


def _check_parameters(shape: tuple[int, ...], *parameters: Tensor) -> None:
    for parameter in parameters:
        assert parameter.shape == shape
        assert parameter.dtype == "float32"
        assert parameter.is_contiguous()


class NativeStateOps(NativeMemory):
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
        """Compute token by token; a request's tiles of channels run in parallel."""
        check_rows(x)
        (tokens, channels), taps = x.shape, weight.shape[1]
        out = self._result(out, tokens, channels, dtype=x.dtype)
        assert 2 <= taps <= MAX_TAPS
        assert weight.shape == (channels, taps)
        assert weight.is_contiguous()
        assert x.dtype == weight.dtype
        assert bias is None or (bias.shape == (channels,) and bias.dtype == x.dtype)
        _check_state(state, (taps - 1) * channels)
        kernels.causal_conv(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            weight=weight.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            state=state.data_ptr(),
            state_stride=state.stride(0),
            channels=channels,
            taps=taps,
            silu=activation == "silu",
            dtype=DTYPE_CODES[x.dtype],
            **_slot_addresses(slots, tokens),
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
        """Compute token by token; heads and, if these are few, their columns run in parallel."""
        tokens, heads, value_size = value.shape
        key_heads, key_size = query.shape[1:]
        by_channel = decay.shape[1] != heads
        if out is None:
            out = self._empty(tokens, heads, value_size, dtype=value.dtype)
        check_rows(decay)
        check_rows(beta)
        assert heads % key_heads == 0
        assert query.shape == key.shape == (tokens, key_heads, key_size)
        assert out.shape == value.shape
        for x in (query, key, value, out):
            assert x.dtype == decay.dtype == beta.dtype
            assert x.stride(2) == 1 or x.shape[2] == 1
            assert x.stride(1) == x.shape[2] or x.shape[1] == 1, "heads must be dense"
        assert decay.shape == (tokens, heads * (key_size if by_channel else 1))
        assert beta.shape == (tokens, heads)
        _check_parameters((heads,), a_log)
        _check_parameters(decay.shape[1:], dt_bias)
        _check_state(state, heads * key_size * value_size)
        kernels.gated_delta_rule(
            query=query.data_ptr(),
            query_stride=query.stride(0),
            key=key.data_ptr(),
            key_stride=key.stride(0),
            value=value.data_ptr(),
            value_stride=value.stride(0),
            decay=decay.data_ptr(),
            decay_stride=decay.stride(0),
            beta=beta.data_ptr(),
            beta_stride=beta.stride(0),
            a_log=a_log.data_ptr(),
            dt_bias=dt_bias.data_ptr(),
            state=state.data_ptr(),
            state_stride=state.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            key_heads=key_heads,
            heads=heads,
            key_size=key_size,
            value_size=value_size,
            beta_scale=beta_scale,
            by_channel=by_channel,
            dtype=DTYPE_CODES[value.dtype],
            **_slot_addresses(slots, tokens),
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
        """Compute token by token; a request's heads run in parallel."""
        (tokens, heads, size), (_, groups, rows) = x.shape, b.shape
        if out is None:
            out = self._empty(*x.shape, dtype=x.dtype)
        assert b.shape == c.shape
        assert heads % groups == 0
        assert dt.shape == (tokens, heads)
        assert out.shape == x.shape
        for tensor in (x, b, c, out):
            assert tensor.dtype == x.dtype
            assert tensor.stride(2) == 1 or tensor.shape[2] == 1
            assert tensor.stride(1) == tensor.shape[2] or tensor.shape[1] == 1
        assert dt.dtype == x.dtype
        _check_parameters((heads,), rates.a_log, rates.dt_bias, rates.skip)
        check_rows(dt)
        _check_state(state, heads * rows * size)
        kernels.ssd(
            x=x.data_ptr(),
            dt=dt.data_ptr(),
            b=b.data_ptr(),
            c=c.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            dt_stride=dt.stride(0),
            b_stride=b.stride(0),
            c_stride=c.stride(0),
            out_stride=out.stride(0),
            a_log=rates.a_log.data_ptr(),
            dt_bias=rates.dt_bias.data_ptr(),
            skip=rates.skip.data_ptr(),
            state=state.data_ptr(),
            state_stride=state.stride(0),
            heads=heads,
            groups=groups,
            head_size=size,
            state_size=rows,
            dt_min=rates.dt_min,
            dt_max=rates.dt_max,
            dtype=DTYPE_CODES[x.dtype],
            **_slot_addresses(slots, tokens),
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
        """Compute token by token; a request's tiles of channels run in parallel."""
        (tokens, channels), rows = x.shape, b.shape[1]
        out = self._result(out, tokens, channels, dtype=x.dtype)
        assert dt.shape == gate.shape == x.shape
        assert b.shape == c.shape == (tokens, rows)
        for tensor in (x, dt, b, c, gate):
            check_rows(tensor)
            assert tensor.dtype == x.dtype
        _check_parameters((rows, channels), rates.a_log)
        _check_parameters((channels,), rates.dt_bias, rates.skip)
        _check_state(state, rows * channels)
        kernels.selective_scan(
            x=x.data_ptr(),
            dt=dt.data_ptr(),
            gate=gate.data_ptr(),
            b=b.data_ptr(),
            c=c.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            dt_stride=dt.stride(0),
            gate_stride=gate.stride(0),
            b_stride=b.stride(0),
            c_stride=c.stride(0),
            out_stride=out.stride(0),
            a_log=rates.a_log.data_ptr(),
            dt_bias=rates.dt_bias.data_ptr(),
            skip=rates.skip.data_ptr(),
            state=state.data_ptr(),
            state_stride=state.stride(0),
            channels=channels,
            state_size=rows,
            dtype=DTYPE_CODES[x.dtype],
            **_slot_addresses(slots, tokens),
        )
        return out

    def token_shift(self, x: Tensor, mix: Tensor, state: Tensor, slots: StateSlots) -> Tensor:
        """Compute token by token; a request's tiles of channels run in parallel."""
        check_rows(x)
        (tokens, channels), mixes = x.shape, mix.shape[0]
        _check_parameters((mixes, channels), mix)
        _check_state(state, channels)
        out = self._empty(tokens, mixes, channels, dtype=x.dtype)
        kernels.token_shift(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            mix=mix.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            state=state.data_ptr(),
            state_stride=state.stride(0),
            channels=channels,
            mixes=mixes,
            dtype=DTYPE_CODES[x.dtype],
            **_slot_addresses(slots, tokens),
        )
        return out

    def wkv7(
        self,
        inputs: Wkv7Inputs,
        parameters: Wkv7Parameters,
        state: Tensor,
        slots: StateSlots,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute token by token; a request's heads run in parallel."""
        tokens, heads, size = inputs.value.shape
        if out is None:
            out = self._empty(tokens, heads, size, dtype=inputs.value.dtype)
        names = ("receptance", "decay", "key", "value", "rate", "gate")
        rows = {name: getattr(inputs, name) for name in names} | {"out": out}
        if inputs.first is not None:
            rows |= zip(_FIRST, inputs.first, strict=True)
        for x in rows.values():
            assert x.shape == (tokens, heads, size)
            assert x.dtype == inputs.value.dtype
            assert x.stride(2) == 1
            assert x.stride(1) == size or heads == 1, "heads must be dense"
        vectors = {
            name: getattr(parameters, name)
            for name in ("removal", "key_rate", "bonus", "weight", "bias")
        }
        _check_parameters((heads * size,), *vectors.values())
        _check_state(state, heads * size * size)
        kernels.wkv7(
            **{name: x.data_ptr() for name, x in (rows | vectors).items()},
            **{f"{name}_stride": x.stride(0) for name, x in rows.items()},
            **{f"{name}{end}": 0 for end in ("", "_stride") for name in _FIRST if name not in rows},
            state=state.data_ptr(),
            state_stride=state.stride(0),
            heads=heads,
            size=size,
            eps=parameters.eps,
            dtype=DTYPE_CODES[inputs.value.dtype],
            **_slot_addresses(slots, tokens),
        )
        return out
