"""Sharded checkpoints of vLLM: the parts of ranks, joined again, and saved."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, ModelError, UnsupportedError
from octavo.models.hub import resolve_model
from octavo.models.registry import read_spec
from octavo.models.sharded_save import save_sharded_state

SETTINGS = {"kv_cache_memory_bytes": "16M", "max_model_len": 128, "load_format": "sharded_state"}
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
ROWS = ("q_proj", "gate_proj", "up_proj", "embed_tokens")
COLUMNS = ("o_proj", "down_proj")


def shard(tensors, rank, size, padding=64):
    """Return the tensors of a rank of vLLM, with a padded vocabulary."""
    mine = {}
    for name, tensor in tensors.items():
        module = name.split(".")[-2]
        if module in ROWS:
            if module == "embed_tokens":
                tensor = torch.cat([tensor, tensor.new_zeros(padding, tensor.shape[1])])
            mine[name] = tensor.chunk(size)[rank]
        elif module in ("k_proj", "v_proj"):  # of two heads, which several ranks share
            mine[name] = tensor.chunk(min(size, 2))[rank * min(size, 2) // size]
        else:
            mine[name] = tensor.chunk(size, 1)[rank] if module in COLUMNS else tensor
    fused = {}
    for name, tensor in mine.items():
        for part, whole in (("q_proj", "qkv_proj"), ("gate_proj", "gate_up_proj")):
            if part in name:
                others = ("q_proj", "k_proj", "v_proj") if part == "q_proj" else (part, "up_proj")
                joined = torch.cat([mine[name.replace(part, other)] for other in others])
                fused[name.replace(part, whole)] = joined
        if name.split(".")[-2] not in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            fused[name] = tensor
    return {name: tensor.contiguous() for name, tensor in fused.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the built-in model without its weights, and the weights."""
    folder, built_in = tmp_path_factory.mktemp("model"), resolve_model("octavo/stories")
    tensors = load_file(built_in / "model.safetensors")
    for file in built_in.glob("*.json"):
        shutil.copy(file, folder)
    return folder, tensors


def save(folder, tensors, size, pattern="model-rank-{}-part-0.safetensors"):
    for file in folder.glob("*.safetensors"):
        file.unlink()
    for rank in range(size):
        save_file(shard(tensors, rank, size), folder / pattern.format(rank))


def answer(folder, **settings):
    with LLM(model=str(folder), **{**SETTINGS, **settings}) as llm:
        output = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0]
    return output.token_ids, str(output.logprobs)


@pytest.fixture(scope="module")
def expected():
    return answer("octavo/stories", load_format="auto")


@pytest.mark.parametrize(
    ("size", "pattern"),
    [
        (1, "model-rank-{}-part-0.safetensors"),
        (2, "model-pp-0-tp-{}-part-0.safetensors"),
        (4, "model-rank-{}-part-0.safetensors"),
    ],
)
def test_ranks_are_put_together(model, expected, size, pattern):
    folder, tensors = model
    save(folder, tensors, size, pattern)
    assert answer(folder) == expected
    assert answer(folder, weight_cache="off") == expected


def test_what_does_not_fit_is_named(model):
    folder, tensors = model
    save(folder, tensors, 2)
    for file in folder.glob("model-rank-0*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"not hold the files of all ranks .* ranks \[1\]"):
        answer(folder)
    save(folder, tensors, 1)
    part = folder / "model-rank-0-part-0.safetensors"
    stored = load_file(part)
    for change, said in (
        ({"model.norm.weight": None}, "lacks model.norm.weight"),
        (
            {"model.odd.weight": stored["model.norm.weight"].clone()},
            "holds 1 tensors .*model.odd.weight",
        ),
        ({"model.norm.weight": torch.zeros(5)}, r"model.norm.weight has shape \[5\]"),
    ):
        changed = {n: t for n, t in {**stored, **change}.items() if t is not None}
        save_file(changed, part)
        with pytest.raises(ModelError, match=said):
            answer(folder)


def test_what_is_saved_is_what_vllm_keeps_and_is_read_again(model, expected, tmp_path):
    _, tensors = model
    settings = {k: v for k, v in SETTINGS.items() if k != "load_format"}
    for size, max_size in ((1, 200_000), (2, None)):
        target = tmp_path / str(size)
        with LLM(model="octavo/stories", tensor_parallel_size=size, **settings) as llm:
            llm.llm_engine.engine_core.save_sharded_state(target, max_size=max_size)
            with pytest.raises(ConfigError, match="holds a sharded state already"):
                llm.llm_engine.save_sharded_state(target)
            with pytest.raises(UnsupportedError, match="pattern='x' is not supported"):
                llm.llm_engine.save_sharded_state(tmp_path / "x", pattern="x")
        for rank in range(size):
            files = sorted(target.glob(f"model-rank-{rank}-part-*.safetensors"))
            assert (len(files) > 1) == (max_size is not None)
            saved = {name: t for file in files for name, t in load_file(file).items()}
            whole = shard(tensors, rank, size, padding=0)
            assert saved.keys() == whole.keys()
            assert all(torch.equal(saved[name], whole[name].to(saved[name])) for name in whole)
        for file in model[0].glob("*.json"):
            shutil.copy(file, target)
        assert answer(target) == expected


@pytest.mark.parametrize(
    ("change", "size", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "n_embd": 48, "n_head": 2}, 1, "GPT2LMHeadModel"),
        ({"num_key_value_heads": 2}, 3, r"tensor_parallel_size=3 .* has \[2\] in its layers"),
        ({"intermediate_size": 71}, 2, "the 71 rows of model.layers.0.mlp.gate_proj.weight"),
    ],
)
def test_what_vllm_keeps_in_another_way_is_not_saved(model, tmp_path, change, size, said):
    config = json.loads((model[0] / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"dtype": "float32", "load_format": "dummy", "seed": 0, "max_size": None}
    with pytest.raises(UnsupportedError, match=said):
        save_sharded_state(read_spec(tmp_path), tmp_path, tmp_path / "new", size=size, **options)
    assert not list(tmp_path.rglob("*.safetensors"))
