"""Random models of `fuzz_models`, others in each run."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.e2e.fuzz_models import check_encoder, check_model


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_every_legal_model_starts_and_answers(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_model(seed, Path(folder))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32))
def test_every_legal_encoder_starts_and_answers(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_encoder(seed, Path(folder))
