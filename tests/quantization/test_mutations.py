"""Damaged descriptions and tensors: typed errors that name the field or the tensor, or a model."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import ModelError
from tests.models.harness import load
from tests.quantization import test_awq, test_bitsandbytes, test_compressed_tensors, test_gptq
from tests.quantization.harness import Array, Folders

ROUNDS = 60
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 4, 8, 16, 32, 64, 2**31, 2**63, 1e308, 4.0, 4.5, "", "4", "int",
    "group", "channel", "gptq_v2", "int-quantized", "re:(", "re:(a+)+$", "re:.*", "Linear",
    "lm_head", [], ["Linear"], ["re:.*"], [1], [[]], {}, {"a": 1}, {"re:.*": {"bits": 8}},
    {"-:.*": {}},
]  # fmt: skip


def awq(folder: Path) -> Folders:
    return Folders(
        folder,
        lambda rng, name, *shape: None if name == "lm_head" else test_awq.module(rng, *shape),
        quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm",
        modules_to_not_convert=["lm_head"],
    )  # fmt: skip


def gptq(folder: Path) -> Folders:
    fields = test_gptq.FIELDS | {"desc_act": True, "lm_head": False, "checkpoint_format": "gptq"}
    return Folders(folder, test_gptq.all_of(group=32, ordered=True), **fields)


def packed(folder: Path) -> Folders:
    described = test_compressed_tensors.description(group_size=32, symmetric=False)
    options: Any = {"group": 32, "symmetric": False}
    return test_compressed_tensors.folders_of(folder, described, **options)


def in_bytes(folder: Path) -> Folders:
    described = test_compressed_tensors.description(
        "int-quantized", num_bits=8, activations=test_compressed_tensors.TOKENS
    )
    return test_compressed_tensors.folders_of(folder, described, bits=8, packed=False)


def nf4(folder: Path) -> Folders:
    return Folders(folder, test_bitsandbytes.in_4_bits(True), **test_bitsandbytes.FOUR)


def change_description(rng: np.random.Generator, fields: dict[str, Any]) -> list[str]:
    """Change a random field at any depth, or remove it; return its name and those above it."""
    names = sorted(fields)
    name = names[rng.integers(len(names))]
    value = fields[name]
    if isinstance(value, dict) and value and rng.random() < 0.8:
        return [name, *change_description(rng, value)]
    if rng.random() < 0.2:
        del fields[name]
    else:
        fields[name] = VALUES[rng.integers(len(VALUES))]
    return [name]


def change_tensor(rng: np.random.Generator, array: Array) -> Array:
    """Return a tensor with another shape, another type or other numbers."""
    match rng.integers(8):
        case 0:
            return array[:-1]
        case 1:
            return array.repeat(int(rng.integers(2, 4)), int(rng.integers(array.ndim)))
        case 2:
            return array.reshape(-1)
        case 3:
            return np.ascontiguousarray(array).view(np.uint8)
        case 4:
            return array.astype(["int64", "int32", "float16", "float64"][rng.integers(4)])
        case 5:
            return rng.permutation(array.reshape(-1)).reshape(array.shape)
        case 6:
            noise = rng.integers(0, 256, array.nbytes, dtype=np.uint8)
            return noise.view(array.dtype).reshape(array.shape)
    return np.zeros((0, *array.shape[1:]), array.dtype)


def mutate(folders: Folders, rounds: int) -> dict[str, int]:
    """Check damaged copies of a checkpoint; return how many were refused and loaded."""
    rng, good = np.random.default_rng(0), folders.tensors
    counts = {"refused": 0, "loaded": 0}
    for _ in range(rounds):
        folders.tensors = dict(good)
        fields = copy.deepcopy(folders.description)
        if rng.random() < 0.5:
            named = change_description(rng, fields)
        else:
            quantized = [n for n in good if ".layers.0." in n and "norm" not in n]
            name = quantized[rng.integers(len(quantized))]
            named = [name]
            if rng.random() < 0.2:
                del folders.tensors[name]
            else:
                with np.errstate(all="ignore"):
                    folders.tensors[name] = change_tensor(rng, good[name])
        described = folders.description
        folders.description = fields
        folders.save()
        folders.description = described
        message = None
        try:
            load(folders.quantized)
        except ModelError as error:
            message = str(error)
        counts["loaded" if message is None else "refused"] += 1
        named += ["model.layers", "lm_head", "regular expression"]
        assert message is None or any(text in message for text in named), message
    folders.tensors = good
    return counts


@pytest.mark.parametrize("make", [awq, gptq, packed, in_bytes, nf4])
def test_mutations(make: Any, tmp_path: Path) -> None:
    counts = mutate(make(tmp_path), ROUNDS)
    assert min(counts.values()) > ROUNDS // 10, counts
