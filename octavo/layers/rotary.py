"""Tables of cosines and sines for rotary positions, with the usual ways to lengthen a context.

Su et al., "RoFormer" (arXiv 2104.09864); the frequencies are those of Hugging Face transformers.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from octavo.layers.rope_spec import RopeSpec
from octavo.system.tensor import HostTensor, from_numpy

Floats = NDArray[np.float32]

_ROWS_AT_ONCE = 16384


def build_cos_sin_cache(rope: RopeSpec, max_position: int) -> HostTensor:
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
    cache = np.empty((max_position, rope.rotary_dim), np.float32)
    factor = np.float32(rope.attention_factor)
    frequencies = None if rope.rope_type == "dynamic" else inverse_frequencies(rope, max_position)
    for start in range(0, max_position, _ROWS_AT_ONCE):
        positions = np.arange(start, min(start + _ROWS_AT_ONCE, max_position))
        inverse = _dynamic(rope, positions) if frequencies is None else frequencies
        # The angle is float32, as in transformers. Its cosine is computed in float64 and
        # rounded, so that the result depends neither on the vector unit nor on the size of
        # the table.
        angles = (positions.astype(np.float32)[:, None] * inverse).astype(np.float64)
        rows = cache[start : start + len(positions)]
        rows[:, : rope.rotary_dim // 2] = np.cos(angles).astype(np.float32) * factor
        rows[:, rope.rotary_dim // 2 :] = np.sin(angles).astype(np.float32) * factor
    return from_numpy(cache)


def _exponents(rope: RopeSpec) -> Floats:
    return np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)


def inverse_frequencies(rope: RopeSpec, max_position: int) -> Floats:
    """Return float32 [rotary_dim / 2], rounded where transformers rounds: angles are large."""
    inverse = np.float32(1) / _powers(rope)
    match rope.rope_type:
        case "default":
            return inverse
        case "linear":
            return inverse / np.float32(rope.factor)
        case "proportional":
            inverse[rope.turning_pairs :] = 0
            return inverse / np.float32(rope.factor)
        case "llama3":
            return _llama3(rope, inverse)
        case "yarn":
            return _yarn(rope, inverse)
        case "longrope":
            long = max_position > rope.original_max_position
            factors = np.array(rope.long_factor if long else rope.short_factor, np.float32)
            return np.float32(1) / (factors * _powers(rope))
    raise AssertionError(f"rope type {rope.rope_type} was let through by the registry")


def _powers(rope: RopeSpec) -> Floats:
    """Return float32 [rotary_dim / 2], theta to the exponents, rounded once."""
    powers: NDArray[np.float64] = np.float64(rope.theta) ** _exponents(rope).astype(np.float64)
    return powers.astype(np.float32)


def _dynamic(rope: RopeSpec, positions: NDArray[np.int64]) -> Floats:
    """Return the frequencies of dynamic NTK: float32 [rows, rotary_dim / 2]."""
    length = np.maximum(positions + 1, rope.original_max_position).astype(np.float64)
    stretch = rope.factor * length / rope.original_max_position - (rope.factor - 1)
    base = rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
    powers = base.astype(np.float32).astype(np.float64)[:, None] ** _exponents(rope)
    inverse: Floats = np.float32(1) / powers.astype(np.float32)
    return inverse


def _llama3(rope: RopeSpec, inverse: Floats) -> Floats:
    """Scale as Llama 3.1: divide long waves by the factor, keep short ones, blend in between."""
    # transformers multiplies by reciprocals here, and so rounds twice.
    wavelengths = np.float32(1) / inverse * np.float32(2 * math.pi)
    turns = np.float32(1) / wavelengths * np.float32(rope.original_max_position)
    low, high = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
    width = np.maximum(high - low, np.float32(1e-30))  # equal bounds (Llama 4): no blend
    smooth = np.clip((turns - low) / width, np.float32(0), np.float32(1))
    result: Floats = (1 - smooth) * inverse / np.float32(rope.factor) + smooth * inverse
    return result


def _yarn(rope: RopeSpec, inverse: Floats) -> Floats:
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
    index = np.arange(rope.rotary_dim // 2, dtype=np.float32)
    ramp = np.clip((index - np.float32(low)) / np.float32(high - low), np.float32(0), np.float32(1))
    keep = 1 - ramp
    stretched = np.float32(1) / (np.float32(rope.factor) * _powers(rope))
    result: Floats = stretched * (1 - keep) + inverse * keep
    return result
