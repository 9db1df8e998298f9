"""Garbage collections at a start."""

import gc
from collections.abc import Iterator

import pytest

from octavo.system.garbage import modules_stay, no_garbage_collection


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_collections_are_disabled_for_a_while() -> None:
    with no_garbage_collection():
        assert not gc.isenabled()
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_later_collections_do_not_search_imported_modules() -> None:
    with modules_stay():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(made)


def test_a_failed_import_enables_collections_again() -> None:
    with pytest.raises(ImportError), modules_stay():
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
