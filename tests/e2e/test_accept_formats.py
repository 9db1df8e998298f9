"""Acceptance of two formats; `accept_formats` checks all."""

from pathlib import Path

import pytest

from tests.e2e.accept_formats import accept


@pytest.mark.parametrize("name", ["W4A16 ordered", "NVFP4"])
def test_a_format(name: str, tmp_path: Path) -> None:
    assert accept(name, tmp_path) == {}
