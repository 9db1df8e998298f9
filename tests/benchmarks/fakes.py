"""Fake engines and fake models for the tests of the comparison."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from peers.base import Case, Peer, Row, Setup
from peers.cases import DRAFT, SMALL, STORIES, TINY, TOY, Group
from peers.quantized import FORMATS
from peers.results import Results
from peers.runner import Runner

HERE = Path(__file__).parent
TINYLLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
MACHINE = {
    "bandwidth_gb_s": 40.0,
    "bandwidth_by": "t1",
    "peak_gflop_s": 800.0,
    "peak_by": "torch",
}


class FakePeer(Peer):
    """Engine with a certain behaviour, run like the real ones; see `fake_driver.py`."""

    def __init__(self, name: str, folder: Path, behaviour: str = "well") -> None:
        self.name = name
        self.title = name
        self.behaviour = behaviour
        self.journal = folder / f"{name}.journal"

    @property
    def starts(self) -> int:
        """Number of starts of its Python API."""
        return len(self.journal.read_text().splitlines()) if self.journal.exists() else 0

    def install(self, root: Path, models: Path) -> None:
        """Install nothing."""

    def driver(self, root: Path) -> list[str]:
        """Return the fake driver."""
        script = str(HERE / "fake_driver.py")
        return [sys.executable, script, self.behaviour, str(self.journal)]

    def server(self, root: Path, setup: Setup, port: int) -> list[str]:
        """Return the fake server."""
        return [sys.executable, str(HERE / "fake_server.py"), self.behaviour, str(port)]


class Bench:
    """Comparison of fakes in a separate folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "results.json"
        self.models = folder / "models"
        for name in (TINY, SMALL, TOY, *STORIES, DRAFT, *(f"{TINY}-{form}" for form in FORMATS)):
            (self.models / name).mkdir(parents=True)
            (self.models / name / "config.json").write_text(json.dumps(TINYLLAMA))
        self.a = FakePeer("octavo", folder)
        self.b = FakePeer("vllm", folder)

    def results(self, *, resume: bool = False, **settings: Any) -> Results:
        """Return the results file."""
        return Results(self.out, {"quick": False, "cases": {}, **settings}, resume=resume)

    def runner(self, results: Results, *, silence: float = 30.0) -> Runner:
        """Return a runner of both fakes."""
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        return Runner(
            {"octavo": self.a, "vllm": self.b},
            self.folder,
            self.models,
            results,
            logs,
            quick=True,
            silence=silence,
            measure_machine=lambda threads, folder: MACHINE,
        )


def latency_group(name: str = "one", iterations: int = 2, **settings: Any) -> Group:
    """Return a group of one latency case of two requests."""
    rows = (Row([300, 301], 4), Row([302], 6))
    case = Case(f"W1 {name}", "latency", "w1", iterations, rows=rows)
    return Group(name, "toy", (case,), **settings)
