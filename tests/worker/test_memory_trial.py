"""Trial of the machine's memory."""

import pytest

from octavo import _native
from octavo.kernels.memory import map_memory
from octavo.worker import memory_trial
from octavo.worker.memory_trial import LEAST_NBYTES, read_bandwidth


@pytest.mark.parametrize("nbytes", [LEAST_NBYTES, 2**24])
def test_the_bandwidth_is_possible(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_trial, "_SECONDS", 0.001)
    memory = map_memory(nbytes)
    _native.touch_pages(memory.data_ptr(), nbytes)
    assert 1e8 < read_bandwidth(memory) < 1e13
