from collections.abc import Iterator

import pytest

from octavo.kernels import native


@pytest.fixture
def one_and_two_threads() -> Iterator[tuple[int, int]]:
    """Yield thread counts to compare; restore the default afterwards."""
    yield (1, 2)
    native.set_num_threads(0)
