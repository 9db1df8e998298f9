from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from training import train
from training.checkpoint import load_model
from training.corpus import Corpus
from training.data import Recipe
from training.heads import EagleHead, MedusaHeads, eagle_loss, medusa_loss
from training.loop import Loop, Plan
from training.lora import add_lora

RECIPE = Recipe(stories=20, requests=6, continuations=2, books=1, chats=20, lengths=(64,))


def make_loop(kind: str, base: Path, corpus: Corpus, folder: Path, steps: int = 4) -> Loop:
    plan = Plan(steps=steps, bfloat16=False)
    loop = train.extra_loop(kind, base, corpus, plan, folder / "out", folder / "run", 0, 256)
    if kind != "lora":
        loop.stream.recipe = RECIPE
        loop.stream.lengths = RECIPE.lengths
    return loop


@pytest.mark.parametrize(
    ("kind", "names", "architecture"),
    [
        ("eagle", {"fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight",
                   "layers.0.post_attention_layernorm.weight"}, "EagleLlamaForCausalLM"),
        ("medusa", {"blocks.0.layers.0.weight", "blocks.2.layers.0.weight", "lm_heads.2.weight"},
         "MedusaModel"),
    ],
)  # fmt: skip
def test_heads_train_and_save(
    kind: str,
    names: set[str],
    architecture: str,
    base_folder: Path,
    corpus: Corpus,
    tmp_path: Path,
) -> None:
    loop = make_loop(kind, base_folder, corpus, tmp_path)
    before = {n: p.clone() for n, p in loop.module.state_dict().items()}
    loop.run()
    out = tmp_path / "out"
    tensors = load_file(out / "model.safetensors")
    assert names <= set(tensors)
    assert "layers.0.input_layernorm.weight" not in tensors
    assert json.loads((out / "config.json").read_text())["architectures"] == [architecture]
    assert (out / "README.md").exists()
    assert set(tensors) == set(before)
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16
        assert not torch.equal(loop.module.state_dict()[name], before[name]), name


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_the_loss_of_a_head_falls(
    kind: str, base_folder: Path, corpus: Corpus, tmp_path: Path
) -> None:
    loop = make_loop(kind, base_folder, corpus, tmp_path, steps=30)
    with torch.no_grad():  # sharper than an untrained model, so that there is something to learn
        model = load_model(base_folder)
        model.model.embed_tokens.weight.mul_(8)
    make = eagle_loss if kind == "eagle" else medusa_loss
    loop.loss = make(loop.module, model)
    losses = [loop.train_step() for _ in range(25)]
    assert sum(losses[-5:]) < sum(losses[:5])


def test_eagle_is_causal_and_medusa_starts_as_the_lm_head(base_folder: Path) -> None:
    base = load_model(base_folder)
    torch.manual_seed(0)
    head, heads = EagleHead(base.config), MedusaHeads(base)
    size = base.config.hidden_size
    embedding, hidden = torch.randn(1, 9, size), torch.randn(1, 9, size)
    with torch.no_grad():
        whole = head(embedding, hidden)
        part = head(embedding[:, :5], hidden[:, :5])
        torch.testing.assert_close(whole[:, :5], part, atol=1e-5, rtol=1e-5)
        for logits in heads(hidden):
            torch.testing.assert_close(logits, base.logits(hidden))


def test_lora_trains_only_the_adapter_and_saves_it(
    base_folder: Path, corpus: Corpus, tmp_path: Path
) -> None:
    loop = make_loop("lora", base_folder, corpus, tmp_path)
    loop.run()
    out = tmp_path / "out"
    tensors = load_file(out / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * 2  # A and B, seven projections, two layers
    prefix = "base_model.model.model.layers.1.mlp.down_proj"
    config = json.loads((out / "adapter_config.json").read_text())
    assert tensors[f"{prefix}.lora_A.weight"].shape == (config["r"], 64)
    assert tensors[f"{prefix}.lora_B.weight"].shape == (32, config["r"])
    assert config["peft_type"] == "LORA"
    trained = load_model(base_folder).state_dict()
    for name, weight in loop.module.state_dict().items():
        if "lora_" not in name:
            assert torch.equal(weight, trained[name.replace(".base.", ".")]), name


def test_new_adapter_changes_nothing_until_trained(base_folder: Path) -> None:
    model = load_model(base_folder)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        before = model(tokens)
        assert torch.equal(add_lora(model)(tokens), before)
