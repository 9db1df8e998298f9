"""Models in Mistral's own form, against the same models in Hugging Face's form."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.whisper.modeling_whisper import sinusoids

from octavo.checkpoints.base import LoadFormat, Source
from octavo.checkpoints.mapped_file import MappedTensors
from octavo.checkpoints.mistral.folder import MistralFolder, _sinusoids
from octavo.checkpoints.registry import open_checkpoint
from octavo.checkpoints.safetensors_header import read_header
from octavo.errors import ModelError
from octavo.models.registry import read_spec
from octavo.system.tensor import HostTensor
from tests.mistral_files import VOCAB, save_both, to_mistral
from tests.models.harness import make_hf

TEXT = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "rms_norm_eps": 1e-5}
TEXT |= {"max_position_embeddings": 512, "rope_theta": 1e6, "sliding_window": None}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"original_max_position_embeddings": 128, "attention_factor": 1.0}
TOWER = {"model_type": "pixtral", "hidden_size": 24, "intermediate_size": 40, "head_dim": 8}
TOWER |= {"num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 40, "patch_size": 4}
TOWER |= {"hidden_act": "silu"}
MISTRAL = TEXT | {"model_type": "mistral"}
PIXTRAL = {"vision_config": TOWER, "text_config": MISTRAL, "image_token_index": 10}
PIXTRAL |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
SOUND = {"model_type": "voxtral_encoder", "hidden_size": 24, "num_hidden_layers": 2}
SOUND |= {"num_attention_heads": 3, "intermediate_size": 96, "num_mel_bins": 8, "head_dim": 8}
SOUND |= {"max_source_positions": 300}
CASES = {
    "mistral": ("MistralForCausalLM", TEXT | {"sliding_window": 9}),
    "tied": ("MistralForCausalLM", TEXT | {"tie_word_embeddings": True}),
    "mixtral": (
        "MixtralForCausalLM",
        TEXT | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        TEXT | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},
    ),
    "pixtral": ("LlavaForConditionalGeneration", PIXTRAL),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        PIXTRAL
        | {"spatial_merge_size": 2, "multimodal_projector_bias": False}
        | {"tie_word_embeddings": False},
    ),
    "voxtral": (
        "VoxtralForConditionalGeneration",
        {"audio_config": SOUND, "text_config": TEXT | {"model_type": "llama"}}
        | {"audio_token_id": 24},
    ),
}


def assert_same(hf: Path, own: Path, load_format: LoadFormat = "auto") -> None:
    """Check that a folder in each form is the same model, with the same bits."""
    one, two = open_checkpoint(hf), open_checkpoint(own, load_format)
    assert isinstance(two, MistralFolder)
    spec, other = read_spec(one), read_spec(two)
    assert replace(other, generation_config=spec.generation_config) == spec
    left, right = one.open(spec.expected), two.open(other.expected)
    for source in spec.expected.sources:
        expected, found = left.read(source), right.read(source)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(bits(found), bits(expected), source.name)
        right.done(found)


def bits(tensor: HostTensor) -> np.ndarray:
    return tensor.view(f"uint{8 * tensor.itemsize}").numpy() if tensor.numel() else np.zeros(0)


@pytest.mark.parametrize("name", CASES)
def test_both_forms_are_one_model(name, tmp_path):
    architecture, config = CASES[name]
    model = make_hf(architecture, **config)
    if name == "voxtral":  # Mistral's form leaves these numbers out
        table = model.model.audio_tower.embed_positions.weight
        np.testing.assert_allclose(_sinusoids(*table.shape), sinusoids(*table.shape), atol=2e-5)
        table.data.copy_(torch.from_numpy(_sinusoids(*table.shape)))
    assert_same(*save_both(model, tmp_path))


def test_fp8_and_several_files(tmp_path):
    """Quantized weights in two files, without and with an index, in a folder with both forms."""
    hf, _ = save_both(make_hf("MistralForCausalLM", **MISTRAL), tmp_path)
    tensors = load_file(hf / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if "_proj.weight" in name:
            scale = tensor.abs().max() / 448
            tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
            tensors[name.replace("weight", "weight_scale")] = scale
            tensors[name.replace("weight", "input_scale")] = torch.tensor(0.5)
    save_file(tensors, hf / "model.safetensors")
    config = json.loads((hf / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    (hf / "config.json").write_text(json.dumps(config))
    quantization = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    own = to_mistral(hf, tmp_path / "mistral", quantization=quantization)
    assert_same(hf, own)
    written = load_file(own / "consolidated.safetensors")
    (own / "consolidated.safetensors").unlink()
    written["layers.0.attention.kv_fake_quantizer.qscale_act"] = torch.tensor(1.0)
    weight_map = {}
    for i in range(2):
        file = f"consolidated-0000{i + 1}-of-00002.safetensors"
        names = [name for name in written if name.startswith("layers.0.") == bool(i)]
        save_file({name: written[name] for name in names}, own / file)
        weight_map |= dict.fromkeys(names, file)
    assert_same(hf, own)
    index = own / "consolidated.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_same(hf, own)
    (own / "config.json").write_text("{}")  # a model in both forms
    assert_same(hf, own, "mistral")
    with pytest.raises(ModelError, match="architectures"):
        read_spec(open_checkpoint(own))


def test_a_copy_keeps_its_memory(tmp_path):
    """Only pages of the file are released, and none of the memory beside a copy."""
    rows = torch.arange(2**16, dtype=torch.float32).view(1024, 64)
    save_file({"a": rows}, tmp_path / "a")
    stored = replace(read_header(tmp_path / "a")["a"], paired_heads=2)
    tensors = MappedTensors({"a": stored}, {"a": "a"})
    found = tensors.read(Source("a", (1024, 64)))
    tensors.done(found)
    expected = rows.view(2, 256, 2, 64).transpose(1, 2).reshape(1024, 64)
    np.testing.assert_array_equal(found.numpy(), expected)


def refuse(message: str, own: Path) -> None:
    checkpoint = open_checkpoint(own)
    with pytest.raises(ModelError, match=message):
        checkpoint.open(read_spec(checkpoint).expected)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the folder of a model of pictures, and the content of its params.json."""
    model = make_hf(*CASES["mistral3"][:1], **CASES["mistral3"][1])
    _, own = save_both(model, tmp_path_factory.mktemp("files"))
    return own, json.loads((own / "params.json").read_text())


