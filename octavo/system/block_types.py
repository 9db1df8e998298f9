"""Block types: blocks of numbers that share scales, those of llama.cpp's ggml and nvfp4."""

from __future__ import annotations

from typing import NamedTuple


class BlockType(NamedTuple):
    """Size of the blocks of one type."""

    numbers: int
    """Number of weights in a block: successive inputs of one output."""
    nbytes: int
    """Bytes of a block in a file."""


BLOCK_TYPES: dict[str, BlockType] = {
    "q4_0": BlockType(32, 18),
    "q4_1": BlockType(32, 20),
    "q5_0": BlockType(32, 22),
    "q5_1": BlockType(32, 24),
    "q8_0": BlockType(32, 34),
    "iq4_nl": BlockType(32, 18),
    "mxfp4": BlockType(32, 17),
    "q2_k": BlockType(256, 84),
    "q3_k": BlockType(256, 110),
    "q4_k": BlockType(256, 144),
    "q5_k": BlockType(256, 176),
    "q6_k": BlockType(256, 210),
    "iq4_xs": BlockType(256, 136),
    "iq1_levels": BlockType(256, 146),
    "iq2_levels": BlockType(256, 146),
    "iq3_xxs_levels": BlockType(256, 138),
    "iq3_s_levels": BlockType(256, 138),
    "nvfp4": BlockType(32, 22),
}
"""Block types that Octavo computes with, by ggml's name in lower case.

The types with levels are Octavo's own, with the numbers of ggml's types iq1_s to iq3_s: a float16
factor, a signed byte for each group of 16 (iq1, iq2) or 32 numbers, and four bits for each number,
its index in a table of 16 levels. A block of nvfp4 has the factor of its output in float32, scales
in e4m3 for 16 numbers each, then codes as mxfp4.
"""
