"""The place where a prompt differs from an earlier one."""

from array import array

import pytest

from octavo.server.prompt_difference import find_difference, volatile_at
from tests.server.fake_engine import make_tokenizer


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Today is 2026-11-2^8.", "a date or time"),
        ("Now: 2026-11-28T12:3^0:11Z", "a date or time"),
        ("at 12:^30", "a date or time"),
        ("Nov 2^8, 2026", "a date or time"),
        ("on 2^8 November 2026", "a date or time"),
        ("time=17958^34551", "a date or time"),
        ("11/2^8/2026", "a date or time"),
        ("id 3f2504e0-4f89-11d3-9^a0c-0305e82c3301", "an id"),
        ("session_0a1b2^c3d4e5f", "an id"),
        ("x-anthropic-billing-header: cc_version=2; cch=^ab1;", "an agent's billing header"),
        ("Today is 2026-11-28. A^ dog", None),
        ("2026-11-28\nthe second li^ne", None),
        ("a perfectly ordinary sent^ence", None),
        ("internationali^zation", None),
        ("^", None),
    ],
)
def test_what_often_changes_has_a_name(text, kind):
    position = text.index("^")
    assert volatile_at(text.replace("^", ""), position) == kind


@pytest.mark.parametrize("with_texts", [True, False])
def test_texts_are_around_the_difference_and_only_on_request(with_texts):
    tokenizer = make_tokenizer()
    same = "abc " * 50
    one, other = (tokenizer.encode(f"{same}{day} end" + "z" * 200) for day in ("12:01", "12:02"))
    token = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    found = find_difference(
        tokenizer,
        array("i", one).tobytes(),
        array("i", other).tobytes(),
        token,
        with_texts=with_texts,
    )
    assert found.pop("volatile") == "a date or time"
    if not with_texts:
        assert found == {}
        return
    assert "abc 12:01 end" in found["text"]
    assert "abc 12:02 end" in found["earlier_text"]
    assert len(found["text"]) < 100
