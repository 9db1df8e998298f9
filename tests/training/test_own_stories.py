from __future__ import annotations

import random
import re

import pytest

from training.own_stories import ANIMALS, BEINGS, PLOTS, cast, own_story


def test_same_seed_same_story() -> None:
    assert own_story(random.Random(1)) == own_story(random.Random(1))
    rng = random.Random(2)
    assert len({own_story(rng)[0] for _ in range(200)}) == 200


@pytest.mark.parametrize("plot", PLOTS)
def test_a_plot_keeps_its_cast_and_ends(plot) -> None:
    rng = random.Random(0)
    for _ in range(40):
        c = cast(rng)
        paragraphs, topics = plot(rng, c)
        assert len(set(topics)) >= 2
        text = " ".join(paragraphs)
        assert c.hero.name in paragraphs[0]
        assert c.hero.name in paragraphs[-1]
        assert c.friend.name in text
        assert c.hero.name != c.friend.name
        assert re.search(r'[.!?]"?$', text)
        assert not re.search(r"[{}]|  |\ba [aeiou]", text), text
        assert text.count('"') % 2 == 0


def test_a_story_is_about_what_it_is_said_to_be() -> None:
    rng = random.Random(0)
    for _ in range(200):
        story, about = own_story(rng)
        for word in re.findall(r"\w+", about):
            if word in ANIMALS + BEINGS or word[0].isupper():
                assert word in story
