"""Measurements of the machine's speed."""

import time
from functools import partial

import numpy as np
import pytest

from octavo import _native
from octavo.bench import machine as machine_module
from octavo.bench.machine import Machine, measure_bandwidth, measure_machine, measure_peak
from octavo.kernels.native import NativeOps

SMALL = {"size": 64, "seconds": 0.0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of `time.perf_counter`, which tests advance."""
    now = [0.0]
    monkeypatch.setattr(machine_module.time, "perf_counter", lambda: now[0])
    return now


def test_bandwidth():
    bandwidth, by = measure_bandwidth(2**24, 0.0)
    assert bandwidth > 1e6  # any machine that runs tests reads more than a MB a second
    assert by in machine_module._READS


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(dtype, None) for dtype in ("bfloat16", "float16", "float32")]
    + [("bfloat16", "int8"), ("float32", "int4"), ("bfloat16", "fp8")],
)
def test_peak(dtype, quantization):
    peak, by = measure_peak(dtype, quantization, **SMALL)
    assert peak > 1e6
    assert by in ("Octavo", "numpy")


def test_the_machine_is_what_was_measured(monkeypatch):
    monkeypatch.setattr(machine_module, "measure_bandwidth", lambda: (2e10, "read t1"))
    monkeypatch.setattr(machine_module, "measure_peak", lambda *form: (1e12, "numpy"))
    plain = Machine(2e10, 1e12, "bfloat16", "read t1", "numpy")
    assert measure_machine("bfloat16") == plain
    assert measure_machine("bfloat16", "awq") == plain
    assert measure_machine("bfloat16", "fp8").dtype == "fp8"
    assert measure_machine("bfloat16", "int8").dtype == "int8"


def test_the_floor_is_the_tighter_limit():
    machine = Machine(100.0, 1000.0, "bfloat16", bandwidth_by="plain read", peak_by="Octavo")
    assert machine.floor(100, 0) == 1.0
    assert machine.floor(100, 500) == 1.0
    assert machine.floor(100, 3000) == 3.0


def test_a_slow_kernel_does_not_lower_the_roof(monkeypatch):
    """Octavo's products are compared with the roof, and are not part of it."""
    linear, slow = NativeOps.linear, 0.05

    def crawl(self, *args):
        time.sleep(slow)
        return linear(self, *args)

    monkeypatch.setattr(NativeOps, "linear", crawl)
    monkeypatch.setattr(machine_module, "measure_bandwidth", lambda: (1e10, "plain read"))
    monkeypatch.setattr(machine_module, "measure_peak", partial(measure_peak, **SMALL))
    machine = measure_machine("float32")
    assert machine.peak_by == "numpy"
    assert machine.floor(0, 2 * 64**3) / slow < 0.5


def test_the_peak_is_at_least_octavos(clock, monkeypatch):
    def octavo(self, x, weight):
        clock[0] += 1e-3 * len(x)

    def numpys(x, weight):
        clock[0] += 2e-3 * len(x)

    monkeypatch.setattr(NativeOps, "linear", octavo)
    monkeypatch.setattr(np, "matmul", numpys)
    assert measure_peak("float32", **SMALL) == (pytest.approx(2 * 64**3 / 0.064), "Octavo")


def test_the_upper_quartile_of_ways_in_turn_counts(clock):
    turns = []
    seconds = {"even": iter([9, 4, 9, 4, 9, 4, 9, 4]), "odd": iter([9, 1, 9, 6, 9, 6, 9, 6])}

    def way(name):
        def run():
            turns.append(name)
            clock[0] += next(seconds[name])

        return run

    by, taken = machine_module._quickest({name: way(name) for name in seconds}, 80.0)
    assert turns == ["even", "even", "odd", "odd"] * 4  # the first of two runs does not count
    # The minimum would have been 1.
    assert (by, taken) == ("even", 4.0)


@pytest.mark.parametrize("locality", range(-1, 4))
@pytest.mark.parametrize("lines", [0, 1, 2**14, 3 * 2**14 + 5])
def test_memory_is_read_to_the_last_byte(locality, lines):
    numbers = np.random.default_rng(0).integers(2**64, size=8 * lines, dtype=np.uint64)
    want = int(np.bitwise_xor.reduce(numbers))
    assert _native.read_memory(numbers.ctypes.data, numbers.nbytes, locality) == want


def test_reads_of_another_kind_are_refused():
    memory = np.zeros(64, np.uint8)
    for nbytes, locality in ((63, 0), (64, -2), (64, 4)):
        with pytest.raises(ValueError, match="whole cache lines"):
            _native.read_memory(memory.ctypes.data, nbytes, locality)


def test_the_better_of_two_measurements():
    first = Machine(2e10, 1e12, "bfloat16", "read t1", "numpy")
    second = Machine(3e10, 5e11, "bfloat16", "plain read", "Octavo")
    best = Machine(3e10, 1e12, "bfloat16", "plain read", "numpy")
    assert first.best(second) == second.best(first) == best
