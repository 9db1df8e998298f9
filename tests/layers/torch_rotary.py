"""Rotary tables in torch: the formulas and their order of rounding, as transformers has them."""

import math

import torch
from torch import Tensor

from octavo.layers.rope_spec import RopeSpec


def build_cos_sin_cache(rope: RopeSpec, inverse: Tensor, positions: Tensor) -> Tensor:
    """Return the rows of some positions; `inverse` are their frequencies."""
    angles = (positions.float()[:, None] * inverse).double()
    return torch.cat([angles.cos().float(), angles.sin().float()], -1) * rope.attention_factor


def inverse_frequencies(rope: RopeSpec, max_position: int) -> Tensor:
    """Return float32 [rotary_dim / 2]; [max_position, rotary_dim / 2] for dynamic NTK."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    inverse = 1.0 / rope.theta**exponents
    match rope.rope_type:
        case "linear":
            return inverse / rope.factor
        case "dynamic":
            length = torch.arange(1, max_position + 1).clamp(min=rope.original_max_position)
            stretch = rope.factor * length.double() / rope.original_max_position
            stretch -= rope.factor - 1
            base = rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
            return 1.0 / base.float()[:, None] ** exponents
        case "llama3":
            turns = rope.original_max_position / (2 * math.pi / inverse)
            smooth = turns - rope.low_freq_factor
            smooth = smooth / (rope.high_freq_factor - rope.low_freq_factor)
            smooth = smooth.clamp(0.0, 1.0)
            return (1 - smooth) * inverse / rope.factor + smooth * inverse
        case "yarn":
            keep = 1 - _ramp(rope)
            return 1.0 / (rope.factor * rope.theta**exponents) * (1 - keep) + inverse * keep
        case "longrope":
            long = max_position > rope.original_max_position
            factors = torch.tensor(rope.long_factor if long else rope.short_factor)
            return 1.0 / (factors * rope.theta**exponents)
    return inverse


def _ramp(rope: RopeSpec) -> Tensor:
    def dimension(turns: float) -> float:
        wave = rope.original_max_position / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    index = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    return ((index - low) / (high - low)).clamp(0.0, 1.0)
