"""bitsandbytes: a model with the numbers of its dequantized weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError
from octavo.quantization.bitsandbytes import read_bitsandbytes
from octavo.system.distributed import Rank
from tests.models.harness import load
from tests.quantization.harness import Folders

EIGHT: dict[str, Any] = {
    "quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False,
    "llm_int8_threshold": 6.0, "llm_int8_skip_modules": ["model.layers.1.mlp"],
}  # fmt: skip


def in_8_bits(rng: np.random.Generator, name: str, rows: int, inputs: int) -> Any:
    if "layers.1.mlp" in name:
        return None
    numbers = rng.integers(-128, 128, (rows, inputs)).astype(np.int8)
    scb = rng.uniform(0.5, 2, rows).astype(np.float32)
    stored = {"weight": numbers, "SCB": scb, "weight_format": np.array(0, np.uint8)}
    return stored, numbers * (scb / 127)[:, None]


def test_8_bits(tmp_path: Path) -> None:
    folders = Folders(tmp_path, in_8_bits, **EIGHT)
    folders.assert_same_weights()
    for reduces in (False, True):
        folders.assert_same_weights(Rank(1, 2, reduces=reduces))
    folders.assert_same_logits()
    folders.assert_typed_errors()
    name = "model.layers.0.mlp.up_proj.weight_format"
    folders.tensors[name] = np.array(1, np.uint8)
    folders.save()
    with pytest.raises(ModelError, match=f"^{name} is 1"):
        load(folders.quantized)
    del folders.tensors[name]
    folders.save()
    load(folders.quantized)


def test_the_lm_head_is_plain_without_a_list(tmp_path: Path) -> None:
    fields = EIGHT | {"llm_int8_skip_modules": None}
    folders = Folders(
        tmp_path,
        lambda rng, name, *shape: (
            None if name == "lm_head" else in_8_bits(rng, name.replace("1.mlp", "0.mlp"), *shape)
        ),
        **fields,
    )
    folders.assert_same_weights()


FOUR: dict[str, Any] = {
    "quant_method": "bitsandbytes", "load_in_8bit": False, "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": "uint8", "bnb_4bit_compute_dtype": "bfloat16",
}  # fmt: skip
LEVELS = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
     -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
     0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
     0.7229568362236023, 1.0], np.float32,
)  # fmt: skip


def in_4_bits(nested: bool) -> Any:
    def quantize(rng: np.random.Generator, name: str, rows: int, inputs: int) -> Any:
        if name == "lm_head":
            return None
        codes = rng.integers(0, 16, (rows * inputs // 2, 2)).astype(np.uint8)
        blocks = rows * inputs // 64
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, inputs]}
        stored = {"weight": codes[:, :1] << 4 | codes[:, 1:], "weight.quant_map": LEVELS}
        if nested:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.2}
            table = np.linspace(-1, 1, 256, dtype=np.float32)
            small = rng.integers(0, 256, blocks).astype(np.uint8)
            scales = rng.uniform(0.02, 0.1, -(-blocks // 256)).astype(np.float32)
            stored |= {"weight.nested_absmax": scales, "weight.nested_quant_map": table}
            stored["weight.absmax"] = small
            absmax = table[small] * scales.repeat(256)[:blocks] + np.float32(0.2)
        else:
            absmax = stored["weight.absmax"] = rng.uniform(0.1, 0.3, blocks).astype(np.float32)
        text = json.dumps(state).encode()
        stored["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(text, np.uint8)
        weight = LEVELS[codes].reshape(rows, inputs) * absmax.repeat(64).reshape(rows, inputs)
        return stored, weight

    return quantize


@pytest.mark.parametrize("nested", [False, True])
def test_nf4(nested: bool, tmp_path: Path) -> None:
    fields = FOUR | {"bnb_4bit_use_double_quant": nested}
    folders = Folders(tmp_path, in_4_bits(nested), **fields)
    # Levels have 16 bits: less than a number of bfloat16 is off by.
    folders.assert_same_weights(atol=1e-5)
    for reduces in (False, True):
        folders.assert_same_weights(Rank(1, 2, reduces=reduces), atol=1e-5)
    folders.assert_same_logits(tmp_path / "cache")
    folders.assert_typed_errors()
    module = "model.layers.0.mlp.down_proj.weight"
    name, good = f"{module}.quant_state.bitsandbytes__nf4", folders.tensors
    for old, new in (
        (b"[128, 256]", b"[256, 128]"),
        (b"[128, 256]", b"[-128, -256]"),
        (b"[128, 256]", b"[256]"),
        (b"64", b"32"),
        (b"nf4", b"fp4"),
        (b"{", b"["),
        (b"}", b"\xff"),
    ):
        state = good[name].tobytes().replace(old, new)
        folders.tensors = good | {name: np.frombuffer(state, np.uint8)}
        folders.save()
        with pytest.raises(ModelError, match=f"^{module}.* (damaged|another shape)"):
            load(folders.quantized)
    folders.tensors = good | {f"{module}.quant_map": LEVELS[::-1]}
    folders.save()
    with pytest.raises(ModelError, match=f"^{module}.quant_map does not have the levels"):
        load(folders.quantized)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"load_in_8bit": False}, "load_in_8bit=False"),
        ({"load_in_8bit": "yes"}, "load_in_8bit='yes'"),
        ({"load_in_4bit": True}, "bnb_4bit_quant_type=None"),
        (FOUR | {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type='fp4'.*nf4"),
        (FOUR | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage='bfloat16'"),
        ({"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules='lm_head'.*a list of names"),
    ],
)
def test_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_bitsandbytes(ConfigJson(EIGHT | fields, "config.json"))
