"""`octavo quality`: against the engine's own logprobs, transformers, and plain formulas."""

import json
import math
import random
import shutil
import sys

import numpy as np
import pytest
import safetensors.numpy
import torch

from octavo import LLM, SamplingParams, cli
from octavo.errors import ConfigError, ModelError
from octavo.model_tools.chunk_runner import ChunkRunner
from octavo.model_tools.opened import OpenedModel
from octavo.model_tools.quality import STORIES, measure
from octavo.models.hub import local_folder
from octavo.text.tokenizer import Tokenizer
from tests.models.harness import make_hf
from training.own_stories import own_story

FOLDER = local_folder("octavo/stories")
MODEL = {"model": "octavo/stories"}
SMALL = {"chunk": 64, "tokens": 300}


def test_the_built_in_text_is_what_the_grammar_writes():
    rng = random.Random(0)
    assert STORIES.read_text() == "\n\n".join(own_story(rng)[0] for _ in range(64)) + "\n"


def test_perplexity_is_that_of_the_engines_logprobs():
    found = measure(MODEL, **SMALL)
    with LLM("octavo/stories", max_model_len=128) as llm:
        tokenizer = llm.get_tokenizer()
        first = tokenizer.encode("")[:1]
        ids = tokenizer.encode(STORIES.read_text(), add_special_tokens=False)[:300]
        step = 64 - len(first)
        rows = [first + ids[at : at + step] for at in range(0, 300, step)]
        prompts = [{"prompt_token_ids": row} for row in rows]
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    losses = [
        -entries[token].logprob
        for row, output in zip(rows, outputs, strict=True)
        for token, entries in zip(row[1:], output.prompt_logprobs[1:], strict=True)
    ]
    assert found["num_tokens"] == len(losses) == sum(len(row) - 1 for row in rows)
    assert found["num_chunks"] == len(rows)
    assert found["perplexity"]["value"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-6)
    assert found["perplexity"]["low"] < found["perplexity"]["value"] < found["perplexity"]["high"]
    assert measure(MODEL, **SMALL) == found  # deterministic