VISION = "vision_encoder."


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("q_lora_rank", 8, "q_lora_rank=8 is not supported; Octavo does not know this field"),
        ("use_biases", True, "use_biases=True is not supported; only False is"),
        ("activation", "gelu", "activation='gelu'"),
        ("dim", None, "the field dim is missing"),
        ("dim", "x", r"params\.json: dim='x'"),
        ("n_layers", 2**31 - 1, "n_layers=2147483647 .* <= 4096"),
        ("sliding_window", [[1]], r"sliding_window=\[1\]"),
        ("sliding_window", [0], "sliding_window=0"),
        ("n_layers", 1, r"with this params\.json does not have: model\.layers\.1"),
        ("n_layers", 3, r"lacks 9 tensors .* or params\.json belongs"),
        ("hidden_dim", 9, r"but params\.json requires \[9, 32\]"),
        ("n_heads", 5, "is missing|divide"),
        ("norm_eps", 1e-6, "norm_eps=1e-06 is not supported; only 1e-05"),
        ("sliding_window", [3, 4], "a list must divide the layers, and have one window"),
        ("yarn", {"factor": 2, "gamma": 1}, "yarn: gamma=1"),
        ("llama_4_scaling", {"beta": 1}, "original_max_position_embeddings is missing"),
        ("moe", {"num_experts": 4, "num_shared_experts": 1}, "moe: num_shared_experts=1"),
        ("quantization", {"qformat_weight": "fp4"}, "qformat_weight='fp4'"),
        ("quantization", {"quant_method": "x"}, "quantization: quant_method='x'"),
        ("multimodal", {"other": 1}, "multimodal: other=1"),
        (VISION + "mm_projector_id", "mlp", "mm_projector_id='mlp'"),
        (VISION + "add_pre_mm_projector_layer_norm", False, "it must be true with patch_merge"),
        (VISION + "adapter_kind", 1, "vision_encoder: adapter_kind=1"),
        (VISION + "patch_size", None, "patch_size is missing"),
    ],
)
def test_what_is_not_known_is_refused_by_name(files, tmp_path, field, value, message):
    own, params = files
    params = json.loads(json.dumps(params))
    *section, name = field.split(".")
    (params[section[0]] if section else params)[name] = value
    (tmp_path / "params.json").write_text(json.dumps(params))
    (tmp_path / "consolidated.safetensors").symlink_to(own / "consolidated.safetensors")
    refuse(message, tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_source_positions": 2**31 - 4}, "max_source_positions=2147483644"),
        ({"dim": 2, "head_dim": 2, "n_heads": 1, "hidden_dim": 8}, "dim=2 .* even number >= 4"),
        ({"dim": 2**19, "n_heads": 2**16, "hidden_dim": 2**21}, r"but params\.json requires"),
    ],
)
def test_sizes_of_sounds(tmp_path, fields, message):
    """No memory is taken before the sizes are compared with the weights."""
    _, own = save_both(make_hf(*CASES["voxtral"][:1], **CASES["voxtral"][1]), tmp_path)
    params = json.loads((own / "params.json").read_text())
    params["multimodal"]["whisper_model_args"]["encoder_args"] |= fields
    (own / "params.json").write_text(json.dumps(params))
    refuse(message, own)


def test_damaged_weights(files, tmp_path):
    own, params = files
    (tmp_path / "params.json").write_text(json.dumps(params))
    (tmp_path / "other").mkdir()
    with pytest.raises(ModelError, match=r"params\.json is missing: load_format=mistral reads"):
        read_spec(open_checkpoint(tmp_path / "other", "mistral"))
    refuse(r"holds no consolidated\*\.safetensors", tmp_path)
    tensors = load_file(own / "consolidated.safetensors")
    file = tmp_path / "consolidated.safetensors"
    key = "layers.0.attention.wk.weight"
    for change, message in (
        ({key: torch.zeros(6, 32)}, rf"{key} has shape \[6, 32\], which 2 heads do not divide"),
        ({key: torch.zeros(28, 32)}, r"has shape \[28, 32\], but"),
        ({"layers.0.other.weight": torch.zeros(1)}, r"does not have: layers\.0\.other\.weight"),
        ({"model.norm.weight": torch.zeros(1)}, "two tensors for model.norm.weight"),
    ):
        save_file(tensors | change, file)
        refuse(message, tmp_path)
    save_file(tensors, file)
    save_file({key: tensors[key]}, tmp_path / "consolidated-2.safetensors")
    refuse("tensors that an earlier file has, too", tmp_path)
