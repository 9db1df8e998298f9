"""Tables of cosines and sines for rotary positions, with the usual ways to lengthen a context.

Su et al., "RoFormer" (arXiv 2104.09864); the frequencies are those of Hugging Face transformers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.layers.rope_spec import RopeSpec

_ROWS_AT_ONCE = 16384


def build_cos_sin_cache(rope: RopeSpec, max_position: int) -> Tensor:
    """Return float32 [max_position, rotary_dim] for `Ops.rotary_embedding`, cosines first.

    A row depends on its position and on `rope` only, so results never depend on the chunks of a
    sequence:

    - dynamic NTK: transformers computes the base from the length of the sequence so far. Row p has
      the base of a sequence of p + 1 tokens, which transformers uses for token p when it generates
      token by token.
    - longrope: transformers uses the long factors for the whole sequence as soon as it is longer
      than the original context. Here, as in vLLM, a table longer than that uses the long factors
      from row 0, a shorter one the short factors.
    """
    cache = torch.empty(max_position, rope.rotary_dim, dtype=torch.float32)
    frequencies = None if rope.rope_type == "dynamic" else _inverse_frequencies(rope, max_position)
    for start in range(0, max_position, _ROWS_AT_ONCE):
        positions = torch.arange(start, min(start + _ROWS_AT_ONCE, max_position))
        inverse = _dynamic(rope, positions) if frequencies is None else frequencies
        # The angle is float32, as in transformers. Its cosine is computed in float64 and
        # rounded, so that the result depends neither on the vector unit nor on the size of
        # the table.
        angles = (positions.float()[:, None] * inverse).double()
        rows = cache[start : start + len(positions)]
        rows[:, : rope.rotary_dim // 2] = angles.cos().float() * rope.attention_factor
        rows[:, rope.rotary_dim // 2 :] = angles.sin().float() * rope.attention_factor
    return cache


def _exponents(rope: RopeSpec) -> Tensor:
    return torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim


def _inverse_frequencies(rope: RopeSpec, max_position: int) -> Tensor:
    """Return float32 [rotary_dim / 2], rounded where transformers rounds: angles are large."""
    inverse = 1.0 / rope.theta ** _exponents(rope)
    match rope.rope_type:
        case "default":
            return inverse
        case "linear":
            return inverse / rope.factor
        case "llama3":
            return _llama3(rope, inverse)
        case "yarn":
            return _yarn(rope, inverse)
        case "longrope":
            long = max_position > rope.original_max_position
            factors = torch.tensor(rope.long_factor if long else rope.short_factor)
            return 1.0 / (factors * rope.theta ** _exponents(rope))
    raise AssertionError(f"rope type {rope.rope_type} was let through by the registry")


def _dynamic(rope: RopeSpec, positions: Tensor) -> Tensor:
    """Return the frequencies of dynamic NTK: float32 [rows, rotary_dim / 2]."""
    length = (positions + 1).clamp(min=rope.original_max_position).double()
    stretch = rope.factor * length / rope.original_max_position - (rope.factor - 1)
    base = rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return 1.0 / base.float()[:, None] ** _exponents(rope)


def _llama3(rope: RopeSpec, inverse: Tensor) -> Tensor:
    """Scale as Llama 3.1: divide long waves by the factor, keep short ones, blend in between."""
    turns = rope.original_max_position / (2 * math.pi / inverse)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * inverse / rope.factor + smooth * inverse


def _yarn(rope: RopeSpec, inverse: Tensor) -> Tensor:
    """Scale as YaRN (arXiv 2309.00071), section 3.2: ramp from extrapolation to interpolation."""

    def dimension(turns: float) -> float:
        """Return the dimension with the given number of turns within the original context."""
        wave = rope.original_max_position / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    index = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    ramp = ((index - low) / (high - low)).clamp(0.0, 1.0)
    keep = 1 - ramp
    return 1.0 / (rope.factor * rope.theta ** _exponents(rope)) * (1 - keep) + inverse * keep
