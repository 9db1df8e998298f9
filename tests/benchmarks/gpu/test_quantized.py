from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

from gpu import quantized
from gpu.base import Sizes

from octavo.kernels.triton.ops import TritonOps
from tests.benchmarks.gpu.harness import put_card, run_part

SIZES = Sizes(linear=48, linear_rows=(1,))


def test_products(events: list[int], tmp_path: Path) -> None:
    put_card(tmp_path)
    rows = run_part("quantized", tmp_path, sizes=SIZES)
    assert len(rows) == 3 * len(quantized.FORMATS)
    for checked, experts, timed in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert checked.good, checked
        assert experts.good, experts
        assert timed.good is None
        assert "%" in timed.figure


def test_it_finds_what_is_wrong(
    events: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TritonOps.linear

    def wrong(self, x, *args):
        y = right(self, x, *args)
        return y + y * (1e-3 if len(x) > 1 else 0)

    put_card(tmp_path)
    monkeypatch.setattr(TritonOps, "linear", wrong)
    for row in run_part("quantized", tmp_path, sizes=SIZES)[::3]:
        assert row.good is False, row
        assert "other bits" in row.figure
