"""`octavo inspect` of adapters."""

import json
from pathlib import Path

import pytest
import torch

from octavo import cli
from octavo.model_tools.adapter import describe_adapter, is_adapter, print_adapter
from tests.adapters import PREFIX, write_adapter
from tests.gguf_files import write_gguf

MODULES = {
    f"model.layers.{layer}.{name}": (rank, outputs, inputs)
    for layer in (0, 1)
    for name, rank, outputs, inputs in (
        ("self_attn.q_proj", 4, 32, 32),
        ("mlp.down_proj", 2 + layer, 32, 48),
    )
}
TENSORS = {
    f"{PREFIX}{name}.lora_{factor}.weight": torch.zeros(shape, dtype=torch.bfloat16)
    for name, (rank, outputs, inputs) in MODULES.items()
    for factor, shape in (("A", (rank, inputs)), ("B", (outputs, rank)))
}
PATTERN = {"layers.0.mlp.down_proj": 2, "layers.1.mlp.down_proj": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "lora", TENSORS, lora_alpha=6, rank_pattern=PATTERN)


def test_description(folder: Path) -> None:
    parameters = [rank * (outputs + inputs) for rank, outputs, inputs in MODULES.values()]
    assert describe_adapter(folder) == {
        "path": str(folder),
        "kind": "LoRA",
        "invocation_tokens": [],
        "base_model": "org/base",
        "parameters": sum(parameters),
        "nbytes": 2 * sum(parameters),
        "dtypes": ["bfloat16"],
        "modules": {
            "q_proj": {"number": 2, "ranks": [4], "scales": [1.5], "parameters": 2 * 4 * 64},
            "down_proj": {
                "number": 2,
                "ranks": [2, 3],
                "scales": [2.0, 3.0],
                "parameters": 5 * 80,
            },
        },
        "replaced": {},
    }


def test_a_replaced_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = {f"{PREFIX}score.weight": torch.zeros(3, 32), f"{PREFIX}score.bias": torch.zeros(3)}
    folder = write_adapter(tmp_path / "a", TENSORS | head, rank_pattern=PATTERN)
    described = describe_adapter(folder)
    assert described["replaced"] == {"score": 99}
    assert described["dtypes"] == ["bfloat16", "float32"]
    assert cli.main(["inspect", str(folder)]) == 0
    assert "score (99) parameters" in capsys.readouterr().out


def test_fused_experts(tmp_path: Path) -> None:
    """Their number is unknown, so ranks and scales are not shown."""
    names = (f"{PREFIX}model.layers.0.mlp.experts{inner}" for inner in ("", ".base_layer"))
    tensors = {
        f"{name}.lora_{part}.weight": torch.ones(shape)
        for name in names
        for part, shape in (("A", (8, 6)), ("B", (6, 8)))
    }
    described = describe_adapter(write_adapter(tmp_path / "a", tensors, r=2))
    assert described["modules"]["experts"] == {
        "number": 2,
        "ranks": [],
        "scales": [],
        "parameters": 192,
    }
    print_adapter(described)


def test_experts_in_gguf(tmp_path: Path) -> None:
    head = {"general.architecture": "qwen3moe", "general.type": "adapter", "adapter.type": "lora"}
    tensors = {
        f"blk.{layer}.ffn_up_exps.weight.lora_{part}": (0, shape, bytes(4 * 6 * 2 * 8))
        for layer in (0, 1)
        for part, shape in (("a", (6, 2, 8)), ("b", (6, 8, 2)))
    }
    write_gguf(tmp_path / "a.gguf", head, tensors)
    assert describe_adapter(tmp_path / "a.gguf")["modules"]["ffn_up_exps"] == {
        "number": 12,
        "ranks": [2],
        "scales": [1.0],
        "parameters": 384,
    }


def test_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    for part in ("LoRA", "org/base", "down_proj", "2 to 3", "bfloat16"):
        assert part in text
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == describe_adapter(folder)


def test_the_tokens_of_an_activated_adapter(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_adapter(folder, TENSORS, rank_pattern=PATTERN, alora_invocation_tokens=[17, 4])
    assert cli.main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "activated LoRA" in text
    assert "17, 4" in text


def test_adapters_that_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_adapter(folder, TENSORS, use_qalora=True)
    assert cli.main(["inspect", str(folder)]) != 0
    assert "QA-LoRA is not supported" in capsys.readouterr().err


def test_what_is_an_adapter(folder: Path, tmp_path: Path) -> None:
    assert is_adapter(folder)
    assert not is_adapter(tmp_path)
    assert not is_adapter(tmp_path / "none.gguf")
    for kind in ("adapter", "model"):
        write_gguf(tmp_path / "a.gguf", {"general.type": kind}, {})
        assert is_adapter(tmp_path / "a.gguf") == (kind == "adapter")
    (folder / "config.json").write_text("{}")
    assert not is_adapter(folder)  # a model with an adapter beside it
