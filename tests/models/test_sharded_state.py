"""vLLM's sharded checkpoints: what ranks have of a model, put together again."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.errors import ModelError
from octavo.models.hub import resolve_model

SETTINGS = {"kv_cache_memory_bytes": "16M", "max_model_len": 128, "load_format": "sharded_state"}
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
ROWS = ("q_proj", "gate_proj", "up_proj", "embed_tokens")
COLUMNS = ("o_proj", "down_proj")


def shard(tensors, rank, size):
    """The tensors as a rank of vLLM's has them, with a vocabulary that is padded."""
    mine = {}
    for name, tensor in tensors.items():
        module = name.split(".")[-2]
        if module in ROWS:
            if module == "embed_tokens":
                tensor = torch.cat([tensor, torch.zeros(64, tensor.shape[1], dtype=tensor.dtype)])
            mine[name] = tensor.chunk(size)[rank]
        elif module in ("k_proj", "v_proj"):  # of two heads, which more ranks share
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
    """The built-in model without its weights, and these."""
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
