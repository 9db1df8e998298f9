from collections.abc import Iterator

import pytest

from octavo.kernels import native


@pytest.fixture(params=native.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test once for each instruction set of this processor, down to portable code."""
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)
