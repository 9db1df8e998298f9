"""Repacked blocks: the same numbers as in ggml's types, bit for bit."""

import hashlib
from typing import Any

import numpy as np
import pytest

from octavo.checkpoints.gguf.grids import grid
from octavo.checkpoints.gguf.repack import REPACKED, repack
from octavo.kernels.dequantize import dequantize

DIGESTS = {
    "iq1_s": "2c7b0371466fd35c",
    "iq1_m": "023902c504d06f55",
    "iq2_xxs": "0590d097565e068a",
    "iq2_xs": "0db3d9378a5a9189",
    "iq2_s": "4b766d44eb5d3e81",
    "iq3_xxs": "df4e2d04075ab31b",
    "iq3_s": "e87859b973b6168a",
    "tq1_0": "c40f53ea9ff80571",
    "tq2_0": "96fd3706e358f3eb",
    "nvfp4": "1b3bf0eec0c789eb",
}
"""Beginnings of the SHA-256 of the numbers of `random_blocks` by the package gguf."""


def random_blocks(kind: str) -> np.ndarray[Any, Any]:
    """Return 400 random blocks, whose float16 factors are neither large nor NaN; ggml has no signs
    of NVFP4's scales."""
    nbytes = REPACKED[kind].stored.nbytes
    blocks = np.random.default_rng(0).integers(0, 256, (400, nbytes), dtype=np.uint8)
    if kind == "nvfp4":
        blocks[:, :4] &= 127  # no signs
    elif kind == "iq1_m":  # the factor's bits are in the highest bits of four numbers
        blocks[:, 55] = blocks[:, 55] & 15 | 0x20
    else:
        at = {"tq1_0": 52, "tq2_0": 64}.get(kind, 0)
        blocks[:, at + 1] = 0x2A + (blocks[:, at + 1] & 1)
    return blocks


@pytest.mark.parametrize("kind", REPACKED)
def test_numbers(kind: str) -> None:
    blocks = random_blocks(kind)
    repacked = repack(blocks.reshape(-1), kind).reshape(len(blocks), -1)
    numbers = dequantize(repacked, REPACKED[kind].block_type) + np.float32(0)  # -0 becomes 0
    assert numbers.dtype == np.float32
    assert hashlib.sha256(numbers.tobytes()).hexdigest()[:16] == DIGESTS[kind]


def test_grids() -> None:
    assert {name: grid(name).shape for name in ("iq1_s", "iq2_xxs", "iq3_s")} == {
        "iq1_s": (2048, 8),
        "iq2_xxs": (256, 8),
        "iq3_s": (512, 4),
    }
    assert grid("iq1_s").max() == 2
    assert grid("iq3_xxs").max() == 7


def test_parts_of_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks("iq2_s")
    whole = repack(blocks.reshape(-1), "iq2_s")
    monkeypatch.setattr("octavo.checkpoints.gguf.repack._AT_ONCE", 150)
    assert np.array_equal(repack(blocks.reshape(-1), "iq2_s"), whole)
