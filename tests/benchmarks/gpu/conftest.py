import pytest
import torch

from tests.benchmarks.gpu.harness import Event


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the clock of torch.cuda; return the slept cycles."""
    cycles: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append, raising=False)
    Event.asked = 0
    return cycles
