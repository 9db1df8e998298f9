"""Pairs of a query and the text that answers it: the training data of encoder and reranker.

A pair has a subject. Pairs of one batch have different subjects, so that each text answers one
query only. One subject in ten is held out of training.
"""

from __future__ import annotations

import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from training import facts, synthetic
from training.corpus import BOYS, GIRLS, Corpus, swap_names
from training.own_stories import PETS, PLOTS, a, cast

RENAMED = {"notes": 0.3, "facts": 0.6}
"""Share of the training's pairs of a kind whose words are renamed, see `rename`."""


class Pair(NamedTuple):
    """Query, the text to be found, and the subject of both."""

    query: str
    text: str
    subject: str

    @property
    def held_out(self) -> bool:
        """True if no training may use the subject."""
        return zlib.crc32(self.subject.encode()) % 10 == 0


Maker = Callable[[random.Random], Pair | None]

_SAME = """
    happy glad; sad unhappy; big large; little small; mom mother; dad father; grandma grandmother;
    grandpa grandfather; scared afraid frightened; pretty beautiful; began started; shouted yelled;
    saw noticed; liked enjoyed; ran hurried; house home; friend pal; kids children; rabbit bunny;
    looked gazed; smiled grinned; found discovered; wanted wished; gift present; angry mad;
    sick ill; rock stone; woods forest; bag sack; closed shut; quickly fast; quiet silent;
    strange odd; kind nice; smart clever wise; tired sleepy; cried wept; jumped leaped;
    ocean sea; boat ship; hat cap; path road street; picture drawing; store shop; fixed repaired
    mended; laughed giggled; yummy tasty delicious; hid concealed; gave handed; hurt injured;
    talked spoke; brave bold; watched observed; chased followed; helped assisted; built made;
    sofa couch; soup stew; bucket pail; doctor physician; beach shore; story tale; baby infant;
    dirty muddy; amazing wonderful; answered replied; bush shrub; rested relaxed; went walked
"""
SYNONYMS = {
    word: [other for other in group.split() if other != word]
    for group in _SAME.split(";")
    for word in group.split()
}
_WORD = re.compile(r"[a-z]+")
_ANY_WORD = re.compile(r"[A-Za-z]+")
_COMMON = """
    a about after again all also am an and any are as asked at away back be because became big
    but by called came can color colour come could day did do does down each eat felt find for
    found from gave get give go good got had happy has have he her him his how i if in into is
    it its just know last legs like liked little live lived looked made make many me more most
    mom my name named no not now of off old on once one only opposite or other our out over
    plural put ran rhymes said saw say says she sides so some sound tell than that the their
    them then there they thing things this time to too took two up upon us use very want
    wanted was we went were what when where which who will with word would years you your
"""
COMMON = frozenset(_COMMON.split())
SENTENCE = re.compile(r"(?<=[.!?\"])\s+")


def reword(text: str, rng: random.Random, share: float = 0.6) -> str:
    """Replace a share of the words that have synonyms by one of them."""

    def other(match: re.Match[str]) -> str:
        word = match.group()
        return rng.choice(SYNONYMS[word]) if word in SYNONYMS and rng.random() < share else word

    return _WORD.sub(other, text)


def rename(pair: Pair, words: Sequence[str], rng: random.Random) -> Pair:
    """Replace each rare word that query and text share by another one, the same in both.

    A model that sees such pairs compares words, in place of learning which texts there are.
    """
    shared = set(_WORD.findall(pair.query.lower())) & set(_WORD.findall(pair.text.lower()))
    others = {word: rng.choice(words) for word in sorted(shared - COMMON)}

    def other(match: re.Match[str]) -> str:
        return others.get(match.group().lower(), match.group())

    query, text = (_ANY_WORD.sub(other, part) for part in (pair.query, pair.text))
    return Pair(query, text, pair.subject)


