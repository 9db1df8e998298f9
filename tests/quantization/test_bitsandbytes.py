"""bitsandbytes: a model with the numbers of its dequantized weights."""

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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"load_in_8bit": False}, "load_in_8bit=False"),
        ({"load_in_8bit": "yes"}, "load_in_8bit='yes'"),
        ({"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules='lm_head'.*a list of names"),
    ],
)
def test_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_bitsandbytes(ConfigJson(EIGHT | fields, "config.json"))
