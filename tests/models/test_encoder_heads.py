"""Heads of encoders for weights and vectors of tokens, equal to a reference in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from octavo.errors import ModelError
from octavo.frontend.pooling import sparse_vector
from octavo.outputs import PoolingOutput, PoolingRequestOutput
from octavo.pooling_params import PoolingParams
from tests.models.harness import make_hf, make_prompts, spec_of
from tests.models.test_encoders import ODD, SIZES, VOCAB, WIDE
from tests.pooling import open_llm, results, states, unit

SHAPES = {"even": SIZES, "odd": ODD, "wide": WIDE}
LENGTHS = (3, 17, 1, 40, 29, 64)
BGE_M3 = {"architectures": ["BgeM3EmbeddingModel"]}


def texts(begin: int = 0, end: int = 2) -> list[list[int]]:
    """Return texts between special tokens, the last one without them."""
    found = [[begin, *ids, end] for ids in make_prompts(VOCAB, LENGTHS, seed=2)]
    found[3][5:9] = found[3][20:24]  # some tokens twice
    found[4][3:5] = [3, end]
    return [*found, found[1][1:-1]]


def assert_near(found: list[np.ndarray], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == tuple(theirs.shape)
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=2e-5)


def assert_alone_as_in_a_batch(
    folder: Path, task: str, prompts: list[list[int]], **settings: Any
) -> None:
    """Compare the bits of results alone, in a batch, and backwards in one."""
    for dtype in ("float32", "bfloat16"):
        with open_llm(folder, max_model_len=78, dtype=dtype, **settings) as llm:
            alone = [results(llm, task, [ids])[0] for ids in prompts]
            for _ in range(2):
                among = results(llm, task, prompts[::-1])[::-1]
                assert [x.tobytes() for x in among] == [x.tobytes() for x in alone]
                among = results(llm, task, prompts)
                assert [x.tobytes() for x in among] == [x.tobytes() for x in alone]


def write_bge_m3(folder: Path, shape: str) -> tuple[Any, torch.nn.Linear, torch.nn.Linear]:
    """Write BGE-M3's files; return the encoder and its two heads."""
    hf = make_hf("XLMRobertaModel", **SHAPES[shape])
    hf.save_pretrained(folder)
    size = SHAPES[shape]["hidden_size"]
    heads = torch.nn.Linear(size, 1), torch.nn.Linear(size, size)
    for name, head in zip(("sparse_linear", "colbert_linear"), heads, strict=True):
        torch.save(head.state_dict(), folder / f"{name}.pt")
    return hf, *heads


@pytest.mark.parametrize("shape", SHAPES)
def test_bge_m3(shape: str, tmp_path: Path) -> None:
    hf, sparse, colbert = write_bge_m3(tmp_path, shape)
    prompts = texts()
    hidden = states(hf, prompts)
    with torch.no_grad():
        vectors = [unit(colbert(x[ids[0] == 0 :])) for x, ids in zip(hidden, prompts, strict=True)]
        weights = [sparse(x).relu()[:, 0] for x in hidden]
    inner = [w[1:-1] for w in weights[:-1]] + weights[-1:]
    with open_llm(tmp_path, max_model_len=78, hf_overrides=BGE_M3) as llm:
        assert_near(results(llm, None, prompts), [unit(x[0]) for x in hidden])
        assert_near(results(llm, "token_embed", prompts), vectors)
        found = results(llm, "token_classify", prompts)
        assert_near(found, inner)
        bare = results(llm, "token_classify", prompts, use_activation=False)
        assert min(x.min() for x in bare) < 0
        pooler = llm.llm_engine.spec.pooler("token_classify")
    assert pooler is not None
    for data, ids, theirs in zip(found, prompts, weights, strict=True):
        output = PoolingRequestOutput("r", PoolingOutput(data), ids, 0)
        entries, ours = sparse_vector(output, pooler, PoolingParams())
        expected: dict[int, float] = {}
        for token, weight in zip(ids, theirs.tolist(), strict=True):  # as FlagEmbedding does
            if token not in (0, 1, 2, 3) and weight > expected.get(token, 0):
                expected[token] = weight
        assert entries.tolist() == sorted(expected)
        np.testing.assert_allclose(ours, [expected[i] for i in entries], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("task", ["embed", "token_embed", "token_classify"])
def test_bge_m3_in_a_batch(task: str, tmp_path: Path) -> None:
    write_bge_m3(tmp_path, "odd")
    assert_alone_as_in_a_batch(tmp_path, task, texts(), hf_overrides=BGE_M3)


def test_bge_m3_without_its_heads(tmp_path: Path) -> None:
    write_bge_m3(tmp_path, "even")
    (tmp_path / "sparse_linear.pt").unlink()
    with pytest.raises(ModelError, match=r"sparse_linear.pt is missing"):
        open_llm(tmp_path, max_model_len=78, hf_overrides=BGE_M3).__enter__()
    torch.save(functional.relu, tmp_path / "sparse_linear.pt")
    with pytest.raises(ModelError, match=r"sparse_linear.pt cannot be read.*than tensors"):
        open_llm(tmp_path, max_model_len=78, hf_overrides=BGE_M3).__enter__()
    assert [p.task for p in spec_of(tmp_path).poolers] == ["embed", "token_embed"]
