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


def deepseek2(count: int, *tensors: str, **more: Any) -> dict[str, Any]:
    """Return the config of a model with `count` experts."""
    keys = {key: SIZES[key] for key in list(SIZES)[:5]} | {
        "attention.kv_lora_rank": 8,
        "expert_count": count,
        "expert_used_count": 2,
    }
    data = {"general.architecture": "deepseek2"} | {f"deepseek2.{k}": v for k, v in keys.items()}
    data |= {f"deepseek2.{key}": value for key, value in more.items()}
    shapes = dict.fromkeys((f"blk.1.{name}" for name in tensors), (count,))
    return Description(Path("m.gguf"), data).config(100, True, shapes, {})


def test_groups_of_experts_that_old_files_lack() -> None:
    bias = "exp_probs_b.bias"
    groups = [(c["n_group"], c["topk_group"]) for c in (deepseek2(n, bias) for n in (256, 384))]
    assert groups == [(8, 4), (1, 1)]
    given = deepseek2(256, bias, expert_group_count=2, expert_group_used_count=1)
    assert (given["n_group"], given["topk_group"]) == (2, 1)


def test_scores_of_experts_fit_the_tensors() -> None:
    assert deepseek2(8, expert_gating_func=1)["architectures"] == ["DeepseekV2ForCausalLM"]
    deepseek2(8, "exp_probs_b.bias", expert_gating_func=2)
    with pytest.raises(ModelError, match="expert_gating_func=2 is not softmax"):
        deepseek2(8, expert_gating_func=2)
    with pytest.raises(ModelError, match="expert_gating_func=1 is not sigmoid"):
        deepseek2(8, "exp_probs_b.bias", expert_gating_func=1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        *((kind, "with an indexer") for kind in ("deepseek32", "glm-dsa", "glm5-next", "qwen4exp")),
        ("minimax-m3", "with an indexer"),
        ("deepseek4", "compressed keys and values"),
        *((kind, "mixture of experts") for kind in ("kimi-k3", "step35")),
        ("neo-bert", "it is an encoder"),
        ("t5", "GGUF files of T5 are not read"),
    ],
)
def test_the_refusal_of_an_architecture_says_why(kind: str, reason: str) -> None:
    with pytest.raises(ModelError, match=f"architecture='{kind}' is not supported: .*{reason}"):
        Description(Path("m.gguf"), {"general.architecture": kind})


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
