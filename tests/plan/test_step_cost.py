"""Model of step times."""

import pytest

from octavo.plan.step_cost import KernelCost, Load, Machine, StepCost, distinct_experts

COST = StepCost(
    (
        KernelCost("linear 64x64", 2.0, 30.0),
        KernelCost("linear_q 64x64", 1.0, 50.0),
        KernelCost("attention", 4.0, 0.0),
        KernelCost("rms_norm", 0.5, 0.0),
    ),
    host=0.25,
)


def test_a_kernel_computes_while_it_reads():
    assert COST.parts(Machine(10.0)) == {
        "products": 3.0 + 5.0,
        "attention": 4.0,
        "other kernels": 0.5,
        "host": 0.25,
    }
    assert COST.time(Machine(10.0)) == 12.75


def test_a_share_of_the_smaller_one_is_not_hidden():
    assert KernelCost("linear 64x64", 2.0, 30.0, 0.5).time(Machine(10.0)) == 3.0 + 0.5 * 2
    assert KernelCost("attention", 4.0, 20.0, 0.25).time(Machine(10.0)) == 4.0 + 0.25 * 2


@pytest.mark.parametrize(
    ("seconds", "computing", "nbytes", "exposed"),
    [
        (4.0, 2.0, 30.0, 0.5),
        (3.0, 2.0, 30.0, 0.0),
        (2.5, 2.0, 25.0, 0.0),  # the caches had some
        (1.0, 1.0, 10.0, 0.0),
    ],
)
def test_the_cost_fits_the_measured_time(
    seconds: float, computing: float, nbytes: float, exposed: float
) -> None:
    machine = Machine(10.0)
    found = KernelCost("linear 64x64", 2.0, 30.0).fit(seconds, machine)
    assert found == KernelCost("linear 64x64", computing, nbytes, exposed)
    assert found.time(machine) == seconds


def test_the_cost_of_a_step_fits_the_measured_times():
    machine = Machine(10.0)
    measured = StepCost((KernelCost("linear 64x64", 4.0, 0.0), KernelCost("rms_norm", 0.75, 0.0)))
    found = COST.fit(measured, machine)
    times = {kernel.name: kernel.time(machine) for kernel in found.kernels}
    assert times == {
        "linear 64x64": 4.0,
        "linear_q 64x64": 5.0 + 0.5 * 1,  # hides as much as the other product
        "attention": 4.0,
        "rms_norm": 0.75,
    }
    assert found.host == COST.host


def test_other_steps_hide_as_much():
    like = StepCost((KernelCost("linear 8x8", 2.0, 30.0, 0.5), KernelCost("linear 4x4", 4.0, 10.0)))
    kernels = ("linear 8x8", "linear_q 4x4", "experts", "rms_norm")
    found = StepCost(tuple(KernelCost(name, 1.0, 1.0) for name in kernels))
    exposed = [kernel.exposed for kernel in found.expose(like, Machine(10.0)).kernels]
    assert exposed == [0.5, pytest.approx(0.5 * 2 / 3), 0.0, 0.0]


def test_calls_of_a_kernel_are_added():
    calls = [KernelCost("a", 1.0, 2.0), KernelCost("b", 1.0, 1.0), KernelCost("a", 3.0, 4.0)]
    assert StepCost.of(calls).kernels == (KernelCost("a", 4.0, 6.0), KernelCost("b", 1.0, 1.0))


def test_another_machine_computes_and_reads_faster():
    assert COST.time(Machine(1e9, speed=2.0)) == (2 + 1 + 4 + 0.5) / 2 + 0.25
    assert COST.time(Machine(20.0, speed=1e9)) == pytest.approx(80 / 20 + 0.25)


def test_distinct_experts():
    assert distinct_experts(128, 8, 1) == pytest.approx(8)
    assert distinct_experts(4, 2, 2) == pytest.approx(3)
    assert distinct_experts(8, 2, 10**6) == pytest.approx(8)


def test_steps_of_a_load():
    load = Load(input_len=1000, output_len=20, batch_size=8)
    assert load.decode(2) == ((1010, 1), (1010, 1))
    assert load.prompts(8, 512) == (((0, 512),), ((488, 512),))
    assert load.prompts(1, 2048) == (((0, 1000),),) * 2
    assert load.prompts(8, 2048) == (((0, 1000),) * 2,) * 2


def test_steps_of_a_load_with_cached_prefixes():
    load = Load(input_len=1000, output_len=20, batch_size=8).without(0.75)
    assert load.prompts(8, 512) == (((750, 250),) * 2,) * 2
    assert load.prompts(1, 100) == (((750, 100),), ((900, 100),))
    everything = Load(input_len=1000, output_len=20, batch_size=8).without(1.0)
    assert everything.prompts(1, 512) == (((999, 1),),) * 2


def test_steps_of_drafts():
    assert Load(1000, 20, 8).decode(2, 5) == ((1010, 5), (1010, 5))


def test_time_to_the_first_token():
    long = Load(1024, 1, 2)
    assert long.first_token_time(1.0, 3.0, 1, 512) == pytest.approx(4.0)
    assert long.first_token_time(1.0, 3.0, 2, 512) == pytest.approx((4 + 8) / 2)
    # The second prompt of a step ends with it; the last step is shorter.
    short = Load(100, 1, 3)
    assert short.first_token_time(2.0, 2.0, 3, 200) == pytest.approx((2 + 2 + 3) / 3)
    assert short.first_token_time(1.0, 1.0, 1, 512) == pytest.approx(1.0)
