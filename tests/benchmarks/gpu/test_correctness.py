from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

from gpu import correctness
from gpu.base import Sizes

from tests.benchmarks.gpu.harness import NativeCpu, run_part


def test_parity(events: list[int], tmp_path: Path) -> None:
    """The native kernels are right, so the check has to pass."""
    sizes = Sizes(prompts=(1, 30, 70), answer=8)
    exact, rounded = run_part("parity", tmp_path, NativeCpu, sizes)
    assert exact.good
    assert exact.figure.startswith("24 of 24 greedy tokens equal")
    assert rounded.good, rounded.figure


def test_parity_finds_what_is_wrong(
    events: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def wrong(bench, model, **settings):
        right = (file := Path(model, "config.json")).read_text()
        file.write_text(json.dumps(json.loads(right) | {"rms_norm_eps": 0.5}))
        with engine(bench, model, **settings) as llm:
            file.write_text(right)
            yield llm

    engine = correctness.engine
    monkeypatch.setattr(correctness, "engine", wrong)
    sizes = Sizes(prompts=(1, 30), answer=4)
    for row in run_part("parity", tmp_path, NativeCpu, sizes):
        assert row.good is False, row.figure


def test_invariance(events: list[int], tmp_path: Path) -> None:
    checked, shown = run_part("invariance", tmp_path)
    assert (checked.aim, checked.good) == ("the same bits", True)
    assert (shown.aim, shown.good) == ("", None)
