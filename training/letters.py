"""Stories told as letters: the plots of ``own_stories`` in the first person, by rule.

The hero of the story writes the letter, so the hero of each sentence is "I".
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

from training.corpus import BOYS, GIRLS
from training.own_stories import PLOTS, a, cast

_WHO = ("Grandma", "Grandpa", "Mom", "Dad", "Aunt Rosa", *GIRLS[:12], *BOYS[:12])
_CLOSINGS = ("Love", "With love", "Your friend")
_QUOTED = re.compile(r'("[^"]*")')
# From the words of a story about "I" to those of a letter, outside of what is said.
_RULES = (
    (re.compile(r"\bI's\b"), "my"),
    (re.compile(r"\b(gave it back to|heard|found|hugged|told) I\b"), r"\1 me"),
    (re.compile(r"\bI and (?!I\b)([A-Z]\w+)"), r"\1 and I"),
    (re.compile(r"\b(said|asked|cried|shouted) I\b"), r"I \1"),
    (re.compile(r"\bthey\b"), "we"),
    (re.compile(r"\bThey\b"), "We"),
    (re.compile(r"\b[Tt]hem\b"), "us"),
    (re.compile(r"\btheir\b"), "our"),
)
_FIRST_PERSON = re.compile(r"\b(I|me|my|My|we|We|us)\b")


def _as_told(text: str) -> str:
    """Return the sentences of a story as the hero tells them."""
    parts = _QUOTED.split(text)
    for i in range(0, len(parts), 2):
        for rule, words in _RULES:
            parts[i] = rule.sub(words, parts[i])
    return "".join(parts)


def letter(rng: random.Random) -> tuple[str, str]:
    """Return a letter, and the topic of its story: ``a dog``, ``a girl named Mia``."""
    c, plot = cast(rng), rng.choice(PLOTS)
    hero = c.hero
    paragraphs, topics = plot(rng, replace(c, hero=replace(hero, name="I", she="I", her="me",
                                                           hers="my")))  # fmt: skip
    topics = [re.sub(r"^I and", f"{hero.name} and", topic) for topic in topics]
    if rng.random() < 0.5:
        about = rng.choice(topics)
    elif hero.child:
        about = rng.choice([f"{a(hero.kind)} named {hero.name}", hero.name])
    else:
        about = rng.choice([a(hero.kind)] * 4 + [f"{a(hero.kind)} named {hero.name}"])
    signed = hero.name if hero.child else f"{hero.name} the {hero.kind}"
    to = rng.choice([name for name in _WHO if name not in (hero.name, c.friend.name)])
    body = _as_told("\n".join(paragraphs))
    return f"Dear {to},\n{body}\n{rng.choice(_CLOSINGS)},\n{signed}", about


def is_letter(text: str) -> bool:
    """Return True for a text with the first and the last two lines of a letter."""
    lines = text.strip().split("\n")
    return (
        len(lines) >= 4
        and re.fullmatch(r"Dear [A-Z][\w ]*,", lines[0]) is not None
        and lines[-2] in {f"{closing}," for closing in _CLOSINGS}
    )


def is_first_person(text: str) -> bool:
    """Return True for a text with three words of the first person outside of what is said."""
    return len(_FIRST_PERSON.findall("".join(_QUOTED.split(text)[::2]))) >= 3
