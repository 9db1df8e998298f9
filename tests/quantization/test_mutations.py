"""Samples of the damaged checkpoints of `mutations`, which checks 2,000 of each format."""

from pathlib import Path

import pytest

from tests.quantization.formats import FORMATS
from tests.quantization.mutations import Corpus

COUNT = 24


@pytest.mark.parametrize("name", FORMATS)
def test_mutations(name: str, tmp_path: Path) -> None:
    corpus = Corpus(name, tmp_path)
    messages = [corpus.check(number) for number in range(COUNT)]
    refused = sum(message is not None for message in messages)
    assert COUNT // 3 < refused < COUNT
