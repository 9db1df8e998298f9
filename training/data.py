"""Training stream: stories, books and conversations, packed into rows of equal length.

The stream is made chunk by chunk. A chunk depends only on (seed, its number). So a resumed run
continues with the same rows, and every pass over the stories has other names and other
conversations.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from training import synthetic
from training.corpus import Corpus, find_topics, swap_names
from training.own_stories import own_story
from training.tokenizer import END_OF_TEXT, PAD_TOKEN_ID

IGNORE = -100
_ANSWER = re.compile(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", re.DOTALL)


@dataclass(frozen=True)
class Recipe:
    """Numbers of documents of each kind in a chunk.

    In tokens: nearly half TinyStories, an eighth generated stories, a quarter conversations, a
    tenth sums, and books.
    """

    stories: int = 600
    requests: int = 15
    continuations: int = 20
    own_stories: int = 50
    own_requests: int = 110
    books: int = 40
    chats: int = 1100
    drills: int = 200
    # Books teach words early on; the last part of the run does not use them.
    books_until: float = 0.6
    # Row lengths of successive chunks.
    lengths: tuple[int, ...] = (512,) * 9 + (1024,) + (512,) * 9 + (2048,)


@dataclass(frozen=True)
class Document:
    """Token ids, and for each a flag: its prediction counts in the loss."""

    ids: list[int]
    counts: list[bool]
    whole: bool  # must not be split over two rows


def encode_prose(tokenizer: Tokenizer, text: str) -> Document:
    ids = tokenizer.encode(text + END_OF_TEXT).ids
    return Document(ids, [True] * len(ids), whole=False)


def encode_chat(tokenizer: Tokenizer, text: str) -> Document:
    """Return a rendered conversation; only the assistant's text counts."""
    ids: list[int] = []
    counts: list[bool] = []
    for i, piece in enumerate(_ANSWER.split(text + END_OF_TEXT)):
        part = tokenizer.encode(piece).ids
        ids += part
        counts += [i % 2 == 1] * len(part)
    return Document(ids, counts, whole=True)


def encode_drill(tokenizer: Tokenizer, sums: Sequence[tuple[str, str]]) -> Document:
    """Return sums, a line for each; only the results count."""
    ids: list[int] = []
    counts: list[bool] = []
    for given, result in sums:
        for text, counted in ((given, False), (result, True), ("\n", False)):
            part = tokenizer.encode(text).ids
            ids += part
            counts += [counted] * len(part)
    return Document(ids, counts, whole=True)


