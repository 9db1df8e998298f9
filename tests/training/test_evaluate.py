from __future__ import annotations

import random

import pytest

from training import evaluate, synthetic


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("1. dog\n2. cat\n3. cow", True),
        ("Dog, cat and cow.", True),
        ("1. dog\n2. cat\n3. cat", False),
        ("1. dog\n2. cat", False),
        ("1. dog\n2. cat\n3. spoon", False),
    ],
)
def test_a_list_is_as_long_as_asked_and_has_no_word_twice(
    monkeypatch: pytest.MonkeyPatch, said: str, right: bool
) -> None:
    example = ("List three animals.", "1. lion\n2. bear\n3. fox")
    monkeypatch.setattr(synthetic, "listing", lambda rng: example)
    prompt, judge = evaluate.CASES["lists"](random.Random(0))
    assert "List three animals." in prompt
    assert judge(said) is right


@pytest.mark.parametrize("kind", evaluate.CASES)
def test_another_answer_is_wrong(kind: str) -> None:
    _, judge = evaluate.CASES[kind](random.Random(0))
    assert not judge("The end.")


def test_the_right_answers_are_right() -> None:
    for kind, maker in (("arithmetic", synthetic.arithmetic), ("facts", synthetic.fact)):
        _, judge = evaluate.CASES[kind](random.Random(3))
        assert judge(maker(random.Random(3))[1])
    for seed in range(50):
        _, judge = evaluate.CASES["lists"](random.Random(seed))
        assert judge(synthetic.listing(random.Random(seed))[1])
