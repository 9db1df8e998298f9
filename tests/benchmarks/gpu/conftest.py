import pytest
import torch

from tests.benchmarks.gpu.harness import Event


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stand-ins for what of torch.cuda times; the cycles that were slept."""
    cycles: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append, raising=False)
    Event.asked = 0
    return cycles
