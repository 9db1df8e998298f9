"""Folders of models: other layouts of the same weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import ModelError
from tests.models.cases import CASES
from tests.models.harness import Runner, load, make_hf


@pytest.mark.parametrize("case", ["qwen3-moe", "qwen3.5-moe", "deepseek-v3-moe"])
def test_experts_in_one_tensor(case: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    model = make_hf(architecture, **config)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    single = {name: x for name, x in load_file(file).items() if ".experts." not in name}
    stacked = {
        name: x.contiguous()
        for name, x in model.state_dict().items()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }
    assert stacked
    steps = {0: [5, 9, 33, 2, 77, 40]}
    expected = Runner(load(tmp_path), 1, 16).step(steps)[0]
    save_file(single | stacked, file)
    assert torch.equal(Runner(load(tmp_path), 1, 16).step(steps)[0], expected)
    swapped = {name: x.transpose(1, 2).contiguous() for name, x in stacked.items()}
    save_file(single | swapped, file)
    assert torch.equal(Runner(load(tmp_path), 1, 16).step(steps)[0], expected)
    name = next(iter(stacked))
    save_file(single | stacked | {name: stacked[name][1:].contiguous()}, file)
    with pytest.raises(ModelError, match=r"lacks \d tensors of .*experts\.\d"):
        load(tmp_path)