def note(rng: random.Random) -> Pair:
    """Return a question about a child, and the note with the answer."""
    if rng.random() < 0.4:
        given, asked = synthetic.word_problem(rng)[0].split(" How many ")
        thing, name = asked.removesuffix(" have now?").split(" does ")
        query = rng.choice(
            [f"How many {asked}", f"How many {thing} does {name} have?",
             f"How many {thing} has {name} got?", f"Count {name}'s {thing}."]
        )  # fmt: skip
        return Pair(query, given, f"{name}/{thing}")
    name, age = rng.choice(GIRLS + BOYS), rng.randint(3, 12)
    like, city = rng.choice(facts.LIKES), rng.choice(facts.CITIES)
    job, pet, called = (
        rng.choice(facts.JOBS), rng.choice(facts.LISTS["animals"]), rng.choice(PETS),
    )  # fmt: skip
    topic, texts, queries = rng.choice(
        [
            ("age", [f"{name} is {age} years old.", f"{name} just turned {age}.",
                     f"{name} has had {age} birthdays."],
             [f"How old is {name}?", f"What is {name}'s age?", f"Tell me the age of {name}."]),
            ("like", [f"{name} likes {like}.", f"{name} is very fond of {like}.",
                      f"Nothing makes {name} as happy as {like}."],
             [f"What does {name} like?", f"What is {name} fond of?", f"What does {name} love?"]),
            ("city", [f"{name} lives in {city}.", f"The home of {name} is in {city}.",
                      f"{name} has moved to {city}."],
             [f"Where does {name} live?", f"In which city is {name}'s home?",
              f"What city does {name} come from?"]),
            ("job", [f"{name} works as {a(job)}.", f"{name} is {a(job)}.",
                     f"{name} wants to be {a(job)}."],
             [f"What is {name}'s job?", f"What does {name} do for a living?",
              f"What work does {name} want to do?"]),
            ("pet", [f"{name} has {a(pet)} named {called}.",
                     f"{called} the {pet} lives with {name}.",
                     f"{name} got {a(pet)} and named it {called}."],
             [f"What pet does {name} have?", f"What is the name of {name}'s pet?",
              f"Which animal lives with {name}?"]),
        ]
    )  # fmt: skip
    return Pair(rng.choice(queries), rng.choice(texts), f"{name}/{topic}")


def fact(rng: random.Random) -> Pair:
    """Return a question about the world, and the sentence that answers it."""
    makers = (synthetic.colour, synthetic.animal, synthetic.fact, synthetic.calendar)
    question, answer = rng.choices(makers, (3, 5, 8, 2))[0](rng)
    return Pair(question, answer, re.sub(r"^(the|an?) ", "", answer.lower()))


def title(rng: random.Random) -> Pair:
    """Return words that describe a generated story, and the story."""
    c = cast(rng)
    paragraphs, topics = rng.choice(PLOTS)(rng, c)
    hero, friend, topic = c.hero, c.friend, rng.choice(topics)
    who = rng.choice(
        [hero.name, f"{a(hero.kind)} named {hero.name}", f"{hero.name} the {hero.kind}",
         f"{hero.name} and {friend.name}", f"{a(hero.kind)} and {a(friend.kind)}"]
    )  # fmt: skip
    form = rng.choice(["a story about {}", "{}", "Find the story of {}.", "the one with {}"])
    story = rng.choice([" ", "\n"]).join(paragraphs)
    query = reword(form.format(f"{who}: {topic}"), rng, 0.3)
    return Pair(query, story, f"{hero.name}/{hero.kind}/{friend.name}/{topic}")


def passage(text: str, subject: str, rng: random.Random, *, kept: bool = False) -> Pair | None:
    """Return one sentence of a text, reworded, and the sentences around it.

    The sentence itself is among them if it is ``kept``; without it, this is the inverse cloze task
    (Lee, Chang and Toutanova 2019). None: the text is too short.
    """
    sentences = SENTENCE.split(text)
    if len(sentences) < 4:
        return None
    taken = rng.randrange(len(sentences))
    before, after = rng.randint(1, 5), rng.randint(1, 5)
    around = sentences[max(taken - before, 0) : taken] + sentences[taken + 1 : taken + 1 + after]
    if kept:
        around.insert(min(taken, before), sentences[taken])
    words = keywords(sentences[taken], rng)
    return Pair(words, " ".join(around), subject) if words else None


