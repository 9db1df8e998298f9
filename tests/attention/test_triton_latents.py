"""Triton attention over latents, in the interpreter, against dense attention in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.errors import ConfigError
from tests.attention.test_latents import latents

pytest.importorskip("triton", reason="the package triton is not installed")

from tests.attention.test_triton import ERROR, backend

SMALL = ((1, 1), (21, 1), (40, 7), (18, 18))


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"dtype": torch.float16, "head_size": 64, "value_size": 32, "block_size": 8},
        {"dtype": torch.bfloat16, "head_size": 24, "value_size": 24, "heads": 3},
        {"cache_dtype": torch.float8_e4m3fn},
        {"heads": 6, "head_size": 300, "value_size": 260, "scale": 0.05},
        {"heads": 38},
    ],
    ids=str,
)
def test_attention(shape: dict[str, Any]) -> None:
    """Odd sizes, wide values, values that are whole keys, and more heads than a program has."""
    case = latents(SMALL, **shape)
    error = ERROR[case.dtype]
    for views in (False, True):
        got = case.run(backend(), views=views)
        torch.testing.assert_close(got.double(), case.truth(), rtol=error, atol=error)


@pytest.mark.parametrize("cores", [4, 1000])
def test_chunks_and_others_change_no_bit(cores: int) -> None:
    """With batch_invariant, a token has the same bits decoded or prefilled, alone or not."""
    attention = backend(batch_invariant=True)
    attention.cores = cores

    def run(*requests: tuple[int, int], seeds: tuple[int, ...] = (7,)) -> Tensor:
        return latents(requests, seeds=seeds, heads=4, head_size=24, value_size=16).run(attention)

    whole = run((270, 20))
    assert torch.equal(run((270, 1)), whole[19:])
    assert torch.equal(run((260, 10)), whole[:10])
    assert torch.equal(run((33, 1), (270, 1), (5, 5), seeds=(1, 7, 2))[1:2], whole[19:])


def test_others_in_the_batch_change_no_bit() -> None:
    alone = latents(((270, 1),), seeds=(7,)).run(backend())
    among = latents(((33, 1), (270, 1), (30, 1)), seeds=(1, 7, 2)).run(backend())
    assert torch.equal(among[1:2], alone)


def test_blocks_may_be_apart_and_tokens_missing() -> None:
    attention, shape = backend(), backend().latent_cache_shape(3, 4, 5)
    cache = torch.full((3, 30), 7.0)[:, :20].view(shape)
    x = torch.randn(3, 8)[:, :5]
    attention.write_latents(x, cache, torch.tensor([5, -1, 0]))
    expected = torch.full(shape, 7.0)
    expected[1, 1], expected[0, 0] = x[0], x[2]
    assert torch.equal(cache, expected)
    empty = latents(())
    assert replace(empty).run(attention).shape == (0, 5, 33)


def test_what_it_cannot_do() -> None:
    for given, message in (((577,), "latent_size=577"), ((64, "int8"), "kv_cache_dtype=int8")):
        with pytest.raises(ConfigError, match=message):
            backend().latent_cache_shape(1, 16, *given)
