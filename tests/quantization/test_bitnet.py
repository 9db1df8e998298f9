"""BitNet's checkpoints: exact codes, and the logits of transformers with 8-bit activations."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils.quantization_config import BitNetQuantConfig

from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError
from octavo.quantization.base import TensorError
from octavo.quantization.bitnet import BitNet, read_bitnet
from octavo.system.tensor import from_numpy
from tests.models.cases import CASES
from tests.models.configs.sizes import VOCAB
from tests.models.harness import assert_same_as_hf, generate, load, make_hf, make_prompts

with mock.patch("torch.compile", lambda function: function):  # a compiler would take long
    from transformers.integrations.bitnet import (
        AutoBitLinear,
        BitLinear,
        pack_weights,
        replace_with_bitnet_linear,
    )

KINDS = [("bitlinear", "offline"), ("autobitlinear", "offline"), ("autobitlinear", "online")]


def ternary(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().mean()
    return (weight / scale).round().clamp(-1, 1), scale[None]


def make_bitnet(folder: Path, linear_class: str, mode: str) -> Any:
    """Return transformers' model with quantized layers, after saving its checkpoint."""
    architecture, config = CASES["bitnet"]
    hf_model = make_hf(architecture, **config)
    hf_model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    settings = BitNetQuantConfig(["lm_head"], linear_class, mode)
    replace_with_bitnet_linear(hf_model, ["lm_head"], settings)
    for name, module in list(hf_model.named_modules()):
        if not isinstance(module, AutoBitLinear | BitLinear):
            continue
        codes, scale = ternary(state[f"{name}.weight"])
        if linear_class == "bitlinear":
            stored = {"weight": pack_weights(codes.clone()), "weight_scale": 1 / scale}
            live = stored
        elif mode == "offline":
            stored = {"weight": pack_weights(codes.clone()), "weight_scale": scale}
            live = {"weight": codes, "weight_scale": scale}
        else:
            stored = live = {"weight": state[f"{name}.weight"]}
        for kind, tensor in live.items():
            old = getattr(module, kind)
            new = nn.Parameter(tensor) if isinstance(old, nn.Parameter) else nn.Buffer(tensor)
            setattr(module, kind, new)
        state.update({f"{name}.{kind}": tensor for kind, tensor in stored.items()})
        module.dtype = torch.float32
    save_file(state, folder / "model.safetensors")
    file = folder / "config.json"
    described = {"quant_method": "bitnet", "linear_class": linear_class, "quantization_mode": mode}
    described["modules_to_not_convert"] = ["lm_head"]
    data = json.loads(file.read_text()) | {"quantization_config": described}
    file.write_text(json.dumps(data))
    return hf_model


@pytest.mark.parametrize(("linear_class", "mode"), KINDS)
def test_parity(linear_class: str, mode: str, tmp_path: Path) -> None:
    hf_model = make_bitnet(tmp_path, linear_class, mode)
    prompts = make_prompts(VOCAB, (17, 5))
    assert_same_as_hf(hf_model, prompts, generate(load(tmp_path), prompts, 6))


def test_parts() -> None:
    """Outputs in any order, and inputs of a rank."""
    codes = torch.randint(-1, 2, (8, 6), generator=torch.Generator().manual_seed(0)).float()
    packed = pack_weights(codes.clone()).numpy()
    tensors = [from_numpy(packed), from_numpy(np.array([0.5], np.float32))]
    order = np.array([7, 0, 3])
    (part,) = BitNet("divisor").cut(tensors, [order], (1, 4))
    assert np.array_equal(part[0].numpy().astype(int) - 128, codes[order][:, 1:4].int().numpy())
    assert (part[1].numpy() == np.full((3, 1), 2.0)).all()


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("factor", "weight", np.array([[0b11]], np.uint8), "codes that are not -1, 0 or 1"),
        ("factor", "weight_scale", np.array([np.nan], np.float32), "weight_scale is nan"),
        ("divisor", "weight_scale", np.array([np.inf], np.float32), "weight_scale is inf"),
        ("divisor", "weight_scale", np.array([0], np.float32), r"weight_scale is 0\.0"),
        ("divisor", "weight_scale", np.array([1e-40], np.float32), "weight_scale is 9.999.*e-41"),
        ("floats", "weight", np.array([[np.inf]], np.float32), "not finite"),
    ],
)
def test_impossible_numbers(kind: Any, name: str, value: Any, message: str) -> None:
    good = {"weight": np.zeros((1, 1), np.uint8), "weight_scale": np.ones(1, np.float32)}
    tensors = [from_numpy(array) for array in (good | {name: value}).values()]
    with pytest.raises(TensorError, match=message):
        BitNet(kind).cut(tensors[: BitNet(kind).num_tensors], [slice(None)], None)


@pytest.mark.parametrize(
    ("field", "value"),
    [("use_rms_norm", True), ("linear_class", "other"), ("quantization_mode", "never")],
)
def test_unsupported_fields(field: str, value: object) -> None:
    with pytest.raises(ModelError, match=field):
        read_bitnet(ConfigJson({field: value}, "config.json"))
