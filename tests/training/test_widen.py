from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from octavo import LLM, SamplingParams
from training.checkpoint import copy_tokenizer, load_model, read_config, write_tensors
from training.heads import EagleHead, MedusaHeads, export_head
from training.model import Llama, ModelConfig
from training.widen import SHAPES, wide_config, widen, write_wide

# As TINY in conftest.py, but larger; the heads are in groups of 3 of 2 key-values.
SHAPE = ModelConfig(
    vocab_size=501,
    hidden_size=56,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
)


@pytest.fixture(scope="module")
def sharp_folder(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny model with weights that are large enough for definite answers."""
    folder = tmp_path_factory.mktemp("sharp")
    copy_tokenizer(base_folder, folder)
    (folder / "config.json").write_text((base_folder / "config.json").read_text())
    weights = load_file(base_folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: weight.float() * 8
        if weight.ndim == 2
        else 1 + 0.1 * torch.randn(weight.shape, generator=generator)
        for name, weight in weights.items()
    }
    write_tensors(folder / "model.safetensors", weights, torch.float32)
    return folder


@pytest.fixture(scope="module")
def wide_folder(sharp_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    write_wide(sharp_folder, SHAPE, folder, torch.float32)
    return folder


def test_logits_are_the_small_models(sharp_folder: Path, wide_folder: Path) -> None:
    small, wide = load_model(sharp_folder), load_model(wide_folder)
    expected = replace(SHAPE, head_dim=16, max_position_embeddings=256, tie_word_embeddings=False)
    assert replace(wide.config, rms_norm_eps=SHAPE.rms_norm_eps) == expected
    tokens = torch.randint(0, 400, (4, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = wide(tokens), small(tokens)
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours[..., :400], theirs, atol=1e-4, rtol=1e-5)
    assert (ours[..., 400:] < theirs.min() - 100).all()


def test_further_layers_are_dense_but_for_their_outputs(wide_folder: Path) -> None:
    layers = load_model(wide_folder).model.layers
    assert layers[1].mlp.down_proj.weight.any()
    assert not layers[2].mlp.down_proj.weight.any()
    assert not layers[2].self_attn.o_proj.weight.any()
    assert layers[2].self_attn.q_proj.weight.any()


def test_answers_are_the_small_models(sharp_folder: Path, wide_folder: Path) -> None:
    prompts = [{"prompt_token_ids": [i + 3, i + 50, 7 * i + 9]} for i in range(6)]
    params = [
        SamplingParams(temperature=t, seed=1, max_tokens=30, ignore_eos=True, top_p=1.0, top_k=0)
        for t in (0.0, 0.0, 0.0, 1.0, 1.0, 1.0)
    ]
    answers = []
    for folder in (sharp_folder, wide_folder):
        with LLM(str(folder), dtype="float32") as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([list(o.outputs[0].token_ids) for o in outputs])
    assert answers[0] == answers[1]
    assert len({tuple(answer) for answer in answers[0]}) == 6


def test_group_of_heads_is_split_where_the_large_ones_are_small(sharp_folder: Path) -> None:
    small = load_model(sharp_folder)
    config, weights = widen(small, replace(SHAPE, num_attention_heads=2))
    wide = Llama(config)
    wide.load_state_dict(weights)
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        ours = wide(tokens)[..., :400]
        torch.testing.assert_close(ours, small(tokens), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 32}, "hidden_size=32 is not more"),
        ({"num_hidden_layers": 1}, "num_hidden_layers=1 is less"),
        ({"vocab_size": 300}, "vocab_size=300 is less"),
        ({"num_key_value_heads": 1, "num_attention_heads": 6}, "too few key-value heads"),
    ],
)
def test_what_does_not_fit(tiny: ModelConfig, change: dict[str, int], message: str) -> None:
    small = replace(tiny, num_key_value_heads=2)
    with pytest.raises(ValueError, match=message):
        wide_config(small, replace(SHAPE, **change))


@pytest.mark.parametrize("name", SHAPES)
def test_the_built_in_model_fits_the_shapes_and_their_heads(name: str) -> None:
    assert wide_config(ModelConfig(), SHAPES[name]).head_dim == SHAPES[name].head_dim


def test_heads_guess_what_the_small_ones_do(sharp_folder: Path, tmp_path: Path) -> None:
    base, shape = load_model(sharp_folder), replace(SHAPE, vocab_size=400)
    torch.manual_seed(0)
    eagle, medusa = EagleHead(base.config), MedusaHeads(base, 2)
    for weight in (*eagle.parameters(), *medusa.parameters()):
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.1)
    for name, head in (("eagle", eagle), ("medusa", medusa)):
        export_head(head, tmp_path / name)
        write_wide(tmp_path / name, shape, tmp_path / f"wide-{name}", torch.float32)
    write_wide(sharp_folder, shape, tmp_path / "wide", torch.float32)
    wide = load_model(tmp_path / "wide")
    wide_eagle = EagleHead(read_config(tmp_path / "wide-eagle"))
    wide_medusa = MedusaHeads(wide, 2)
    for name, head in (("eagle", wide_eagle), ("medusa", wide_medusa)):
        head.load_state_dict(load_file(tmp_path / f"wide-{name}" / "model.safetensors"))
        small = load_file(tmp_path / name / "model.safetensors")  # in bfloat16
        {"eagle": eagle, "medusa": medusa}[name].load_state_dict(small)
    tokens = torch.randint(0, 400, (2, 20), generator=torch.Generator().manual_seed(1))
    found = []
    with torch.no_grad():
        for model, eagle_head, medusa_heads in (
            (base, eagle, medusa),
            (wide, wide_eagle, wide_medusa),
        ):
            hidden, embedding = model.hidden(tokens), model.model.embed_tokens(tokens)
            guesses = eagle_head.draft(embedding, hidden, 3)
            logits = [model.logits(guess) for guess in guesses]
            found.append(torch.cat([x.flatten() for x in (*logits, *medusa_heads(hidden))]))
    assert found[0].std() > 0.3
    torch.testing.assert_close(found[1], found[0], atol=1e-3, rtol=1e-4)


def test_heads_must_have_the_vocabulary(sharp_folder: Path, tmp_path: Path) -> None:
    export_head(EagleHead(load_model(sharp_folder).config), tmp_path / "eagle")
    with pytest.raises(ValueError, match="keep-vocabulary"):
        write_wide(tmp_path / "eagle", SHAPE, tmp_path / "wide", torch.float32)
