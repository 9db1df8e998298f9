"""Adapters of experts: their slices change the weights as PEFT does, in all forms of names."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import AdapterError
from octavo.kernels.native import NativeOps
from octavo.kernels.sizes import lora_nbytes
from octavo.layers.adapter import Adapters
from octavo.models.adaptable_model import AdaptableModel
from octavo.models.spec import ModelSpec
from octavo.system.distributed import Rank
from tests.adapters import PREFIX, LoadedAdapter, deltas, make_factors, write_adapter
from tests.models.cases import CASES
from tests.models.harness import make_hf, save_config, spec_of
from tests.models.test_adapters import linear_weights, load, needs_peft

RANKS = (Rank(), Rank(0, 2), Rank(1, 2), Rank(1, 2, splits_experts=True))
# Experts with modules of their own, stacked, turned, in turn, without a gate, and square ones.
STORED = ("qwen2-moe", "granite-moe", "llama4", "gpt-oss", "nemotron-h-moe", "olmoe")
EXPERTS = "model.layers.1.mlp.experts"


@needs_peft
@pytest.mark.parametrize("case", STORED)
def test_slices_change_the_weights_as_peft_does(case: str, tmp_path: Path) -> None:
    """For whole models, and for parts of ranks that divide columns or experts."""
    from peft import LoraConfig, get_peft_model

    architecture, config = CASES[case]
    hf = make_hf(architecture, **config)
    hf.save_pretrained(tmp_path / "base")
    names = [n for n, it in hf.named_parameters() if it.ndim == 3 and ".experts." in n]
    wanted = LoraConfig(
        r=3,
        lora_alpha=7,
        target_modules=[],
        target_parameters=names,
        init_lora_weights=False,
        rank_pattern={"down_proj": 2},
        alpha_pattern={names[0]: 5},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        adapted = get_peft_model(hf, wanted)
        adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    for rank in RANKS:
        spec = spec_of(tmp_path / "base").split(rank)
        before, after = (linear_weights(tmp_path / name, spec) for name in ("base", "merged"))
        loaded = load(tmp_path / "adapter", AdaptableModel(spec))
        changes = deltas(loaded, {name: weight.shape for name, weight in before.items()})
        for name, change in changes.items():
            assert np.abs(after[name] - before[name] - change).max() < 1e-5, name
        changed = {name for name, change in changes.items() if np.abs(change).max() > 1e-3}
        assert changed == {name for name in before if ".experts." in name}


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """Layer 1 has 6 experts, with 48 inputs and 40 inner numbers."""
    return save_config(tmp_path_factory.mktemp("base"), *CASES["qwen2-moe"])


@pytest.fixture(scope="module")
def model(spec: ModelSpec) -> AdaptableModel:
    return AdaptableModel(spec)


def fused(rank: int = 2, experts: int = 6, swapped: bool = False) -> dict[str, torch.Tensor]:
    """Return factors of both products of fused experts."""
    generator, tensors = torch.Generator().manual_seed(2), {}
    for part, outputs, inputs in ((".base_layer", 80, 48), ("", 48, 40)):
        a, b = (torch.randn(experts * rank, it, generator=generator) for it in (inputs, outputs))
        if swapped:
            # The rows of A belong to one expert, the columns of B are in turn.
            a, b = (
                it.view(experts, rank, -1)
                .transpose(0, 1)
                .reshape(it.shape)
                .view(rank, experts, -1)
                .transpose(0, 1)
                .reshape(it.shape)
                for it in (b, a)
            )
        columns = b.view(experts, rank, -1).permute(2, 1, 0).reshape(b.shape[1], -1)
        name = f"{PREFIX}{EXPERTS}{part}"
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": columns.contiguous()}
    return tensors


def slices(loaded: LoadedAdapter) -> list[Any]:
    return [
        (name, it.begin, it.end, it.scale, it.a.numpy().tolist(), it.b.numpy().tolist())
        for name, each in loaded.slices.items()
        for it in each
    ]


def test_names_of_single_experts(model: AdaptableModel, tmp_path: Path) -> None:
    names = [f"{EXPERTS}.{i}.{part}_proj" for i in (0, 5) for part in ("up", "down")]
    loaded = load(write_adapter(tmp_path / "a", make_factors(model, names)), model)
    found = [(layer, it.begin, it.end) for layer, each in loaded.slices.items() for it in each]
    own = [it for it in found if ".experts." in it[0]]
    assert len(own) == 4
    assert [it[1:] for it in own if it[0].endswith("up.")] == [(40, 80)] * 2


@pytest.mark.parametrize("version", [None, "0.18.1", "0.21.2"])
def test_factors_of_transposed_weights(
    version: str | None, model: AdaptableModel, tmp_path: Path
) -> None:
    """As older versions of PEFT write them; the shapes tell, unless a weight is square."""
    expected = load(write_adapter(tmp_path / "a", fused(), r=2), model)
    turned = write_adapter(tmp_path / "b", fused(swapped=True), r=2, peft_version=version)
    assert slices(load(turned, model)) == slices(expected)


def test_stages_and_ranks_have_one_hash(spec: ModelSpec, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", fused(), r=2)
    whole = load(folder, AdaptableModel(spec))
    parts = [spec.stage(0, 1), spec.stage(1, 3), spec.split(Rank(1, 2, splits_experts=True))]
    loaded = [load(folder, AdaptableModel(part)) for part in parts]
    assert {it.content_hash for it in loaded} == {whole.content_hash}
    assert [len(slices(it)) for it in (whole, *loaded)] == [18, 0, 18, 9]
    other = write_adapter(tmp_path / "b", fused(), r=2, lora_alpha=9)
    assert load(other, AdaptableModel(spec)).content_hash != whole.content_hash


def test_refusals(spec: ModelSpec, model: AdaptableModel, tmp_path: Path) -> None:
    single = make_factors(model, [f"{EXPERTS}.3.gate_proj"], 2)
    few = {name: it[:5] if "lora_A" in name else it[:, :5] for name, it in fused().items()}
    few = {name: it.contiguous() for name, it in few.items()}
    up = {name: it for name, it in fused().items() if "base_layer" in name}
    twice = up | {name.replace(".base_layer", ""): it.clone() for name, it in up.items()}
    for tensors, message in (
        (few, r"mlp.experts.gate_up_proj has 6 experts \[80, 48\]"),
        (fused(20), "has rank 20 for each expert, and max_lora_rank=16"),
        (fused(3), "have rank 3, and adapter_config.json says 2"),
        (fused() | single, r"experts.3.gate_proj twice"),
        (twice, "twice, also with"),
    ):
        rank = 20 if "rank 20" in message else 2
        with pytest.raises(AdapterError, match=message):
            load(write_adapter(tmp_path / "a", tensors, r=rank), model)
    layers = {it.layer for it in model.slices if ".experts." not in it.layer}
    for tensors in (fused(), single):
        with pytest.raises(AdapterError, match="LoRA of experts that engines on several"):
            load(write_adapter(tmp_path / "a", tensors, r=2), AdaptableModel(spec, layers))


def test_slots_have_room_for_the_modules_that_adapters_may_change(spec: ModelSpec) -> None:
    outputs: dict[tuple[str, int], list[int]] = {}
    for it in AdaptableModel(spec).slices:
        outputs.setdefault((it.layer, it.inputs), []).append(it.end - it.begin)
    adapters = Adapters(NativeOps(), 1, 3)
    for (layer, inputs), each in outputs.items():
        if ".experts." in layer:
            adapters.experts({0: layer}, 1, each, inputs)
        else:
            adapters.layer(layer, each, inputs)

    def nbytes(n: int, k: int, *, affine: bool = True) -> int:
        return -(-lora_nbytes(3, n, k, "float32", affine=affine) // 64) * 64

    def planned(*targets: str) -> int:
        return AdaptableModel(spec, None, (), targets).slot_nbytes(adapters, "float32")

    assert planned("o_proj") == 3 * nbytes(48, 48)
    of_experts = 6 * (2 * nbytes(40, 48, affine=False) + nbytes(48, 40, affine=False))
    assert planned("experts", "o_proj") == planned("o_proj") + of_experts
    assert planned("gate_up_proj") == planned("gate_proj", "up_proj")
    name = "model.layers.1.self_attn.o_proj"
    assert planned(name) == nbytes(48, 48)
    assert planned() > planned("gate_up_proj", "down_proj", "o_proj")
    assert planned("norm") == 0