def test_a_model_is_at_no_distance_from_itself():
    found = measure(MODEL, base="octavo/stories", **SMALL)
    assert found["ratio"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert found["kl_divergence"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert found["same_top_token"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert {row["error"] for row in found["layers"]} == {0.0}


def test_the_distance_from_a_base():
    found = measure(MODEL | {"quantization": "int4"}, base="octavo/stories", **SMALL)
    step = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    runners = [
        ChunkRunner(OpenedModel.of(MODEL | step | more)) for more in ({"quantization": "int4"}, {})
    ]
    tokenizer = Tokenizer.from_folder(FOLDER)
    first = tokenizer.encode("")[:1]
    ids = tokenizer.encode(STORIES.read_text(), add_special_tokens=False)[:300]
    size = 64 - len(first)
    kls, sames, ratios = [], [], []
    for at in range(0, 300, size):
        chunk = first + ids[at : at + size]
        log_q, log_p = (
            torch.log_softmax(
                torch.cat(
                    [torch.tensor(part.copy()) for part in r.logits(r.hidden_states(chunk))]
                ).double(),
                -1,
            )[:-1]
            for r in runners
        )
        kls += (log_p.exp() * (log_p - log_q)).sum(-1).tolist()
        sames += (log_p.argmax(-1) == log_q.argmax(-1)).tolist()
        rows = torch.arange(len(chunk) - 1), torch.tensor(chunk[1:])
        ratios += (log_p[rows] - log_q[rows]).tolist()
    assert found["kl_divergence"]["value"] == pytest.approx(np.mean(kls), rel=1e-4)
    assert found["same_top_token"]["value"] == np.mean(sames) < 1
    assert found["ratio"]["value"] == pytest.approx(math.exp(np.mean(ratios)), rel=1e-6)
    # Pairing leaves out what makes chunks easy or hard for both models.
    paired, alone = found["ratio"], found["perplexity"]
    assert paired["high"] - paired["low"] < (alone["high"] - alone["low"]) / 3
    assert sum(row["share"] for row in found["layers"]) == pytest.approx(1)


def test_the_error_of_a_layer_is_its_own(tmp_path):
    """Only layer 3 has other weights: only its own error is not 0, and later streams differ."""
    folder = tmp_path / "changed"
    shutil.copytree(FOLDER, folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors["model.layers.3.mlp.down_proj.weight"] = (
        tensors["model.layers.3.mlp.down_proj.weight"].astype(np.float32) * 1.5
    ).astype(tensors["model.norm.weight"].dtype)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    rows = measure({"model": str(folder)}, base="octavo/stories", **SMALL)["layers"]
    assert [row["name"] for row in rows] == ["embedding", *(f"layer {i}" for i in range(6))]
    assert [row["name"] for row in rows if row["error"]] == ["layer 3"]
    assert rows[4]["share"] == 1.0
    assert rows[4]["error"] == rows[4]["accumulated"] > 0.01
    assert [row["accumulated"] > 0 for row in rows] == [False] * 4 + [True] * 3


def test_windows_and_groups_of_layers_as_in_transformers(tmp_path):
    config = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    config |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"sliding_window": 24, "max_position_embeddings": 128}
    config |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    hf = make_hf("Gemma3ForCausalLM", **config)
    hf.save_pretrained(tmp_path)
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    found = measure({"model": str(tmp_path), "dtype": "float32"}, chunk=96, tokens=96)
    tokenizer = Tokenizer.from_folder(tmp_path)
    first = tokenizer.encode("")[:1]
    ids = first + tokenizer.encode(STORIES.read_text(), add_special_tokens=False)[:96]
    ids = torch.tensor([ids[:96]])
    with torch.inference_mode():
        loss = hf(ids, labels=ids).loss.item()
    assert found["perplexity"]["value"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert found["perplexity"]["low"] is None


def test_a_base_of_other_sizes_has_no_errors_of_layers():
    found = measure(MODEL, base="octavo/stories-draft", **SMALL)
    assert found["layers"] == []
    assert "layers of" in found["layers_problem"]
    assert found["kl_divergence"]["value"] > 0.01


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--chunk", "1"], "--chunk 1: must be at least 2"),
        (["--chunk", "4000"], "--chunk 4000 is more than the context of 2048"),
        (["--tokens", "1"], "--tokens 1"),
        (["--text", "no-such-file"], "--text no-such-file cannot be read"),
        (["--text", sys.executable], "cannot be read"),
        (["-tp", "2"], "--tensor-parallel-size=2: the model is measured in one process"),
        (["--picture", "x.gif"], "--picture x.gif: must end in .png or .svg"),
        (["--base", "/no/such/folder"], "There is no folder"),
    ],
)
def test_wrong_flags(flags, said, capsys):
    assert cli.main(["quality", "octavo/stories", *flags]) in (1, 2)
    assert said in capsys.readouterr().err


def test_models_that_cannot_be_compared(tmp_path, capsys, monkeypatch):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="has 0 tokens"):
        measure(MODEL, text=str(tmp_path / "empty.txt"))
    folder = tmp_path / "other"
    hf = make_hf("LlamaForCausalLM", vocab_size=128, hidden_size=64, intermediate_size=96,
                 num_hidden_layers=1, num_attention_heads=4)  # fmt: skip
    hf.save_pretrained(folder)
    with pytest.raises(ConfigError, match="has 128 tokens in its vocabulary"):
        measure(MODEL, base=str(folder))
    shutil.copy(FOLDER / "tokenizer.json", folder)
    with pytest.raises(ConfigError, match="The tokenizer makes the token"):
        measure({"model": str(folder)})
    hf.model.norm.weight.data.fill_(math.nan)
    hf.save_pretrained(folder)
    monkeypatch.setattr(
        "octavo.model_tools.quality._read_chunks", lambda *args: [[1, 2, 3], [4, 5]]
    )
    with pytest.raises(ModelError, match="not finite"):
        measure({"model": str(folder)})


def test_memory_is_checked_before_loading(monkeypatch):
    monkeypatch.setattr("octavo.model_tools.quality.cpu_memory", lambda node: (2**20, 2**20))
    with pytest.raises(ConfigError, match="The weights need 22 MiB, and 1 MiB are free"):
        measure(MODEL, base="octavo/stories", **SMALL)


def test_the_command(tmp_path, capsys):
    picture = tmp_path / "quality.png"
    words = ["quality", "octavo/stories", "--quantization", "int8", "--base", "octavo/stories"]
    flags = ["--tokens", "128", "--chunk", "64", "--picture", str(picture)]
    assert cli.main([*words, *flags]) == 0
    out = capsys.readouterr().out
    for text in ("perplexity of the base", "KL divergence", "layer 5", "95% from", "accumulated"):
        assert text in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert cli.main([*words, *flags, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["base"] == "octavo/stories"
    assert 1 < result["perplexity"]["value"] < 10


def test_without_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["quality", "octavo/stories", "--picture", "x.png"]) == 1
    assert "Plots need matplotlib" in capsys.readouterr().err
