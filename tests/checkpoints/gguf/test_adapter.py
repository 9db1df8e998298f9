"""Adapters in GGUF: the same changes as those of the adapters that were converted."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo.errors import AdapterError
from octavo.models.adaptable_model import AdaptableModel
from octavo.models.adapters import open_adapter, open_adapter_file
from octavo.models.spec import ModelSpec
from octavo.system.distributed import Rank
from tests.adapters import PREFIX, load_all, make_factors, write_adapter
from tests.gguf_files import quantize, write_gguf
from tests.models.cases import CASES
from tests.models.harness import save_config

METADATA = {
    "general.architecture": "llama",
    "general.type": "adapter",
    "adapter.type": "lora",
    "adapter.lora.alpha": 8.0,
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.down_proj": "ffn_down",
    "self_attention.query_key_value": "attn_qkv",
    "mlp.dense_h_to_4h": "ffn_up",
}
"""Names of modules in llama.cpp's files."""
NAMES |= {"mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp"}
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
EXPERTS |= {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}
"""Names of modules of experts, whose factors are one tensor."""


def converted(name: str, b: NDArray[np.float32], config: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return the rows in the order of llama.cpp's converter."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    rank = b.shape[1]
    if (kind := name.rpartition(".")[2]) in heads:
        return b.reshape(config[heads[kind]], 2, -1, rank).swapaxes(1, 2).reshape(b.shape)
    if name.endswith("query_key_value"):
        return b.reshape(config["n_head"], 3, -1, rank).swapaxes(0, 1).reshape(b.shape)
    return b


def write(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    kind: str = "f32",
    **more: Any,
) -> Path:
    """Write PEFT's tensors as llama.cpp's converter does."""
    stored, experts = {}, {}
    for name, tensor in tensors.items():
        module, _, factor = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".lora_")
        of_embedding = factor.startswith("embedding_")
        factor = factor.removeprefix("embedding_")
        numbers = tensor.numpy()
        if of_embedding and factor == "A":  # llama.cpp gathers rows of it
            numbers = numbers.T
        if factor == "B":
            numbers = converted(module, numbers, config)
        if module == "lm_head":
            own = "output"
        elif of_embedding:
            own = "token_embd"
        else:
            layer = module.split("layers.")[-1].split("h.", 1)[-1]
            index, _, inner = layer.partition(".")
            if (expert := re.search(r"experts\.(\d+)\.", inner)) is not None:
                own = f"blk.{index}.{EXPERTS[inner.rpartition('.')[2]]}"
                experts.setdefault((own, factor), {})[int(expert[1])] = numbers
                continue
            own = f"blk.{index}.{NAMES[inner]}"
        code = {"f32": 0, "f16": 1}[kind]
        contents = quantize(np.ascontiguousarray(numbers), kind)
        stored[f"{own}.weight.lora_{factor.lower()}"] = code, numbers.shape, contents
    for (own, factor), each in experts.items():
        numbers = np.stack([each[i] for i in range(len(each))])
        stored[f"{own}.weight.lora_{factor.lower()}"] = 0, numbers.shape, numbers.tobytes()
    write_gguf(path, METADATA | more, stored)
    return path


def open_spec(case: str, folder: Path) -> tuple[ModelSpec, dict[str, Any]]:
    architecture, config = CASES[case]
    return save_config(folder, architecture, config), config


@pytest.mark.parametrize(
    ("case", "kind", "modules"),
    [
        ("llama", "llama", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]),
        ("llama-mqa-tied-bias", "llama", ["q_proj", "k_proj", "lm_head", "embed_tokens"]),
        ("bloom", "bloom", ["query_key_value", "dense_h_to_4h"]),
        ("mixtral", "llama", ["q_proj", "block_sparse_moe.gate", "w1", "w2", "w3"]),
        ("qwen3-moe", "qwen3moe", ["mlp.gate", "experts.0.gate_proj", "experts.0.down_proj"]),
    ],
)
@pytest.mark.parametrize("rank", [Rank(), Rank(1, 2), Rank(1, 2, splits_experts=True)])
def test_the_slices_are_those_of_the_converted_adapter(
    rank: Rank, case: str, kind: str, modules: list[str], tmp_path: Path
) -> None:
    spec, config = open_spec(case, tmp_path / "base")
    model, whole = AdaptableModel(spec.split(rank)), AdaptableModel(spec)
    ends = [re.sub(r"experts\.0", r"experts.\\d+", module) for module in modules]
    names = [name for name in whole.modules if any(re.search(rf"{end}$", name) for end in ends)]
    assert len({name.rpartition(".")[2] for name in names}) == len(modules)
    tensors = make_factors(whole, names)
    file = write(tmp_path / "a.gguf", tensors, config, **{"general.architecture": kind})
    folder = write_adapter(tmp_path / "a", tensors)
    found, expected = (
        load_all(open_adapter(path, model, dtype="float32", max_lora_rank=4))
        for path in (file, folder)
    )
    assert found.slices.keys() == expected.slices.keys()
    for layer, slices in expected.slices.items():
        for it, same in zip(found.slices[layer], slices, strict=True):
            assert (it.begin, it.end, it.scale) == (same.begin, same.end, same.scale)
            assert np.array_equal(it.a.numpy(), same.a.numpy())
            assert np.array_equal(it.b.numpy(), same.b.numpy())


