"""Random models of `fuzz_models`; `OCTAVO_TEST_SEED` chooses others."""

import random
from pathlib import Path

import pytest

from tests.conftest import SEED
from tests.e2e.fuzz_models import check_encoder, check_model

NUMBERS = random.Random(SEED).sample(range(2**32), 33)


@pytest.mark.parametrize("number", NUMBERS[:25])
def test_every_legal_model_starts_and_answers(number: int, tmp_path: Path) -> None:
    assert not check_model(number, tmp_path).startswith("refused")


@pytest.mark.parametrize("number", NUMBERS[25:])
def test_every_legal_encoder_starts_and_answers(number: int, tmp_path: Path) -> None:
    assert not check_encoder(number, tmp_path).startswith("refused")
