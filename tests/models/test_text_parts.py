"""Text parts of models with towers: greedy tokens and logprobs equal to those of transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import ModelError
from octavo.kernels.native import NativeOps
from octavo.models.loader import load_model
from tests.models.cases import CASES, ENLARGING
from tests.models.configs.experts import LLAMA4
from tests.models.configs.latent import LATENT
from tests.models.configs.sizes import SIZES, VOCAB
from tests.models.configs.with_towers import MUSE_TOWER, SIGLIP, WRAPPERS, with_tower
from tests.models.harness import (
    assert_same_as_hf,
    generate,
    load,
    make_hf,
    make_prompts,
    save_and_load,
    spec_of,
)


@pytest.mark.parametrize("name", WRAPPERS)
def test_text_part_of_another_family(name: str, tmp_path: Path) -> None:
    factor = 0.6 if name in ENLARGING else 1.0
    hf_model = make_hf(f"{name}ForConditionalGeneration", factor=factor, **WRAPPERS[name])
    model = save_and_load(hf_model, tmp_path)
    assert model.spec.left_out == "pictures and sound"
    prompts = make_prompts(VOCAB, (20, 3))
    assert_same_as_hf(hf_model, prompts, generate(model, prompts, 5))


@pytest.mark.parametrize("kind", ["gemma", "gemma2"])
def test_paligemma(kind: str, tmp_path: Path) -> None:
    """Without types of tokens, transformers computes causal attention, too."""
    text = CASES[kind][1] | {"model_type": kind, "tie_word_embeddings": True}
    config = with_tower(text, SIGLIP, projection_dim=48, hidden_size=48)
    hf_model = make_hf("PaliGemmaForConditionalGeneration", **config)
    model = save_and_load(hf_model, tmp_path)
    assert "later tokens" in model.spec.left_out
    prompts = make_prompts(VOCAB, (20, 3))
    assert_same_as_hf(hf_model, prompts, generate(model, prompts, 5))


@pytest.mark.parametrize("tied", [False, True])
def test_internvl_chat(tied: bool, tmp_path: Path) -> None:
    """Its code is no part of transformers: a text model in its form."""
    hf_model = make_hf("Qwen2ForCausalLM", **SIZES, tie_word_embeddings=tied)
    hf_model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state = {f"language_model.{name}": tensor for name, tensor in state.items()}
    state |= {f"{name}.weight": torch.ones(2) for name in ("vision_model.encoder.x", "mlp1.0")}
    save_file(state, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["InternVLChatModel"], "llm_config": text, "dtype": "float32"}
    outer |= {"model_type": "internvl_chat", "auto_map": {"AutoModel": "x.Y"}}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"tie_word_embeddings": False}))
    with pytest.raises(ModelError, match="trust_remote_code"):
        spec_of(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    spec = spec_of(tmp_path, trust_remote_code=True)
    assert spec.left_out == "pictures and sound"
    model = load_model(spec, checkpoint, dtype="float32", ops=NativeOps())
    prompts = make_prompts(VOCAB, (20, 3))
    assert_same_as_hf(hf_model, prompts, generate(model, prompts, 5))
    text["model_type"] = "qwen2_moe"
    (tmp_path / "config.json").write_text(json.dumps(outer | {"llm_config": text}))
    with pytest.raises(ModelError, match=r"llm_config: model_type='qwen2_moe'.*supported: llama"):
        spec_of(tmp_path, trust_remote_code=True)


def test_llama4_with_a_tower(tmp_path: Path) -> None:
    """The whole model of transformers fails without pictures: its text model is compared."""
    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower |= {"intermediate_size": 64, "vision_output_dim": 16, "projector_input_dim": 16}
    tower |= {"projector_output_dim": 16, "image_size": 28, "patch_size": 14}
    hf_model = make_hf("Llama4ForConditionalGeneration", **with_tower(LLAMA4, tower))
    model = save_and_load(hf_model, tmp_path)
    assert model.spec.left_out == "pictures and sound"
    prompts = make_prompts(VOCAB, (20, 3))
    assert_same_as_hf(hf_model.language_model, prompts, generate(model, prompts, 5))


def test_kimi_k25(tmp_path: Path) -> None:
    """transformers renames its layers when it saves a model; published ones keep their names."""
    text = LATENT | {"first_k_dense_replace": 1, "n_routed_experts": 6, "num_experts_per_tok": 2}
    text |= {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 20}
    config = with_tower(text, MUSE_TOWER, projection_hidden_size=16, tie_word_embeddings=False)
    hf_model = make_hf("Kimi_K25ForConditionalGeneration", **config)
    hf_model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state = {name.replace("model.blocks", "model.layers"): state[name] for name in state}
    save_file(state, tmp_path / "model.safetensors")
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["architectures"] = ["KimiK25ForConditionalGeneration"]
    fields["text_config"]["model_type"] = "kimi_k2"
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = load(tmp_path)
    assert model.spec.left_out == "pictures and sound"
    prompts = make_prompts(VOCAB, (20, 3))
    assert_same_as_hf(hf_model, prompts, generate(model, prompts, 5))


def test_gemma3n_with_towers(tmp_path: Path) -> None:
    """transformers makes its tower of pictures with another package: the text model in its form."""
    architecture, config = CASES["gemma3n"]
    hf_model = make_hf(architecture, **config)
    hf_model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state = {f"model.language_{name}": tensor for name, tensor in state.items()}
    state |= {f"model.{name}.weight": torch.ones(2) for name in ("vision_tower.x", "embed_audio.y")}
    save_file(state, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"dtype": "float32"}))
    model = load(tmp_path)
    assert model.spec.left_out == "pictures and sound"
    prompts = make_prompts(VOCAB, (9, 30))
    assert_same_as_hf(hf_model, prompts, generate(model, prompts, 8))
