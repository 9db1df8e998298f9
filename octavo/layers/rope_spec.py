"""What a rotary embedding is made from: plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeSpec:
    """Parameters of one kind of rotary positions, complete: nothing is left to be defaulted."""

    rope_type: str
    """"default", "linear", "dynamic", "llama3", "yarn" or "longrope"."""
    theta: float
    """Base of the wavelengths."""
    rotary_dim: int
    """Leading elements of each head that are rotated; even."""
    original_max_position: int
    """Context length before scaling."""
    factor: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cosines and sines (yarn, longrope)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: whether the bounds of the ramp are rounded to whole dimensions."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    is_neox: bool = True
    """Pairs are (i, i + rotary_dim / 2); otherwise (2 i, 2 i + 1) (GLM, Cohere)."""

    def nbytes(self, max_model_len: int) -> int:
        """Bytes of the table for a context of so many tokens: float32 [max_model_len, rotary_dim].

        One row for each position: cosines, then sines.
        """
        return 4 * max_model_len * self.rotary_dim
