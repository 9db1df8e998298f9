"""Instruction sets against llama.cpp: measurements, the table, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import widths
from peers.installing import write_marker
from peers.llama import Llama
from peers.results import load
from peers.runner import Runner

from octavo.kernels.native import available_isas
from tests.benchmarks.fakes import Bench

VERSION = {"version": "1.0", "versions": {}}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return models without weights and a llama.cpp that needs no build."""
    (tmp_path / "llama").mkdir()
    write_marker(tmp_path / "llama", VERSION)
    monkeypatch.setattr(Llama, "build_kernels", lambda self, root: None)
    monkeypatch.setattr(widths, "make_model", lambda *args: None)
    return Bench(tmp_path)


def run(bench: Bench, *words: str) -> int:
    folders = ["--models", str(bench.models), "--out", str(bench.out)]
    return widths.main([*folders, "--data", "/nonexistent", *words])


def test_what_is_measured(bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def measure(self: Runner, wanted: Any, repeats: int) -> None:
        assert list(self.peers) == ["octavo-portable", "llama-portable"]
        assert [group.weights for group in wanted] == ["bf16", "int8", "int4"]
        for engine, factor in (("octavo-portable", 1.0), ("llama-portable", 1.5)):
            for group in wanted:
                for case in group.cases:
                    figures = {"tpot_ms": 10 * factor, "prefill_tok_s": 60 / factor}
                    self.results.add_sample(engine, case.name, 0, 0, figures)

    monkeypatch.setattr(Runner, "run", measure)
    assert run(bench, "--isas", "portable", "--quick") == 0
    out = capsys.readouterr().out
    name = "smollm2-135m"
    for line in (
        f"| W1 {name} batch 1: ms a token | portable | 10.0 | 15.0 | 1.50x |",
        f"| W1 {name} batch 8: ms a token | portable | 10.0 | 15.0 | 1.50x |",
        f"| W5 {name}: tokens/s | portable | 60 | 40 | 1.50x |",
        f"| W1q {name} int8 batch 1: ms a token | portable | 10.0 | 15.0 | 1.50x |",
        f"| W1q {name} int4 batch 8: ms a token | portable | 10.0 | 15.0 | 1.50x |",
    ):
        assert line in out
    assert load(bench.out)["versions"]["llama"] == VERSION


def test_all_instruction_sets_in_turn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def fail(self: Runner, wanted: Any, repeats: int) -> None:
        ran.extend(self.peers)
        self.results.add_failure(ran[0], wanted[0].cases[0].name, 0, "no memory")

    monkeypatch.setattr(Runner, "run", fail)
    assert run(bench) == 1
    isas = [isa for isa in available_isas() if isa != "amx_emulated"]
    assert ran == [f"{e}-{isa}" for isa in isas for e in ("octavo", "llama")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--isas", "vliw"], "This machine has no vliw; it has "),
        (["--models", "/nonexistent"], "llama.cpp is not installed in /llama"),
        (["--sizes", "gpt-5"], "There is no model in"),
    ],
)
def test_bad_input(bench: Bench, capsys: Any, words: list[str], message: str) -> None:
    assert run(bench, *words) == 1
    assert message in capsys.readouterr().err
    assert not bench.out.exists()
