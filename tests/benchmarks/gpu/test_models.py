from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from octavo import LLM
from octavo.models.registry import read_spec
from octavo.worker.graphs import graph_sizes

pytest.importorskip("triton", reason="the package triton is not installed")

from gpu import engines, models
from gpu.base import LLAMA, LLAMA_3_8B, TINYLLAMA, Bench

from tests.benchmarks.gpu.harness import SHAPE, TOY, Cpu, put_card, run_part


class Replayed:
    """Stand-in for torch.cuda.CUDAGraph, as far as the check uses it."""

    def __init__(self, step):
        self.replay = torch.inference_mode()(step)
        self.replay()


def llm_with_graphs(**settings) -> LLM:
    """Return an engine that captures decode steps, as on a GPU."""
    llm = LLM(**settings)
    with torch.inference_mode():
        models.device_steps(llm).capture(graph_sizes(settings["max_num_seqs"]), capture=Replayed)
    return llm


def test_a_model(events: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_card(tmp_path)
    monkeypatch.setattr(engines, "LLM", llm_with_graphs)
    rows = {row.what: row for row in run_part("toy", tmp_path)}
    assert list(rows) == [
        "toy: ready, 2 decode steps captured",
        "toy: decode, batch 1",
        "toy: decode, batch 1, without graphs",
        "toy: decode, batch 2",
        "toy: decode, batch 2, without graphs",
        "toy: prefill of 4",
        "toy: prefill of 16",
        "toy: mix of 2 requests",
    ]
    aims = [(row.aim, row.good is None) for row in rows.values()]
    assert aims == [
        ("", True),
        ("1.35 times", False),
        ("", True),
        ("idle 5%", False),
        ("", True),
        ("", True),
        ("60%", False),
        ("", True),
    ]


def test_only_a_step_that_has_its_inputs_is_run_again(
    events: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "LLM", llm_with_graphs)
    bench = Bench(Cpu(), TOY, tmp_path, "toy")
    model = engines.write_config(str(tmp_path), SHAPE)
    with engines.engine(bench, model, load_format="dummy", max_num_seqs=2) as llm:
        models.decode_seconds(llm, TOY, 2)
        models.last_step(llm, TOY, 2)()
        models.decode_seconds(llm, TOY, 1)
        with pytest.raises(RuntimeError, match="no decode step of 2 requests"):
            models.last_step(llm, TOY, 2)


def test_without_graphs_they_are_put_aside_and_come_back(tmp_path: Path) -> None:
    model = engines.write_config(str(tmp_path), SHAPE)
    settings = Cpu.settings | {"skip_tokenizer_init": True, "load_format": "dummy"}
    with llm_with_graphs(model=model, max_num_seqs=2, **settings) as llm:
        before = models.device_steps(llm)._graphs
        with models.graphs_off(llm):
            assert models.device_steps(llm)._graphs == {}
        assert models.device_steps(llm)._graphs is before


@pytest.mark.parametrize("shape", [TINYLLAMA, LLAMA_3_8B])
@pytest.mark.parametrize("tied", [False, True])
def test_bytes_that_a_step_reads(shape: dict[str, int], tied: bool, tmp_path: Path) -> None:
    full = LLAMA | shape | {"tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(full))
    rotary = 4 * shape["hidden_size"] // shape["num_attention_heads"]
    held = read_spec(tmp_path).weight_nbytes("bfloat16", max_model_len=1) - rotary
    embeddings = 0 if tied else 2 * shape["vocab_size"] * shape["hidden_size"]
    assert models.read_nbytes(full) == held - embeddings


def test_operations_of_a_prompt() -> None:
    shape = LLAMA_3_8B
    tokens = 4096
    products = 2 * tokens * 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    logits = 2 * 4096 * 128256
    # Queries with keys, and weights with values; causal: half of them.
    attention = 32 * 2 * (2 * tokens**2 * 4096) / 2
    assert models.prefill_flop(shape, tokens) == products + logits + attention