@pytest.fixture
def llama(tmp_path: Path) -> tuple[AdaptableModel, dict[str, Any]]:
    spec, config = open_spec("llama", tmp_path / "base")
    return AdaptableModel(spec), config


def test_without_alpha_the_factor_is_1(
    llama: tuple[AdaptableModel, dict[str, Any]], tmp_path: Path
) -> None:
    model, config = llama
    tensors = make_factors(model, ["model.layers.0.self_attn.v_proj"])
    for alpha, scale in ((0.0, 1.0), (2.0, 0.5)):
        more = {"adapter.lora.alpha": alpha}
        file = open_adapter_file(write(tmp_path / "a.gguf", tensors, config, "f16", **more))
        assert file.scale("blk.0.attn_v") == scale


def test_activated_lora(llama: tuple[AdaptableModel, dict[str, Any]], tmp_path: Path) -> None:
    model, config = llama
    tensors = make_factors(model, ["model.layers.0.self_attn.v_proj"])
    more = {"adapter.alora.invocation_tokens": [5, 6]}
    file = open_adapter_file(write(tmp_path / "a.gguf", tensors, config, "f16", **more))
    assert (file.invocation_tokens, file.kind) == ((5, 6), "activated LoRA")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"general.type": "model"}, "general.type=model; it must be adapter"),
        ({"adapter.type": "control"}, "adapter.type=control; it must be lora"),
        ({"general.architecture": "qwen35"}, "use the adapter's folder in PEFT's form"),
        ({"general.architecture": "unknown"}, "general.architecture=unknown is not supported"),
        ({"general.architecture": 3}, "general.architecture=3 is not supported"),
        ({"adapter.lora.alpha": "8"}, "adapter.lora.alpha=8 is not a finite number"),
        ({"adapter.lora.alpha": float("inf")}, "adapter.lora.alpha=inf is not a finite number"),
        (
            {"adapter.alora.invocation_tokens": ["a"]},
            "it must be a token id or a list of token ids",
        ),
    ],
)
def test_files_that_are_refused(
    more: dict[str, Any],
    message: str,
    llama: tuple[AdaptableModel, dict[str, Any]],
    tmp_path: Path,
) -> None:
    model, config = llama
    tensors = make_factors(model, ["model.layers.0.self_attn.v_proj"])
    file = write(tmp_path / "a.gguf", tensors, config, **more)
    with pytest.raises(AdapterError) as caught:
        open_adapter_file(file)
    assert message in str(caught.value)


def test_tensors_that_are_refused(
    llama: tuple[AdaptableModel, dict[str, Any]], tmp_path: Path
) -> None:
    model, _ = llama
    file = tmp_path / "a.gguf"
    blocks = quantize(np.ones((32, 32), np.float32), "q8_0")
    pair = {f"blk.0.attn_q.weight.lora_{x}": (8, (32, 32), blocks) for x in "ab"}
    write_gguf(file, METADATA, pair)
    with pytest.raises(AdapterError, match="has type Q8_0, and factors must be floats"):
        open_adapter_file(file)
    numbers = np.ones((4, 4), np.float32).tobytes()
    for stored, message in (
        ({"blk.0.attn_norm.weight": (0, (4, 4), numbers)}, "is not a factor of LoRA"),
        ({"blk.0.attn_q.weight.lora_a": (0, (4, 4), numbers)}, "only one of the two factors"),
        ({}, "has no tensors"),
    ):
        write_gguf(file, METADATA, stored)
        with pytest.raises(AdapterError, match=message):
            open_adapter_file(file)
    for name, shape in (
        ("attn_q", (2, 4, 2)),
        ("ffn_up_exps", (4, 4)),
        ("ffn_up_exps", (9999, 1, 1)),
    ):
        contents = np.ones(shape, np.float32).tobytes()
        stored = {f"blk.0.{name}.weight.lora_{x}": (0, shape, contents) for x in "ab"}
        write_gguf(file, METADATA, stored)
        with pytest.raises(AdapterError, match=r"it must have [23] dimensions"):
            open_adapter_file(file)
    contents = np.ones((4096, 1, 1), np.float32).tobytes()
    names = [f"blk.{i}.ffn_up_exps.weight.lora_{x}" for i in range(33) for x in "ab"]
    write_gguf(file, METADATA, dict.fromkeys(names, (0, (4096, 1, 1), contents)))
    with pytest.raises(AdapterError, match="has more than 262144 factors"):
        open_adapter_file(file)
    pair = {f"blk.99.attn_q.weight.lora_{x}": (0, (4, 4), numbers) for x in "ab"}
    write_gguf(file, METADATA, pair)
    with pytest.raises(AdapterError, match=r"does not have: blk.99.attn_q\."):
        open_adapter(file, model, dtype="float32", max_lora_rank=4)


def test_damaged_files(llama: tuple[AdaptableModel, dict[str, Any]], tmp_path: Path) -> None:
    model, config = llama
    tensors = make_factors(model, ["model.layers.0.self_attn.v_proj"])
    file = write(tmp_path / "a.gguf", tensors, config)
    contents = file.read_bytes()
    for end in range(0, len(contents), 97):
        file.write_bytes(contents[:end])
        with pytest.raises(AdapterError):
            open_adapter_file(file)
