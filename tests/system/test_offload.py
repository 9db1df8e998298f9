"""Pieces of long lists, between which other threads may run."""

import pytest

from octavo.errors import RequestError
from octavo.server.schema import check_token_ids
from octavo.system.offload import pieces


@pytest.mark.parametrize("length", [0, 1, 2**15, 2**15 + 1, 100_000])
def test_pieces_are_the_list(length: int) -> None:
    found = list(pieces(list(range(length))))
    assert [i for piece in found for i in piece] == list(range(length))
    assert all(0 < len(piece) <= 2**15 for piece in found)


@pytest.mark.parametrize("wrong", [-1, 1.5, True, 2**40])
def test_the_last_of_many_ids_is_checked(wrong: object) -> None:
    with pytest.raises(RequestError, match=r"prompt\[70000\]="):
        check_token_ids([*range(70_000), wrong], "prompt")
