from __future__ import annotations

import itertools
import json
import random
import re

import pytest

from training import synthetic


def test_same_seed_same_text() -> None:
    def texts(seed: int) -> list[str]:
        rng = random.Random(seed)
        return [synthetic.render(synthetic.conversation(rng)) for _ in range(50)]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_json_records_parse() -> None:
    rng = random.Random(0)
    for _ in range(300):
        assert isinstance(json.loads(synthetic.json_record(rng)[1]), dict)
        assert "answer" in json.loads(synthetic.json_answer(rng)["messages"][-1]["content"])


def test_tool_calls_parse_and_name_a_given_tool() -> None:
    rng = random.Random(0)
    calls = 0
    for _ in range(300):
        made = synthetic.tool_call(rng)
        given = {t["function"]["name"]: t["function"]["parameters"] for t in made["tools"]}
        text = synthetic.render(made)
        for body in re.findall(r"<tool_call>(.*?)</tool_call>", text):
            call = json.loads(body)
            assert set(call["arguments"]) == set(given[call["name"]]["properties"])
            calls += 1
    assert calls > 200


def test_sums_are_right() -> None:
    rng = random.Random(0)
    drilled = [given + result for given, result in synthetic.sums(rng, 300)]
    for said in [*(synthetic.arithmetic(rng)[1] for _ in range(300)), *drilled]:
        left, right = said.split("=")
        a, sign, b = left.split()
        value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
        assert value == int(right)
        assert value >= 0


def test_lists_have_no_word_twice() -> None:
    rng = random.Random(0)
    for _ in range(300):
        said = re.findall(r"[a-z]+", synthetic.listing(rng)[1].lower().replace(" and ", " "))
        assert 2 <= len(said) == len(set(said)) <= 5


@pytest.mark.parametrize("maker", [maker for maker, _ in synthetic.SKILLS])
def test_every_skill_gives_full_text(maker) -> None:
    rng = random.Random(0)
    for _ in range(100):
        question, answer = maker(rng)
        assert question
        assert answer
        assert not re.search(r"[{}]", question), "a placeholder was left"


def test_turns_alternate() -> None:
    rng = random.Random(0)
    for _ in range(200):
        roles = [m["role"] for m in synthetic.conversation(rng)["messages"]]
        assert roles[-1] == "assistant"
        assert all(a != b for a, b in itertools.pairwise(roles))


def test_story_on_demand_names_what_it_is_about() -> None:
    rng = random.Random(0)
    story = "Once upon a time, there was a girl named Mia. She had a kite. The kite was red."
    abouts = {synthetic.story_about(story, "kite", rng) for _ in range(60)}
    assert any("a kite" in about for about in abouts)
    assert any("Mia" in about for about in abouts)
    asked = synthetic.story_request(story, "a kite", rng)["messages"]
    assert "a kite" in asked[-2]["content"]
    assert asked[-1]["content"] == story
    rest = synthetic.story_continuation(story, rng)
    assert rest is not None
    assert rest["messages"][-1]["content"].startswith("She had a kite.")
