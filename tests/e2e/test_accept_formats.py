"""Acceptance of two formats; `accept_formats` checks all."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.e2e.accept_formats import CHECKS, accept


@pytest.mark.parametrize(
    ("name", "checks"), [("W4A16 ordered", CHECKS), ("NVFP4", ("PP 2", "draft"))]
)
def test_a_format(name: str, checks: Iterable[str], tmp_path: Path) -> None:
    assert accept(name, tmp_path, checks) == {}
