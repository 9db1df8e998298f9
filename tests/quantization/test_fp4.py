"""FP4: exact codes and scales, in the layouts of compressed-tensors and of Model Optimizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.checkpoints.config_json import ConfigJson
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import ModelConfig
from octavo.errors import ModelError
from octavo.kernels.native import NativeOps
from octavo.models.loader import load_model
from octavo.models.registry import read_spec
from octavo.quantization.base import TensorError
from octavo.quantization.fp4 import FP4
from octavo.quantization.modelopt import read_modelopt
from octavo.system.distributed import Rank
from octavo.system.tensor import from_numpy
from tests.models.harness import Runner, load, make_hf, make_prompts
from tests.quantization.harness import E4M3, Array, Folders
from tests.quantization.test_compressed_tensors import description

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def module(
    rng: np.random.Generator, rows: int, inputs: int, kind: str
) -> tuple[dict[str, Array], Array]:
    """Return the tensors of a module, and its weight [outputs, inputs]."""
    codes = rng.integers(0, 16, (rows, inputs)).astype(np.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    if kind == "mxfp4":
        exponents = rng.integers(119, 123, (rows, inputs // 32)).astype(np.uint8)
        scales = 2.0 ** (exponents.astype(np.float32) - 127)
        stored: dict[str, Array] = {"weight_packed": packed, "weight_scale": exponents}
        return stored, E2M1[codes] * scales.repeat(32, 1)
    small = rng.uniform(0.001, 448, (rows, inputs // 16)).astype(E4M3)
    factor = np.float32(2**-13 * 1.3)
    if kind == "modelopt":
        stored = {"weight": packed, "weight_scale": small, "weight_scale_2": np.asarray(factor)}
        stored["input_scale"] = np.asarray(0.5, np.float32)
    else:
        stored = {"weight_packed": packed, "weight_scale": small}
        stored["weight_global_scale"] = np.asarray([1 / factor], np.float32)
    return stored, E2M1[codes] * (small.astype(np.float32) * factor).repeat(16, 1)


def quantize(kind: str) -> Any:
    def one(rng: np.random.Generator, name: str, rows: int, inputs: int) -> Any:
        if name == "lm_head" or "layers.1.mlp.down" in name:
            return None
        return module(rng, rows, inputs, kind)

    return one


def describe(kind: str) -> dict[str, Any]:
    if kind == "modelopt":
        plain = ["lm_head", "model.layers.1.mlp.d*"]
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": plain}
    group, strategy = (32, "group") if kind == "mxfp4" else (16, "tensor_group")
    return description(f"{kind}-pack-quantized", type="float", group_size=group, strategy=strategy)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "modelopt"])
def test_a_model(kind: str, tmp_path: Path) -> None:
    folders = Folders(tmp_path, quantize(kind), **describe(kind))
    folders.assert_same_weights()
    for reduces in (False, True):
        folders.assert_same_weights(Rank(1, 2, reduces=reduces))
    folders.assert_same_logits(tmp_path / "cache")
    if kind == "nvfp4":
        folders.assert_typed_errors()


def tensors_of(form: FP4, stored: dict[str, Array]) -> list[Any]:
    names = [source.name.removeprefix("m.") for source in form.sources("m", 8, 64)]
    return [
        from_numpy(stored[name].view(np.uint8) if name == "weight_scale" else stored[name])
        for name in names
        if name in stored
    ]


def test_divided_blocks() -> None:
    stored, _ = module(np.random.default_rng(0), 8, 64, "modelopt")
    form = FP4("nvfp4", codes="weight", factor="weight_scale_2")
    with pytest.raises(
        TensorError, match=r"weight has blocks .* divide; lower tensor_parallel_size"
    ):
        form.cut(tensors_of(form, stored), [slice(None)], (16, 64))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weight_scale", np.nan, "weight_scale has numbers that are NaN"),
        ("weight_scale_2", np.nan, "weight_scale_2 is nan"),
        ("weight_scale_2", np.inf, "weight_scale_2 is inf"),
        ("weight_scale_2", 0, "weight_scale_2 is 0.0"),
    ],
)
def test_impossible_numbers(name: str, value: float, message: str) -> None:
    form = FP4("nvfp4", codes="weight", factor="weight_scale_2", divides=value == 0)
    stored, _ = module(np.random.default_rng(0), 8, 64, "modelopt")
    stored[name] = np.array(stored[name])
    stored[name].flat[-1] = value
    with pytest.raises(TensorError, match=message):
        form.cut(tensors_of(form, stored), [slice(None)], None)


def test_rejected() -> None:
    with pytest.raises(ModelError, match=r"m\.weight_packed has 48 inputs"):
        FP4("mxfp4").sources("m", 8, 48)
    for fields, message in (
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ'"),
        ({"quant_algo": "FP8", "exclude_modules": "lm_head"}, "a list of names"),
    ):
        with pytest.raises(ModelError, match=message):
            read_modelopt(ConfigJson(fields, "config.json"))


GPT_OSS: dict[str, Any] = {
    "vocab_size": 203,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
}
GPT_OSS |= {"num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2}
GPT_OSS |= {"sliding_window": 16, "hidden_size": 64, "intermediate_size": 96, "pad_token_id": 0}
GPT_OSS |= {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 128}
GPT_OSS["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    """Blocks of all experts in one tensor; with their numbers the logits are transformers'."""
    hf_model = make_hf("GptOssForCausalLM", **GPT_OSS)
    hf_model.save_pretrained(tmp_path)
    state, numbers = load_file(tmp_path / "model.safetensors"), np.random.default_rng(0)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    levels = np.concatenate([levels, -levels])
    for name, parameter in hf_model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = state.pop(name).shape
            shape = experts, outputs, inputs // 32
            codes = numbers.integers(0, 16, (*shape, 32), np.uint8)
            scales = numbers.integers(120, 124, shape, np.uint8)
            state[f"{name}_blocks"] = torch.tensor(codes[..., ::2] | codes[..., 1::2] << 4)
            state[f"{name}_scales"] = torch.tensor(scales)
            exact = levels[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
            parameter.data = torch.tensor(exact.reshape(experts, outputs, inputs).swapaxes(1, 2))
    save_file(state, tmp_path / "model.safetensors")
    file = tmp_path / "config.json"
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    prompts = make_prompts(203, (30, 5))
    steps = dict(enumerate(prompts))
    checkpoint = open_checkpoint(tmp_path)
    spec = read_spec(checkpoint, ModelConfig(dequantize=True))
    exact_model = load_model(spec, checkpoint, dtype="float32", ops=NativeOps())
    expected = Runner(exact_model, 2, 64).step(steps)
    with torch.inference_mode():
        for index, prompt in enumerate(prompts):
            found = hf_model(torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(expected[index], found, atol=1e-4, rtol=1e-4)
    quantized = load(tmp_path)
    forms = {weight.form.name for weight in quantized.spec.weights() if weight.kind == "linear"}
    assert forms == {"plain", "mxfp4-None"}
    logits = Runner(quantized, 2, 64).step(steps)
    # Activations of 8 bits change the choice of experts for few tokens.
    near = (torch.cat(list(logits.values())) - torch.cat(list(expected.values()))).abs().amax(1)
    assert near.median() < 0.2
    state["model.layers.0.mlp.experts.down_proj_scales"][1, 2, 0] = 255
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"down_proj_blocks\[1\]: weight_scale has numbers"):
        load(tmp_path)
