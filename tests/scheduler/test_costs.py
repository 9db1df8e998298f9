from octavo.scheduler.costs import PrefillCosts


def measured(load=1.0, compute=2.0, tokens=100):
    costs = PrefillCosts()
    costs.load_began("a", tokens, 0.0)
    costs.load_ended("a", load)
    costs.step_ended(tokens, 1, 0.0, compute)
    return costs


def test_loading_is_tried_until_both_are_known():
    costs = PrefillCosts()
    assert not costs.computing_is_cheaper
    costs.step_ended(100, 1, 0.0, 0.001)
    assert not costs.computing_is_cheaper
    costs.load_began("a", 100, 0.0)
    assert not costs.computing_is_cheaper
    costs.load_ended("a", 5.0)
    assert costs.computing_is_cheaper


def test_the_time_for_a_token_decides():
    assert measured(2.0, 1.0).computing_is_cheaper
    assert not measured(1.0, 2.0).computing_is_cheaper
    costs = measured(1.0, 2.0)
    costs.step_ended(10_000, 4, 0.0, 2.0)  # the same time, for a hundred times the tokens
    for _ in range(10):
        costs.step_ended(10_000, 4, 0.0, 2.0)
    assert costs.computing_is_cheaper


def test_steps_that_decode_tell_nothing():
    costs = measured(1.0, 2.0)
    for _ in range(100):
        costs.step_ended(60, 4, 0.0, 0.0)
    assert not costs.computing_is_cheaper
    costs.step_ended(64, 4, 0.0, 0.0)
    for _ in range(20):
        costs.step_ended(64, 4, 0.0, 0.0)
    assert costs.computing_is_cheaper


def test_one_slow_load_does_not_decide():
    costs = measured(1.0, 2.0)
    costs.load_began("b", 100, 10.0)
    costs.load_ended("b", 13.0)
    assert not costs.computing_is_cheaper
    for i in range(10):
        costs.load_began("b", 100, 10.0 * i)
        costs.load_ended("b", 10.0 * i + 3)
    assert costs.computing_is_cheaper


def test_loads_overlap():
    costs = PrefillCosts()
    costs.load_began("a", 100, 0.0)
    costs.load_began("b", 50, 1.0)
    costs.load_ended("a", 4.0)  # 0.04
    costs.load_ended("b", 3.0)  # 0.04
    costs.step_ended(100, 1, 0.0, 4.1)
    assert not costs.computing_is_cheaper
    costs.step_ended(100, 1, 0.0, 3.0)
    assert costs.computing_is_cheaper
