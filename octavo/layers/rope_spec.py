"""Parameters of a rotary embedding: plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeSpec:
    """Complete parameters of one kind of rotary positions, without pending defaults."""

    rope_type: str
    """Type: "default", "linear", "dynamic", "llama3", "yarn", "longrope" or "proportional"."""
    theta: float
    """Base of the wavelengths."""
    rotary_dim: int
    """Number of leading elements of each head that are rotated; even."""
    original_max_position: int
    """Context length before scaling."""
    factor: float = 1.0
    attention_factor: float = 1.0
    """Factor of cosines and sines (yarn, longrope)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """True if yarn rounds the bounds of the ramp to whole dimensions."""
    turning_pairs: int = 0
    """Number of leading pairs that proportional rotates; the angles of the others are 0."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    is_neox: bool = True
    """True for pairs (i, i + rotary_dim / 2), False for (2 i, 2 i + 1) (GLM, Cohere)."""

    def nbytes(self, max_model_len: int) -> int:
        """Return the bytes of the table of a context: float32 [max_model_len, rotary_dim].

        One row for each position: cosines, then sines.
        """
        return 4 * max_model_len * self.rotary_dim
