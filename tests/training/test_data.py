from __future__ import annotations

import random

import torch
from tokenizers import Tokenizer

from training.corpus import Corpus
from training.data import IGNORE, Document, Recipe, Stream, encode_chat, encode_drill, pack

SMALL = Recipe(
    stories=20, requests=6, continuations=2, own_stories=2, own_requests=2, books=1, chats=20,
    drills=2, lengths=(64, 128), books_until=0.5,
)  # fmt: skip


def test_only_the_assistant_counts(tokenizer: Tokenizer) -> None:
    text = (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\nGoodbye!<|im_end|>\n"
    )
    document = encode_chat(tokenizer, text)
    counted = [i for i, c in zip(document.ids, document.counts, strict=True) if c]
    said = tokenizer.decode(counted, skip_special_tokens=False)
    assert said == "Hello!<|im_end|>Goodbye!<|im_end|>"
    whole = tokenizer.decode(document.ids, skip_special_tokens=False)
    assert whole == text + "<|endoftext|>"


def test_only_results_of_sums_count(tokenizer: Tokenizer) -> None:
    document = encode_drill(tokenizer, [("12 + 9 = ", "21"), ("7 - 7 = ", "0")])
    assert tokenizer.decode(document.ids) == "12 + 9 = 21\n7 - 7 = 0\n"
    counted = [i for i, c in zip(document.ids, document.counts, strict=True) if c]
    assert tokenizer.decode(counted) == "210"


def test_pack_keeps_whole_documents_whole() -> None:
    rng = random.Random(0)
    whole = [Document([1000 + i] * (3 + i % 5), [True] * (3 + i % 5), True) for i in range(30)]
    prose = [Document(list(range(100)), [True] * 100, False) for _ in range(3)]
    ids, counts = pack([*whole, *prose], 31, rng)
    assert ids.shape == counts.shape
    assert ids.shape[1] == 32
    for row in ids:
        for value in {v for v in row.tolist() if v >= 1000}:
            positions = [i for i, v in enumerate(row.tolist()) if v == value]
            assert len(positions) == 3 + (value - 1000) % 5
            assert positions[-1] - positions[0] + 1 == len(positions)
    streamed = [v for v in ids.flatten().tolist() if v < 1000]
    assert streamed == [i % 100 for i in range(len(streamed))]


def test_pack_pads_where_no_prose_is_left() -> None:
    whole = [Document([7] * 20, [True] * 20, True) for _ in range(4)]
    ids, counts = pack(whole, 31, random.Random(0))
    assert ids.tolist() == [[7] * 20 + [0] * 12] * 3  # the last row is not full: dropped
    assert counts.sum() == 60


def test_stream_is_seeded_and_resumable(corpus: Corpus, tokenizer: Tokenizer) -> None:
    def make(seed: int) -> Stream:
        return Stream(corpus, tokenizer, 256, seed, SMALL)

    a, b = make(0), make(0)
    batches = [a.next() for _ in range(40)]
    assert a.state[0] >= 1, "the test must cross a chunk"
    for _ in range(15):
        b.next()
    c = make(0)
    c.state = b.state
    for (x, y), (expected_x, expected_y) in zip(
        (c.next() for _ in range(25)), batches[15:], strict=True
    ):
        assert torch.equal(x, expected_x)
        assert torch.equal(y, expected_y)
    assert not torch.equal(make(1).next()[0], batches[0][0])


def test_targets_are_the_next_tokens(corpus: Corpus, tokenizer: Tokenizer) -> None:
    tokens, targets = Stream(corpus, tokenizer, 256, 0, SMALL).next()
    assert tokens.shape == targets.shape == (4, 64)
    shifted = tokens[:, 1:]
    kept = targets[:, :-1] != IGNORE
    assert kept.any()
    assert not kept.all()
    assert torch.equal(targets[:, :-1][kept], shifted[kept])


def test_each_story_comes_once_before_any_comes_again(corpus: Corpus, tokenizer: Tokenizer) -> None:
    stream = Stream(corpus, tokenizer, 256, 0, SMALL)
    numbers = [n for chunk in range(15) for n in stream._story_numbers(chunk)]
    size = len(corpus.stories)
    for start in range(0, len(numbers) - size + 1, size):
        assert sorted(numbers[start : start + size]) == list(range(size))
