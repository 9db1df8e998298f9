"""Trial of the machine's memory."""

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.worker import memory_trial
from octavo.worker.memory_trial import try_memory


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_trial, "_SECONDS", 0.001)


@pytest.mark.parametrize("nbytes", [0, 2**25])
def test_figures_are_possible(nbytes: int) -> None:
    found = try_memory(nbytes)
    assert 1e8 < found.bandwidth < 1e13
    assert found.speed == 1
    assert 0 <= found.exposed <= 1
    assert 0 <= found.exposed_in_blocks <= 1


@pytest.mark.parametrize("exposed", [0.0, 0.25, 1.0])
def test_products_of_one_and_of_several_rows(
    exposed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading an output's weights takes 4 us; computing a row of it 1 us, and eight rows 10 us."""

    def linear(self: NativeOps, x: np.ndarray, weight: object, **_: object) -> None:
        taken.append((x.shape[0], weight.n))  # type: ignore[attr-defined]

    def seconds(run: object) -> float:
        run(0)  # type: ignore[operator]
        rows, outputs = taken.pop()
        computing = {1: 1e-6, 8: 10e-6}[rows]
        if outputs < 4096:
            return computing * outputs
        return (max(computing, 4e-6) + exposed * min(computing, 4e-6)) * outputs

    taken: list[tuple[int, int]] = []
    monkeypatch.setattr(NativeOps, "linear", linear)
    monkeypatch.setattr(memory_trial, "_lower_quartile", seconds)
    monkeypatch.setattr(memory_trial, "_try_attention", lambda memory, bandwidth: 0.5)
    found = try_memory(2**25)
    assert found.bandwidth == pytest.approx(2 * 2048 / 4e-6)
    assert found.exposed == pytest.approx(exposed)
    assert found.exposed_in_blocks == 0.5