def keywords(sentence: str, rng: random.Random) -> str:
    """Return the sentence reworded, in a third of the cases without some words.

    The result is "" if it has fewer than three words.
    """
    words = reword(sentence, rng).split()
    if rng.random() < 0.3:
        words = [word for word in words if rng.random() < 0.6]
    return " ".join(words) if len(words) >= 3 else ""


def _passages(texts: Sequence[str], *, names: bool, kept: bool = False) -> Maker:
    def make(rng: random.Random) -> Pair | None:
        text = rng.choice(texts)
        return passage(swap_names(text, rng) if names else text, text[:80], rng, kept=kept)

    return make


def _lines(texts: Sequence[str]) -> Maker:
    def make(rng: random.Random) -> Pair | None:
        story = rng.choice(texts)
        line = rng.choice(SENTENCE.split(swap_names(story, rng)))
        words = keywords(line, rng)
        return Pair(words, line, story[:80]) if words and len(line) < 120 else None

    return make


def rare_words(corpus: Corpus) -> list[str]:
    """Return the words of a corpus that are neither very frequent nor very rare, sorted."""
    counts: Counter[str] = Counter()
    for text in (*corpus.stories, *corpus.books[::4]):
        counts.update(_WORD.findall(text))
    middle = [word for word, number in counts.most_common()[200:] if number >= 5]
    return sorted(word for word in middle if len(word) > 2 and word not in COMMON)


class Pairs:
    """Makers of pairs of each kind; those of passages need a corpus.

    Args:
        corpus: stories and books; None: only generated pairs.
        short: True: only kinds whose texts are a sentence or two.
    """

    def __init__(self, corpus: Corpus | None = None, *, short: bool = False) -> None:
        self.words: list[str] = []
        self.makers: dict[str, Maker] = {
            "notes": note,
            "facts": fact,
        }
        if not short:
            self.makers["titles"] = title
        if corpus is not None:
            self.words = rare_words(corpus)
        if corpus is not None and short:
            self.makers["lines"] = _lines(corpus.stories)
        elif corpus is not None:
            self.makers["stories"] = _passages(corpus.stories, names=True)
            self.makers["quotes"] = _passages(corpus.stories, names=True, kept=True)
            if corpus.books:
                self.makers["books"] = _passages(corpus.books, names=False)
                self.makers["extracts"] = _passages(corpus.books, names=False, kept=True)

    def draw(self, kind: str, rng: random.Random, draws: int = 4000) -> Iterator[Pair]:
        """Yield pairs with different subjects, out of a number of draws."""
        seen: set[str] = set()
        for _ in range(draws):
            pair = self.makers[kind](rng)
            if pair is not None and pair.subject not in seen:
                seen.add(pair.subject)
                yield pair

    def train(self, kind: str, rng: random.Random, count: int) -> list[Pair]:
        """Return at most ``count`` pairs for training."""
        drawn = (pair for pair in self.draw(kind, rng) if not pair.held_out)
        found = [pair for pair, _ in zip(drawn, range(count), strict=False)]
        share = RENAMED.get(kind, 0.0) if self.words else 0.0
        return [rename(p, self.words, rng) if rng.random() < share else p for p in found]

    def heldout(
        self, kind: str, queries: int = 200, texts: int = 500
    ) -> tuple[list[str], list[str]]:
        """Return held-out queries, and texts: that of query i is text i, and others follow.

        The others are training's, so that facts, of which few are held out, have rivals too.
        """
        drawn = list(self.draw(kind, random.Random(f"evaluation/{kind}")))
        asked = [pair for pair in drawn if pair.held_out][:queries]
        rivals = [pair for pair in drawn if not pair.held_out][: texts - len(asked)]
        return [pair.query for pair in asked], [pair.text for pair in asked + rivals]
