from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

from gpu import families
from gpu.base import FULL, Sizes

from tests.benchmarks.gpu.harness import NativeCpu, run_part


def test_families(events: list[int], tmp_path: Path) -> None:
    """The native kernels are right, so the check has to pass."""
    assert set(FULL.families) == set(families.FAMILIES)
    rows = run_part("families", tmp_path, NativeCpu, Sizes(prompts=(1, 30), answer=4))
    assert len(rows) == 2 * len(families.FAMILIES)
    for row in rows:
        assert row.good, row
    assert all(row.figure.startswith("the first 8 of 8 equal") for row in rows[::2])


def test_it_finds_what_is_wrong(
    events: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "mixture": {"num_experts_per_tok": 2},
        "latent attention and mixture": {"routed_scaling_factor": 2.0},
        "gated delta rule": {"rope_theta": 100.0},
    }

    @contextmanager
    def wrong(bench, model, **settings):
        right = (file := Path(model, "config.json")).read_text()
        file.write_text(json.dumps(json.loads(right) | changes[case]))
        with engine(bench, model, **settings) as llm:
            file.write_text(right)
            yield llm

    engine = families.engine
    monkeypatch.setattr(families, "engine", wrong)
    for case in changes:
        sizes = Sizes(prompts=(1, 30), answer=4, families=(case,))
        exact, _ = run_part("families", tmp_path, NativeCpu, sizes)
        assert exact.good is False, exact
