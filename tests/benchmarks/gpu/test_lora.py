from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

from gpu import lora

from octavo.kernels.triton.ops import TritonOps
from tests.benchmarks.gpu.harness import put_card, run_part


def test_adapters(events: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "ROWS", 20)
    put_card(tmp_path)
    rows = run_part("lora", tmp_path)
    assert [row.good for row in rows] == [True] * 3 + [None] * 8 + [True] * 8, rows
    assert all("of the product's time" in row.figure for row in rows[3:11])


def test_it_finds_what_is_wrong(
    events: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TritonOps.add_lora

    def wrong(self, out, x, slots, table):
        right(self, out, x, slots, table)
        out += 1e-3 * (len(x) - 1) * out  # so an answer depends on the size of its steps

    monkeypatch.setattr(lora, "ROWS", 20)
    put_card(tmp_path)
    monkeypatch.setattr(TritonOps, "add_lora", wrong)
    checks = [row for row in run_part("lora", tmp_path) if row.good is not None]
    assert [row.good for row in checks[:7]] == [False] * 3 + [True] * 4
    assert "other bits" in checks[0].figure
    assert checks[8].good is False


def test_it_finds_missing_gains_and_offsets(
    events: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TritonOps.pack_lora

    def wrong(self, a, b, scale, dtype, out=None, affine=None):
        return right(self, a, b, scale, dtype, out)

    monkeypatch.setattr(lora, "ROWS", 20)
    put_card(tmp_path)
    monkeypatch.setattr(TritonOps, "pack_lora", wrong)
    checks = [row for row in run_part("lora", tmp_path) if row.good is not None]
    assert [row.good for row in checks] == [False] * 3 + [True] * 4 + [False] + [True] * 3
