"""Bitmasks: a token that a grammar forbids becomes impossible."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.kernels.base import Ops
from tests.torch_ops import native_ops, reference_ops
from tests.triton import triton_ops

TABLES = [native_ops(), reference_ops(), *triton_ops()]
tables = pytest.mark.parametrize("ops", TABLES, ids=lambda ops: ops.name)


@tables
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000])
def test_grammar_bitmask(ops: Ops, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=(5, vocab_size)).astype(np.float32)
    allowed = rng.random((2, vocab_size)) < 0.5
    words = np.zeros((2, -(-vocab_size // 32)), np.int64)
    for row, token in zip(*np.nonzero(allowed), strict=True):
        words[row, token // 32] |= 1 << (token % 32)
    bitmask = torch.from_numpy(words.astype(np.uint32).view(np.int32))
    expected = logits.copy()
    expected[[3, 1]] = np.where(allowed, logits[[3, 1]], -np.inf)
    got = torch.from_numpy(logits)
    ops.apply_bitmask_(got, bitmask, torch.tensor([3, 1]))
    np.testing.assert_array_equal(got.numpy(), expected)


@tables
def test_more_rows_than_a_chunk(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.kernels.reference._CHUNK", 2 * 64)
    bitmask = torch.tensor([[1 << i, 0] for i in range(7)], dtype=torch.int32)
    logits = torch.zeros(7, 64)
    ops.apply_bitmask_(logits, bitmask, torch.arange(7))
    assert torch.equal(logits.isfinite(), torch.eye(7, 64, dtype=torch.bool))
