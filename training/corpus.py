"""Public text: TinyStories pieces (lost case restored) and children's books."""
# ruff: noqa: RUF001, SIM905

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CASED = "tinystories-sample-2M.txt"
LOWER = "tinystories-lowercase-4M.txt"

# UTF-8 that was read as Windows-1252 and then lower-cased, and typographic signs, to plain ASCII.
_REPAIRS = (
    ("â€œ", '"'),
    ("â€\x9d", '"'),
    ("â€™", "'"),
    ("â€˜", "'"),
    ("â€“", "-"),
    ("â€”", "-"),
    ("â€¦", "..."),
    ("â€", '"'),
    ("“", '"'),
    ("”", '"'),
    ("«", '"'),
    ("»", '"'),
    ("’", "'"),
    ("‘", "'"),
    ("–", "-"),
    ("—", " - "),
    ("…", "..."),
)
_OPENERS = (
    r"once upon a time|once there was|once, |one (?:\w+ )?(?:day|morning|night|evening|afternoon)"
    r"|there (?:once )?was |there were |there lived |it was (?:a|the) |a long time ago|long ago"
    r"|in a |sara and ben|lily and ben|tom and|ben and|anna and|mia and|tim and"
)
_BOUNDARY = re.compile(rf"(?<=\S)[ \t]*\n(?=(?:{_OPENERS}))")
_NAMED = re.compile(r"\b(?:named|called|name was|name is) ([a-z]{3,12})\b")
_SENTENCE = re.compile(r"(^|[.!?]['\")\]]*\s+|\n\s*|(?:^|\s)[\"'(])([a-z])")
# "Stop!" she said: no capital after the quotation.
_TAG = re.compile(
    r"([!?]\" )([A-Z])((?:(?:e|he|hey|t|er \w+|is \w+|he \w+|he little \w+) )?"
    r"(?:s?aid|a?sked|r?eplied|s?houted|c?ried|e?xclaimed|a?nswered|y?elled|w?hispered|c?alled)\b)"
)
_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")


@dataclass(frozen=True)
class Corpus:
    """Whole stories for training, held-out stories, and pieces of books."""

    stories: tuple[str, ...]
    heldout: tuple[str, ...]
    books: tuple[str, ...]


def repair(text: str) -> str:
    for wrong, right in _REPAIRS:
        text = text.replace(wrong, right)
    return text


def tidy(text: str) -> str:
    """Return a text with one newline between paragraphs and one space between words."""
    text = re.sub(r"[ \t]+", " ", text)
    return re.sub(r"\s*\n\s*", "\n", text).strip()


class TrueCaser:
    """Restorer of capitals by the usual case of each word inside sentences, from cased text."""

    def __init__(self, cased: str, lower: str = ""):
        inside: dict[str, Counter[str]] = {}
        for match in re.finditer(r"(?<=[a-z,;] )[A-Za-z]+(?:'[a-z]+)?", cased):
            word = match.group()
            inside.setdefault(word.lower(), Counter())[word] += 1
        # A word that is a name in some stories only ("Spot", "Grace") stays lower-case here; a
        # story with a character of that name capitalises it, see __call__.
        self._usual = {
            w: w if c[w] >= 0.08 * c.total() else c.most_common(1)[0][0] for w, c in inside.items()
        }
        for word in Counter(_NAMED.findall(lower)):
            if word not in self._usual:
                self._usual[word] = word.capitalize()
        self._usual.update({"i": "I", "i'm": "I'm", "i'll": "I'll", "i've": "I've", "i'd": "I'd"})

    def __call__(self, text: str) -> str:
        named = set(_NAMED.findall(text))

        def case(match: re.Match[str]) -> str:
            word = match.group()
            if word in self._usual and word not in named:
                return self._usual[word]
            stem, mark, rest = word.partition("'")
            if stem in named:
                return stem.capitalize() + mark + rest
            return self._usual.get(stem, stem) + mark + rest

        text = _WORD.sub(case, text)
        text = _SENTENCE.sub(lambda m: m.group(1) + m.group(2).upper(), text)
        return _TAG.sub(lambda m: m.group(1) + m.group(2).lower() + m.group(3), text)


def cased_stories(text: str) -> list[str]:
    stories = [tidy(s) for s in repair(text).split("<|endoftext|>")]
    return [s for s in stories if s]


def lowercase_stories(text: str, skip_before: str) -> list[str]:
    """Return the stories of the lower-case file after the place where ``skip_before`` starts."""
    text = repair(text)
    words = re.findall(r"\w+", skip_before.lower())[:14]
    found = re.search(r"\W+".join(words), text)
    if found:
        text = text[found.start() :]
    return [tidy(s) for s in _BOUNDARY.split(text)]


