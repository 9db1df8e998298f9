from octavo.checkpoints.base import shorten_names


def test_names_in_messages() -> None:
    assert (
        shorten_names(["a.weight", "", "b\0", "x" * 999]) == f"a.weight, '', 'b\\x00', {'x' * 200}"
    )
    assert shorten_names(list("abcdefgh")) == "a, b, c, d, e, f and 2 more"
