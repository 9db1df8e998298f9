"""Trial of the machine's memory."""

from typing import Any

import pytest

from octavo.models.weights import Weight
from octavo.quantization.base import WeightForm
from octavo.quantization.gguf import Blocks
from octavo.quantization.registry import FORMS
from octavo.worker import memory_trial
from octavo.worker.memory_trial import MemoryTrial


@pytest.mark.parametrize("form", [*FORMS.values(), Blocks("q4_k")], ids=lambda form: form.name)
@pytest.mark.parametrize("nbytes", [0, 2**25])
def test_figures_are_possible(
    nbytes: int, form: WeightForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_trial, "_SECONDS", 0.001)
    found = MemoryTrial(nbytes).run(Weight("w", "linear", (192, 512), (), form=form), "bfloat16", 4)
    assert 1e8 < found.bandwidth < 1e13
    assert found.speed == 1
    assert found.exposed >= 0
    assert found.exposed_in_few >= 0
    assert found.exposed_in_blocks >= 0


@pytest.mark.parametrize(("num_reqs", "computing"), [(1, 3.0), (5, 5.0), (8, 8.0)])
@pytest.mark.parametrize("exposed", [0.0, 0.25, 1.0])
def test_products_of_one_and_of_several_rows(
    exposed: float, num_reqs: int, computing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading takes 4 s, and computing a row 1 s. Kernels of 3 rows are the first of several."""
    trial = MemoryTrial(2**22)

    def products(rows: int, memory: Any, weight: Weight, dtype: str) -> float:
        assert rows in (1, computing)
        if memory is trial._zeros:
            return rows
        return max(rows, 4.0) + (exposed if rows > 1 else 0.5) * min(rows, 4.0)

    monkeypatch.setattr(trial, "_products", products)
    monkeypatch.setattr(trial, "_read", lambda: 4.0)
    monkeypatch.setattr(trial, "_attention", lambda bandwidth: 0.75)
    found = trial.run(Weight("w", "linear", (64, 64), ()), "bfloat16", num_reqs)
    assert found.bandwidth == pytest.approx(2**22 / 4)
    assert found.exposed == pytest.approx(exposed)
    assert found.exposed_in_few == 0.5
    assert found.exposed_in_blocks == 0.75


@pytest.mark.parametrize(("whole", "exposed"), [(8.0, 0.0), (9.0, 0.5), (7.0, 0.0)])
def test_attention(whole: float, exposed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing takes 8 s, and reading 2 s."""
    trial, times = MemoryTrial(2**22), iter([8.0, whole])
    monkeypatch.setattr(memory_trial, "_lower_quartile", lambda run: next(times))
    assert trial._attention(2**22 / 2) == exposed
