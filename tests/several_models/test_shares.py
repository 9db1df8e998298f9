"""Shares of several models in the memory."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.several_models.shares import Needs, divide, total_of

MIB = 2**20


def needs(name, fixed, least, wish):
    return Needs(name, fixed * MIB, least * MIB, wish * MIB)


def test_everything_fits():
    models = [needs("a", 100, 1, 50), needs("b", 10, 1, 5)]
    assert divide(models, 165 * MIB, 2) == [50 * MIB, 5 * MIB]


def test_the_caches_share_what_is_left():
    models = [needs("a", 100, 1, 500), needs("b", 100, 1, 500), needs("c", 10, 1, 5)]
    assert divide(models, 315 * MIB, 3) == [50 * MIB, 50 * MIB, 5 * MIB]


def test_no_cache_is_too_small_for_a_request():
    models = [needs("a", 0, 80, 500), needs("b", 0, 1, 500)]
    assert divide(models, 100 * MIB, 2) == [80 * MIB, 20 * MIB]


def test_one_model_at_a_time_may_use_all_memory():
    models = [needs("a", 100, 1, 500), needs("b", 50, 1, 500)]
    assert divide(models, 200 * MIB, 1) == [100 * MIB, 100 * MIB]
    assert divide(models, 200 * MIB, 2) == [25 * MIB, 25 * MIB]


def test_models_that_do_not_fit():
    models = [needs("a", 100, 1, 500), needs("b", 50, 2, 500)]
    with pytest.raises(ConfigError) as error:
        divide(models, 152 * MIB, 2)
    for part in ("need 153 MiB", "152 MiB may", "a 100 MiB", "b 50 MiB", "max_loaded_models"):
        assert part in str(error.value)
    assert divide(models, 152 * MIB, 1) == [52 * MIB, 52 * MIB]
    with pytest.raises(ConfigError) as error:
        divide(models, 99 * MIB, 1)
    assert "max_loaded_models" not in str(error.value)


MODEL = st.tuples(st.integers(0, 1000), st.integers(0, 50), st.integers(0, 500)).map(
    lambda sizes: Needs("m", sizes[0], sizes[1], sizes[1] + sizes[2])
)


@given(st.lists(MODEL, min_size=1, max_size=5), st.integers(1, 5), st.integers(0, 5000))
def test_any_models_that_are_loaded_at_once_fit(models, most, limit):
    try:
        caches = divide(models, limit, most)
    except ConfigError:
        assert total_of(models, [m.least for m in models], most) > limit
        return
    totals = [m.fixed + cache for m, cache in zip(models, caches, strict=True)]
    for loaded in itertools.combinations(totals, min(most, len(models))):
        assert sum(loaded) <= limit
    for model, cache in zip(models, caches, strict=True):
        assert model.least <= cache <= model.wish
