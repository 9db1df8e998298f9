from __future__ import annotations

import random
from pathlib import Path

import pytest

from training.corpus import (
    LOWER,
    TrueCaser,
    find_topics,
    load_corpus,
    lowercase_stories,
    repair,
    swap_names,
)

CASED = (
    "One day, a girl named Lily saw a spot. The dog, Rex, and Lily ran, and Rex, and Lily sang."
    " They saw the spot, and the spot was red. I see a spot."
)


def test_truecaser_restores_sentences_names_and_i() -> None:
    caser = TrueCaser(CASED)
    lower = 'once lily and rex saw a spot. "can i go?" lily\'s mom said. "yes!" she said.'
    assert caser(lower) == (
        'Once Lily and Rex saw a spot. "Can I go?" Lily\'s mom said. "Yes!" she said.'
    )


def test_a_named_animal_gets_its_capital_in_its_own_story_only() -> None:
    caser = TrueCaser(CASED)
    assert caser("a dog named spot ran. then spot sat.") == "A dog named Spot ran. Then Spot sat."


def test_repair_of_broken_quotes() -> None:
    assert repair("â€œit isnâ€™t,â€\x9d he said“") == '"it isn\'t," he said"'


def test_lowercase_stories_start_after_the_overlap_and_split() -> None:
    text = (
        "once upon a time, one.\nonce upon a time, there was a cat.\n\nthe cat sat.\none day, a "
        "fox ran."
    )
    found = lowercase_stories(text, "Once upon a time, there was a cat.")
    assert found == ["once upon a time, there was a cat.\nthe cat sat.", "one day, a fox ran."]


def test_swapped_names_are_consistent_and_of_the_same_kind() -> None:
    story = "Lily met Ben. Ben liked Lily's hat."
    swapped = swap_names(story, random.Random(4))
    first, second = swapped.split()[0], swapped.split()[2].rstrip(".")
    assert swapped == story.replace("Lily", first).replace("Ben", second)
    assert first != second


def test_topics() -> None:
    stories = [f"He saw a {w}. She saw the {w}. I like my {w}!" for w in ("kite", "crab", "boat")]
    assert find_topics(stories) == ["kite", "crab", "boat"]


def test_real_corpus(shared_data: Path) -> None:
    corpus = load_corpus(shared_data / "text")
    assert len(corpus.stories) > 4000
    assert not set(corpus.stories) & set(corpus.heldout)
    assert (shared_data / "text" / LOWER).exists()
    # The second half was lower-case; now nearly every story starts with a capital.
    assert sum(s[0].isupper() or s[0] == '"' for s in corpus.stories) > 0.99 * len(corpus.stories)


def test_any_folder_of_text_has_its_paragraphs_for_stories(tmp_path: Path) -> None:
    long = "A paragraph of some length, which is the first one"
    long += " of its file, and goes on for quite a while without saying anything"
    (tmp_path / "a.txt").write_text(f"Heading\n\n{long} until it\nends here.\n\n{long}: two.\n")
    (tmp_path / "b.txt").write_text(f"{long}: three.<|endoftext|>{long}: four.")
    corpus = load_corpus(tmp_path, heldout_every=3)
    assert [story[-5:] for story in corpus.stories] == [" two.", "hree."]
    assert [text[-5:] for text in corpus.heldout] == ["here.", "four."]
    assert not corpus.books
    (tmp_path / "a.txt").unlink()
    (tmp_path / "b.txt").write_text("short")
    with pytest.raises(ValueError, match="has no two paragraphs"):
        load_corpus(tmp_path)
