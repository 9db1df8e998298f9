from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

from gpu.base import Card

from tests.benchmarks.gpu.harness import put_card, run_part


def test_the_card(events: list[int], tmp_path: Path) -> None:
    rows = run_part("card", tmp_path)
    assert [row.what for row in rows] == [
        "card: copy, read and written",
        "card: bfloat16 product of 16^3",
    ]
    card = Card(**json.loads((tmp_path / "card.json").read_text()))
    assert card.name == "a CPU"
    assert card.bandwidth > 0
    assert card.peak > 0
    first = events[0]
    assert events == [first, 2 * first, 4 * first, 4 * first], "late twice, then in time"


def test_kernels(events: list[int], tmp_path: Path) -> None:
    put_card(tmp_path)
    rows = {row.what: row for row in run_part("kernels", tmp_path)}
    assert len(rows) == 11
    assert rows["kernel: attention, decode of 1 x 300"].aim == "70%"
    assert rows["kernel: attention, decode of 2 x 20"].good is None
    assert rows["kernel: attention, decode of 1 x 20, FP8 cache"].good is None
    assert "matrix peak" in rows["kernel: attention, prefill of 20"].figure
    for row in rows.values():
        assert "%" in row.figure, row
