"""Checkpoints of all forms, and messages about damaged ones."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from octavo.errors import ModelError
from tests.models.cases import CASES
from tests.models.configs.sizes import VOCAB
from tests.models.harness import generate, load, make_hf, make_prompts, save_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a tiny Llama, untied."""
    make_hf("LlamaForCausalLM", **CASES["llama"][1]).save_pretrained(tmp_path)
    return tmp_path


def tensors(folder: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def save(folder: Path, state: dict[str, Tensor]) -> None:
    safetensors.torch.save_file(state, folder / "model.safetensors")


def logits(model: Any) -> Tensor:
    return generate(model, make_prompts(VOCAB, (20,)), 2).logits[0]


def test_sharded_equals_single(folder: Path) -> None:
    expected = logits(load(folder))
    state = tensors(folder)
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i, name in enumerate(state):
        file = f"model-0000{i % 3 + 1}-of-00003.safetensors"
        weight_map[name] = file
    for file in set(weight_map.values()):
        part = {name: state[name] for name, f in weight_map.items() if f == file}
        safetensors.torch.save_file(part, folder / file)
    # A file that the index does not name does not belong to the model.
    safetensors.torch.save_file({"other": torch.zeros(1)}, folder / "other.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits(load(folder)), expected)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"names files that are not there: model-00002-of"):
        load(folder)


@pytest.mark.parametrize("case", ["gpt2", "opt", "bloom"])
def test_bare_model_names(case: str, tmp_path: Path) -> None:
    """Checkpoints saved without the language-model head lack the first part of each name."""
    architecture, config = CASES[case]
    make_hf(architecture, **config).save_pretrained(tmp_path)
    expected = logits(load(tmp_path))
    prefix = "model." if case == "opt" else "transformer."
    state = {n.removeprefix(prefix): t for n, t in tensors(tmp_path).items()}
    if case == "gpt2":
        state["h.0.attn.bias"] = torch.ones(1, 1, 128, 128).tril()
    state["lm_head.weight"] = torch.zeros(VOCAB, 48)  # tied: not used
    save(tmp_path, state)
    assert torch.equal(logits(load(tmp_path)), expected)


def test_torch_files(folder: Path) -> None:
    expected = logits(load(folder))
    state = tensors(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no \*\.safetensors"):
        load(folder)
    names = list(state)
    for part in (0, 1):
        some = {name: state[name] for name in names[part::2]}
        torch.save(some, folder / f"pytorch_model-{part}.bin")
    assert torch.equal(logits(load(folder)), expected)
    assert torch.equal(logits(load(folder, load_format="pt")), expected)
    with pytest.raises(ModelError, match=r"\.bin files and no \*\.safetensors; set load_format=pt"):
        load(folder, load_format="safetensors")


def test_missing_and_unexpected_tensors(folder: Path) -> None:
    state = tensors(folder)
    gone = [name for name in state if "layers.1." in name]
    save(folder, {name: tensor for name, tensor in state.items() if name not in gone})
    with pytest.raises(
        ModelError, match=rf"lacks {len(gone)} tensors .*model\.layers\.1\..* and \d more\."
    ):
        load(folder)
    save(folder, state | {"model.layers.0.extra.weight": torch.zeros(2)})
    with pytest.raises(ModelError, match=r"holds 1 tensors .*model\.layers\.0\.extra\.weight"):
        load(folder)
    save(
        folder,
        state
        | {f"{at}rotary_emb.inv_freq": torch.zeros(2) for at in ("", "model.layers.0.self_attn.")},
    )
    load(folder)


def test_a_weight_too_wide_to_be_quantized(tmp_path: Path) -> None:
    config = {"hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    config |= {"intermediate_size": 2**17 + 1, "vocab_size": 9, "num_hidden_layers": 1}
    save_config(tmp_path, "LlamaForCausalLM", config)
    with pytest.raises(ModelError, match=r"down_proj\.weight has 131073 inputs.*quantization=int4"):
        load(tmp_path, load_format="dummy", quantization="int4")


def test_wrong_shape_and_dtype(folder: Path) -> None:
    state = tensors(folder)
    name = "model.layers.2.mlp.down_proj.weight"
    save(folder, state | {name: state[name].T.contiguous()})
    with pytest.raises(ModelError, match=r"down_proj\.weight has shape \[72, 48\].*\[48, 72\]"):
        load(folder)
    save(folder, state | {name: state[name].to(torch.int8)})
    with pytest.raises(ModelError, match=r"down_proj\.weight has type int8; supported: float64"):
        load(folder)


def test_truncated_and_damaged(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-100], whole[: len(whole) // 2], whole[:5], b"", b"\xff" * 4000):
        file.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut off"):
            load(folder)


def test_weights_do_not_depend_on_the_file_afterwards(folder: Path) -> None:
    model = load(folder)
    expected = logits(model)
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.seek(8000)
        stream.write(b"\0" * 40000)
    assert torch.equal(logits(model), expected)


def test_progress(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(folder, progress=lambda done, total: calls.append((done, total)))
    done = [d for d, _ in calls]
    assert done == sorted(set(done))
    assert calls[-1][0] == calls[-1][1] == sum(t.numel() for t in tensors(folder).values())


def test_memory_stays_near_one_copy(tmp_path: Path) -> None:
    """Pages of the mapped file do not count: the system can free them."""
    config = CASES["llama"][1] | {"hidden_size": 1024, "intermediate_size": 2816}
    config |= {"num_hidden_layers": 6, "head_dim": 128, "vocab_size": 1000}
    make_hf("LlamaForCausalLM", **config).to(torch.bfloat16).save_pretrained(tmp_path)
    code = f"""
from octavo.kernels.native import NativeOps
from octavo.models.loader import load_model
from octavo.models.registry import read_spec
from octavo.checkpoints.registry import open_checkpoint
from pathlib import Path
checkpoint = open_checkpoint(Path({str(tmp_path)!r}))
spec = read_spec(checkpoint)
def anonymous():
    return 1024 * int(next(l for l in open("/proc/self/status") if "RssAnon" in l).split()[1])
begin, peak = anonymous(), []
model = load_model(spec, checkpoint, dtype="bfloat16", ops=NativeOps(),
                   progress=lambda done, total: peak.append(anonymous()))
print(max(peak) - begin, spec.weight_nbytes("bfloat16"))
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    peak, planned = map(int, run.stdout.split())
    assert planned > 100 * 2**20
    assert planned * 0.9 < peak < planned * 1.1 + 20 * 2**20