def pack(
    documents: Sequence[Document], length: int, rng: random.Random
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of ``length + 1`` ids and their counts, each ``[rows, length + 1]``.

    Whole documents are placed first and never split. Where the next one does not fit, prose fills
    the row (or padding, if no prose is left). Prose continues in the next row. A rest that fills no
    row is dropped.
    """
    whole = [d for d in documents if d.whole and len(d.ids) <= length]
    prose = [d for d in documents if not d.whole or len(d.ids) > length]
    rng.shuffle(whole)
    rng.shuffle(prose)
    stream = [pair for d in prose for pair in zip(d.ids, d.counts, strict=True)]
    rows: list[list[tuple[int, bool]]] = []
    row: list[tuple[int, bool]] = []
    position = 0
    while True:
        room = length + 1 - len(row)
        if room == 0:
            rows.append(row)
            row = []
        elif whole and len(whole[-1].ids) <= room:
            document = whole.pop()
            row += zip(document.ids, document.counts, strict=True)
        elif position < len(stream):
            row += stream[position : position + room]
            position += room
        elif whole:
            row += [(PAD_TOKEN_ID, False)] * room
        else:
            break
    if not rows:
        empty = np.zeros((0, length + 1), dtype=np.int64)
        return empty, empty.astype(bool)
    table = np.array(rows, dtype=np.int64)
    return table[..., 0], table[..., 1].astype(bool)


class ChunkStream:
    """Endless, seeded, resumable stream of batches; a subclass makes the documents.

    ``state`` is (chunk, batch within the chunk); assigning it moves the stream.
    """

    def __init__(self, batch_tokens: int, seed: int, lengths: Sequence[int]):
        self.batch_tokens, self.seed, self.lengths = batch_tokens, seed, lengths
        self.state = (0, 0)
        self.progress = 0.0
        self._loaded = -1
        self._batches: list[tuple[Tensor, Tensor]] = []

    def documents(self, chunk: int, rng: random.Random) -> Iterator[Document]:
        raise NotImplementedError

    def _load(self, chunk: int) -> None:
        rng = random.Random(f"{self.seed}/chunk/{chunk}")
        length = self.lengths[chunk % len(self.lengths)]
        ids, counts = pack(list(self.documents(chunk, rng)), length, rng)
        per_batch = max(1, self.batch_tokens // length)
        order = np.random.default_rng([self.seed, chunk]).permutation(len(ids))
        self._batches = []
        for start in range(0, len(ids) - per_batch + 1, per_batch):
            rows = torch.from_numpy(ids[order[start : start + per_batch]])
            valid = torch.from_numpy(counts[order[start : start + per_batch]])
            targets = rows[:, 1:].masked_fill(~valid[:, 1:], IGNORE)
            self._batches.append((rows[:, :-1].contiguous(), targets))
        if not self._batches:
            raise ValueError(f"chunk {chunk} has too few tokens for one batch of {length}")
        self._loaded = chunk

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each ``[rows, length]`` int64; uncounted targets are -100."""
        chunk, index = self.state
        if self._loaded != chunk:
            self._load(chunk)
        batch = self._batches[index]
        self.state = (chunk, index + 1) if index + 1 < len(self._batches) else (chunk + 1, 0)
        return batch


class Stream(ChunkStream):
    """Stream of stories, books and conversations by ``recipe``."""

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        batch_tokens: int,
        seed: int,
        recipe: Recipe | None = None,
    ):
        self.recipe = recipe or Recipe()
        super().__init__(batch_tokens, seed, self.recipe.lengths)
        self.corpus, self.tokenizer = corpus, tokenizer
        self._topics = find_topics(corpus.stories)

    def _story_numbers(self, chunk: int) -> list[int]:
        """Return the stories of this chunk: all of them once, in a new order, then again."""
        recipe, n = self.recipe, len(self.corpus.stories)
        count = recipe.stories + recipe.requests + recipe.continuations
        numbers = []
        for i in range(chunk * count, (chunk + 1) * count):
            epoch, place = divmod(i, n)
            if not numbers or place == 0:
                order = list(range(n))
                random.Random(f"{self.seed}/order/{epoch}").shuffle(order)
            numbers.append(order[place])
        return numbers

    def documents(self, chunk: int, rng: random.Random) -> Iterator[Document]:
        recipe, encode = self.recipe, self.tokenizer
        for i, number in enumerate(self._story_numbers(chunk)):
            story = self.corpus.stories[number]
            if rng.random() < 0.6:
                story = swap_names(story, rng)
            kind = i % (recipe.stories + recipe.requests + recipe.continuations)
            conversation = None
            if kind >= recipe.stories + recipe.requests:
                conversation = synthetic.story_continuation(story, rng)
            elif kind >= recipe.stories:
                about = synthetic.story_about(story, self._topics[number], rng)
                conversation = synthetic.story_request(story, about, rng)
            if conversation is None:
                yield encode_prose(encode, story)
            else:
                yield encode_chat(encode, synthetic.render(conversation))
        for _ in range(recipe.own_stories):
            yield encode_prose(encode, own_story(rng)[0])
        for _ in range(recipe.own_requests):
            story, about = own_story(rng)
            about = about if rng.random() < 0.9 else ""
            conversation = synthetic.story_request(story, about, rng)
            yield encode_chat(encode, synthetic.render(conversation))
        if self.corpus.books and self.progress < recipe.books_until:
            for piece in rng.sample(self.corpus.books, min(recipe.books, len(self.corpus.books))):
                yield encode_prose(encode, piece)
        for _ in range(recipe.chats):
            yield encode_chat(encode, synthetic.render(synthetic.conversation(rng)))
        for _ in range(recipe.drills):
            yield encode_drill(encode, synthetic.sums(rng))


def tokenizer_texts(corpus: Corpus, seed: int) -> Iterator[str]:
    """Yield the tokenizer's training text: all stories, some books, some conversations."""
    yield from corpus.stories
    yield from corpus.books[::12]
    rng = random.Random(f"{seed}/tokenizer")
    for _ in range(6000):
        text = synthetic.render(synthetic.conversation(rng))
        yield re.sub(r"<\|im_(start|end)\|>", "\n", text)


def heldout_rows(corpus: Corpus, tokenizer: Tokenizer) -> list[Tensor]:
    """Return each held-out story as ``[length]`` int64 (it begins after an end-of-text token)."""
    start = tokenizer.token_to_id(END_OF_TEXT)
    return [torch.tensor([start, *tokenizer.encode(s + END_OF_TEXT).ids]) for s in corpus.heldout]
