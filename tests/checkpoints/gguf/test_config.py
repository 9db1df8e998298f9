"""Metadata of GGUF files with values that no converter writes."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.checkpoints.gguf.architectures import ARCHITECTURES
from octavo.checkpoints.gguf.config import SAMPLING, Description
from octavo.errors import ModelError

SIZES = {
    "embedding_length": 64,
    "block_count": 2,
    "attention.head_count": 4,
    "feed_forward_length": 128,
    "context_length": 128,
    "attention.sliding_window": 16,
    "attention.sliding_window_pattern": np.array([True, False]),
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 2.0,
    "attention.head_count_kv": 1,
    "activation_sparsity_scale": np.array([1.5, -np.inf], np.float32),
}
SHAPES = {"blk.0.attn_v.weight": (2, 2), "blk.0.laurel_l.weight": (8, 64)}
VALUES: list[Any] = [0, -1, 3, 2**63, 0.0, 0.5, -1e30, math.nan, math.inf, True, "", "x" * 999]
VALUES += [np.array(array) for array in ([], [1, 2], [0.5, -1.0], [True, False, True])]


class Recorder(dict[str, Any]):
    """Metadata that records the keys that are read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def read(kind: str, metadata: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the config, empty if it is refused, and the keys that were read."""
    recorder = Recorder(metadata)
    found: dict[str, Any] = {}
    message = "m.gguf: "
    try:
        described = Description(Path("m.gguf"), recorder)
        found = described.config(100, True, SHAPES, {})
        found |= described.sampling()
    except ModelError as error:
        message = str(error)
    assert message.startswith("m.gguf: ")
    assert len(message) < 600
    return found, recorder.read


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_any_value_of_any_key(kind: str) -> None:
    own = SIZES if ARCHITECTURES[kind].windowed else {k: SIZES[k] for k in list(SIZES)[:5]}
    base = {"general.architecture": kind} | {f"{kind}.{key}": own[key] for key in own}
    factors = ("embedding_scale", "residual_scale", "logit_scale")
    scales = {f"{kind}.{key}": 1.0 for key in factors if kind == "minicpm"}
    keys = read(kind, base)[1] | read(kind, base | scales)[1]
    keys |= {f"general.sampling.{key}" for key in SAMPLING.values()}
    assert len(keys) > 20
    for key in keys - {"general.architecture"}:
        for value in VALUES:
            for more in ({}, scales):
                config, _ = read(kind, base | more | {key: value})
                json.dumps(config)  # only real numbers, texts and lists
