"""Quantized models: one request, one answer, and an answer nearly as good."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo import LLM
from tests.e2e.test_kv_cache_dtype import answers

ROOT = Path(__file__).parents[2]
TEXT = ROOT.parent / "shared/data/text/tinystories-sample-2M.txt"
MODELS = ROOT.parent / "shared/data/models"

PROMPTS = [[700 + 13 * i + j for j in range(5 + 9 * i)] for i in range(12)]


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_alone_and_in_company(name, dtype):
    """Tokens and logprobs, bit for bit, for all batches, chunks, threads and captures."""
    settings = {"quantization": name, "dtype": dtype, "max_model_len": 256}
    with LLM(enable_prefix_caching=False, **settings) as llm:
        alone = [answers(llm, [p])[0] for p in PROMPTS]
        assert answers(llm, PROMPTS) == alone
    with LLM(long_prefill_token_threshold=7, num_threads=1, enforce_eager=True, **settings) as llm:
        assert answers(llm, PROMPTS) == alone


def test_the_plan_knows_the_sizes():
    plans = {}
    for name in (None, "int8", "int4", "fp8"):
        with LLM(quantization=name, max_model_len=256) as llm:
            plans[name] = llm.memory_plan.nbytes("weights")
    assert plans["int4"] < plans["int8"] <= plans["fp8"] < plans[None]


@pytest.mark.skipif(not TEXT.exists(), reason="needs ../shared/data/text")
@pytest.mark.parametrize(
    ("model", "context"), [("octavo/stories", 512), ("stories260K", 512), ("babyllama", 256)]
)
def test_perplexity(model, context, monkeypatch):
    """Within 0.5 % (int8), 1 % (fp8) and 5 % (int4) of the bfloat16 weights.

    The smallest model has 260,000 weights, too few for e4m3; see the next test.
    """
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    perplexity = importlib.import_module("perplexity")
    path = model if model.startswith("octavo/") else str(MODELS / model)
    text = TEXT.read_text()[:30_000]
    values = {}
    for name in (None, "int8", "int4", "fp8"):
        with LLM(path, quantization=name, dtype="bfloat16", max_model_len=context) as llm:
            rows = perplexity.make_rows(llm, text, context, 8000)
            values[name] = perplexity.perplexity(llm, rows)
    assert values["int8"] < 1.005 * values[None]
    assert model == "stories260K" or values["fp8"] < 1.01 * values[None]
    assert values["int4"] < 1.05 * values[None]


@pytest.mark.skipif(not TEXT.exists(), reason="needs ../shared/data/text")
def test_fp8_costs_what_its_numbers_cost(tmp_path, monkeypatch):
    """The perplexity is that of the weights that another library rounded to e4m3."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    perplexity = importlib.import_module("perplexity")
    source = MODELS / "stories260K"
    weights = load_file(source / "model.safetensors")
    for name in [name for name in weights if "proj" in name]:
        weights[name] = rounded(weights[name])
    weights["lm_head.weight"] = rounded(weights["model.embed_tokens.weight"])
    save_file(weights, tmp_path / "model.safetensors")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, tmp_path)
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = []
    for model, name in ((source, "fp8"), (tmp_path, None)):
        with LLM(str(model), quantization=name, dtype="float32", max_model_len=512) as llm:
            rows = perplexity.make_rows(llm, TEXT.read_text()[:30_000], 512, 8000)
            values.append(perplexity.perplexity(llm, rows))
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def rounded(weight):
    """Return a weight as FP8 has it: the largest number of each output becomes 448."""
    scales = np.abs(weight).max(1, keepdims=True) / 448
    return (weight / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
