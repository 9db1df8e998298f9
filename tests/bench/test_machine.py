"""What the machine can do."""

import pytest

from octavo.bench.machine import Machine, measure_machine


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("bfloat16", None), ("float32", None), ("bfloat16", "int8")]
)
def test_measures_with_the_models_kernels(dtype, quantization):
    machine = measure_machine(dtype, quantization, read_nbytes=2**24, peak_size=64, repeats=2)
    assert machine.dtype == (quantization or dtype)
    # Any machine that tests run on reads more than a MB and computes more than a MFLOP a second.
    assert machine.bandwidth > 1e6
    assert machine.peak > 1e6


def test_the_floor_is_the_tighter_limit():
    machine = Machine(bandwidth=100.0, peak=1000.0, dtype="bfloat16")
    assert machine.floor(100, 0) == 1.0
    assert machine.floor(100, 500) == 1.0
    assert machine.floor(100, 3000) == 3.0