def load_stories(folder: Path) -> list[str]:
    """Return all distinct TinyStories stories of ``folder``, with case, in file order."""
    cased_text = (folder / CASED).read_text(errors="replace")
    stories = cased_stories(cased_text)
    lower_path = folder / LOWER
    if lower_path.exists():
        lower = repair(lower_path.read_text(errors="replace"))
        caser = TrueCaser(repair(cased_text), lower)
        partial = stories.pop()  # truncated at the end of the file; whole in the other one
        stories += [caser(s) for s in lowercase_stories(lower, partial)]
    distinct = dict.fromkeys(s for s in stories if 200 <= len(s) <= 4000 and "\ufffd" not in s)
    return list(distinct)


def load_books(folder: Path, limit: int = 1500) -> list[str]:
    """Return pieces of at most about ``limit`` characters of the books' running prose."""
    pieces: list[str] = []
    for path in sorted(folder.glob("children-*.txt")):
        current = ""
        for block in re.split(r"\n\s*\n", repair(path.read_text(errors="replace"))):
            block = re.sub(r"\s+", " ", block).replace("_", "").strip()
            # Headings, verse, lists and tables are short or do not end like a sentence.
            if len(block) < 60 or block[-1] not in ".!?\"'" or "[" in block or block.isupper():
                continue
            if len(current) + len(block) > limit and current:
                pieces.append(current)
                current = ""
            current = f"{current}\n{block}" if current else block
        if current:
            pieces.append(current)
    return [p for p in pieces if len(p) <= 3 * limit]


def load_texts(folder: Path) -> list[str]:
    """Return the paragraphs of the ``*.txt`` in ``folder`` that are neither short nor long."""
    pieces = [
        tidy(piece)
        for path in sorted(folder.glob("*.txt"))
        for piece in re.split(r"\n\s*\n|<\|endoftext\|>", path.read_text(errors="replace"))
    ]
    return list(dict.fromkeys(p for p in pieces if 100 <= len(p) <= 4000))


def load_corpus(folder: Path, heldout_every: int = 100) -> Corpus:
    """Read ``folder``; hold every ``heldout_every``-th story out of training.

    In a folder without TinyStories, the paragraphs of its ``*.txt`` are the stories; it has no
    books.

    Raises:
        ValueError: the folder has fewer than two texts.
    """
    if not (folder / CASED).exists():
        texts = load_texts(folder)
        if len(texts) < 2:
            raise ValueError(
                f"{folder} has no two paragraphs of 100 to 4,000 characters in its *.txt."
            )
        kept = tuple(t for i, t in enumerate(texts) if i % heldout_every)
        return Corpus(stories=kept, heldout=tuple(texts[::heldout_every]), books=())
    stories = load_stories(folder)
    return Corpus(
        stories=tuple(s for i, s in enumerate(stories) if i % heldout_every),
        heldout=tuple(stories[::heldout_every]),
        books=tuple(load_books(folder)),
    )


GIRLS = (
    "Lily Mia Anna Lucy Sarah Jane Sara Sue Daisy Molly Jill Lila Sally Mary Amy Jen Grace Emma"
    " Jenny Elly Emily Sandy Susie Bella Cindy Polly Rosie Lisa Lola Ella Sophie Luna Kate Alice"
    " Chloe Julie Rachel Claire Millie Ruby Mimi Tilly Nora Zoe Eva Ivy Clara Hannah"
).split()
BOYS = (
    "Ben Tom Timmy Jack Tim Sam Max John Bob Joe Billy Tommy Andy Benny Jake Jimmy Jim James"
    " Sammy Dave Alex Danny Henry Pete Bobby Peter Gary Jerry Leo George Joey Mark Bill Ted Fred"
    " Charlie Mike Toby Oliver Matt Patrick Noah Adam Luke Oscar Felix Hugo Paul"
).split()
_NAMES = {name: group for group in (GIRLS, BOYS) for name in group}
_NAME = re.compile(r"\b(" + "|".join(sorted(_NAMES, key=len, reverse=True)) + r")\b")


def swap_names(story: str, rng: random.Random) -> str:
    """Replace the names of a story's children by others of the same kind, consistently."""
    present = list(dict.fromkeys(_NAME.findall(story)))
    mapping: dict[str, str] = {}
    for name in present:
        free = [n for n in _NAMES[name] if n not in mapping.values()]
        mapping[name] = rng.choice(free)
    return _NAME.sub(lambda m: mapping[m.group()], story)


def find_topics(stories: Sequence[str]) -> list[str]:
    """Return the main noun of each story (``""`` if none stands out).

    A noun is a lower-case word seen at least three times between a determiner and a punctuation
    mark; the topic is the one with the best tf-idf among those that occur at least twice.
    """
    text = "\n".join(stories)
    determined = Counter(
        re.findall(r"\b(?:a|an|the|his|her|their|my|your) ([a-z]{3,})[.,!?]", text)
    )
    nouns = {w for w, n in determined.items() if n >= 3}
    counts = [Counter(w for w in re.findall(r"[a-z]+", s) if w in nouns) for s in stories]
    documents = Counter(w for c in counts for w in c)
    topics = []
    for count in counts:
        scored = [
            (n / (documents[w] ** 0.5), w)
            for w, n in count.items()
            if n >= 2 and documents[w] < 0.1 * len(stories) + 5
        ]
        topics.append(max(scored)[1] if scored else "")
    return topics
