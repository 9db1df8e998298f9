"""Incremental detokenisation: the text of all tokens, never half a character, stop texts."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import BUILTIN_MODEL
from octavo.models.hub import resolve_model
from octavo.sampling_params import SamplingParams
from octavo.text.detokenizer import (
    ByteStream,
    IncrementalDetokenizer,
    WindowStream,
    make_text_stream,
)
from octavo.text.tokenizer import Tokenizer
from tests.small_tokenizers import BOS, EOS, byte_level, sentencepiece, word_piece

TEXTS = [
    "Once upon a time, there was a little girl called Anna.",
    "Es war einmal … «ein» König, naïve Straße.",
    "中文和日本語の文章、한국어 문장. Смешанный текст עברית",
    "Emoji: 🤗👩‍👩‍👧‍👦🇩🇪 and e\u0301 combining; \U0001d518\U0001d52b",
    "def f(x):\n\treturn  x ** 2\n\n\n# end",
    "\ufffd a real replacement character \ufffd",
]
REAL = ["qwen2", "llama2", "llama3", "gpt2", "bert"]


@pytest.fixture(scope="module", params=[*REAL, "stories"])
def tokenizer(request):
    if request.param == "stories":
        return Tokenizer.from_folder(resolve_model(BUILTIN_MODEL))
    shared = request.getfixturevalue("shared_data")
    return Tokenizer.from_folder(shared / "tokenizers" / request.param)


def stream_text(stream, ids):
    pieces = [stream.push(i) for i in ids]
    return "".join(pieces) + stream.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_decode(tokenizer, text):
    prompt = tokenizer.encode("The prompt", add_special_tokens=True)
    if tokenizer.decode(prompt).endswith("[SEP]"):
        prompt = prompt[:-1]
    ids = tokenizer.encode(" x" + text, add_special_tokens=False)
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    after = tokenizer.decode(prompt + ids, skip_special_tokens=True)
    for kind in (WindowStream, ByteStream) if tokenizer.has_bytes else (WindowStream,):
        stream = kind(tokenizer, prompt, tokenizer.all_special_ids)
        pieces = [stream.push(i) for i in ids]
        assert before + "".join(pieces) + stream.flush() == after
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", ["qwen2", "llama3", "gpt2"])
def test_random_tokens_equal_decode(name, shared_data):
    """Random tokens of a byte-level vocabulary are broken UTF-8; the text equals decode's."""
    tokenizer = Tokenizer.from_folder(shared_data / "tokenizers" / name)
    rng = random.Random(0)
    for skip in (True, False):
        for _ in range(200):
            ids = [rng.randrange(len(tokenizer) + 50) for _ in range(rng.randrange(1, 40))]
            stream = make_text_stream(tokenizer, [tokenizer.encode("a")[-1]], skip)
            assert stream_text(stream, ids) == tokenizer.decode(ids, skip)


@given(st.lists(st.integers(0, 270), max_size=30), st.booleans())
def test_any_bytes_equal_decode(ids, skip):
    tokenizer = byte_level()
    stream = make_text_stream(tokenizer, list(b"a"), skip)
    assert stream_text(stream, ids) == tokenizer.decode(ids, skip)


@given(st.text(alphabet="ab é中🤗\n", max_size=20))
def test_sentencepiece_equals_decode(text):
    tokenizer = sentencepiece()
    prompt = tokenizer.encode("a")
    ids = tokenizer.encode(text, add_special_tokens=False)
    skipped = tokenizer.all_special_ids
    for kind in (ByteStream, WindowStream):
        expected = tokenizer.decode(prompt + ids, True)
        text_of_ids = stream_text(kind(tokenizer, prompt, skipped), ids)
        assert tokenizer.decode(prompt, True) + text_of_ids == expected


def test_first_space_after_nothing_but_special_tokens():
    tokenizer = sentencepiece()
    ids = tokenizer.encode("ab a", add_special_tokens=False)
    assert stream_text(make_text_stream(tokenizer, [tokenizer.bos_token_id], True), ids) == "ab a"
    assert stream_text(make_text_stream(tokenizer, [tokenizer.bos_token_id], False), ids) == " ab a"


def test_a_character_begun_in_the_prompt_is_completed():
    data = "中".encode()
    stream = ByteStream(byte_level(), list(b"x" + data[:2]), frozenset())
    assert stream_text(stream, [data[2], 65]) == "中A"


def test_words_of_bert():
    tokenizer = word_piece()
    assert stream_text(make_text_stream(tokenizer, [1, 5], True), [2, 3, 5, 6]) == " playing a."


def test_window_stays_small_whatever_comes():
    tokenizer = byte_level()
    stream = WindowStream(tokenizer, list(b"a"), tokenizer.all_special_ids)
    text = ""
    for _ in range(1000):
        text += stream.push(0xE4)
        text += stream.push(BOS)
        assert len(stream._ids) <= 24
    text += stream.flush()
    assert set(text) == {"\ufffd"}
    assert len(text) == 1000


def make(stop=(), tokenizer=None, prompt=b"p", **kwargs):
    params = SamplingParams(stop=list(stop), max_tokens=None, **kwargs)
    return IncrementalDetokenizer(tokenizer or byte_level(), list(prompt), params)


def test_special_tokens_are_left_out_or_kept():
    ids = [*b"a", EOS, *b"b"]
    for skip, expected in ((True, "ab"), (False, "a</s>b")):
        detokenizer = make(skip_special_tokens=skip)
        detokenizer.update(ids)
        detokenizer.finish()
        assert detokenizer.text() == expected


def test_stop_token_has_no_text():
    for keep, expected in ((False, "ab"), (True, "abX")):
        detokenizer = make(include_stop_str_in_output=keep)
        assert detokenizer.update(b"ab") is None
        assert detokenizer.update(b"X", ended_by_stop_token=True) is None
        detokenizer.finish()
        assert detokenizer.text() == expected
        assert detokenizer.token_ids.tolist() == list(b"abX")


def test_unfinished_character_is_held_back_and_flushed():
    detokenizer = make()
    detokenizer.update([65, 0xE4, 0xB8])
    assert detokenizer.take_text() == "A"
    detokenizer.finish()
    assert detokenizer.take_text() == "\ufffd"


@pytest.mark.parametrize("num_at_once", [1, 2, 3, 100])
@pytest.mark.parametrize("keep", [False, True])
def test_stop_across_tokens(num_at_once, keep):
    """Text and tokens do not depend on the number of tokens per call."""
    detokenizer = make(["END", "zz"], include_stop_str_in_output=keep)
    data = b"one EN two END three"
    found = None
    seen = ""
    for i in range(0, len(data), num_at_once):
        found = detokenizer.update(data[i : i + num_at_once])
        seen += detokenizer.take_text()
        if found:
            break
    detokenizer.finish()
    seen += detokenizer.take_text()
    assert found == "END"
    assert seen == ("one EN two END" if keep else "one EN two ")
    assert bytes(detokenizer.token_ids.tolist()) == b"one EN two END"


def test_held_back_text_never_takes_part_in_a_stop():
    detokenizer = make(["abcd"])
    released = ""
    for byte in b"xxabcabcd":
        if detokenizer.update([byte]):
            break
        released += detokenizer.take_text()
        assert len(released) == max(0, len(detokenizer.token_ids) - 3)
    assert released + detokenizer.take_text() == "xxabc"


def test_held_back_text_comes_at_the_end():
    detokenizer = make(["abcd"])
    detokenizer.update(b"xxabc")
    assert detokenizer.text() == "xx"
    detokenizer.finish()
    assert detokenizer.text() == "xxabc"


def test_first_stop_counts():
    hello = byte_level().encode("hello")
    assert len(hello) == 1  # both stops are complete at once
    detokenizer = make(["lo", "ell"])
    assert detokenizer.update(hello) == "ell"
    assert detokenizer.text() == "h"
    detokenizer = make(["hell", "he"])
    assert detokenizer.update(hello) == "hell"


def test_min_tokens_counts_for_stop_texts():
    detokenizer = make(["b"], min_tokens=3)
    assert detokenizer.update(b"aba") is None
    assert detokenizer.update(b"ab") == "b"
    assert detokenizer.text() == "abaa"
    # A stop that begins within the first tokens and ends after them counts.
    detokenizer = make(["abc"], min_tokens=2)
    assert detokenizer.update(b"xabc") == "abc"
    # One that was complete within them does not, even while its text is withheld.
    detokenizer = make(["ab", "xyzxyz"], min_tokens=2)
    assert detokenizer.update(b"abcd") is None


def test_stop_text_in_the_middle_of_a_character_sequence():
    data = "中文。end".encode()
    detokenizer = make(["。"])
    for byte in data:
        if detokenizer.update([byte]):
            break
    assert detokenizer.text() == "中文"


@settings(max_examples=200)
@given(
    st.text(alphabet="ab中", max_size=30),
    st.lists(st.text(alphabet="ab中", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 5),
    st.lists(st.integers(1, 7), min_size=1),
)
def test_stops_as_a_plain_search_finds_them(text, stops, min_tokens, sizes):
    """The definition: the first moment that a stop is complete, then the one that begins first."""
    data = list(text.encode())
    expected, stop = text, None
    for end in range(min_tokens + 1, len(data) + 1):
        so_far = bytes(data[:end]).decode("utf-8", "ignore")
        before = bytes(data[: end - 1]).decode("utf-8", "ignore")
        hits = [
            (len(so_far) - len(s), n)
            for n, s in enumerate(stops)
            if so_far.endswith(s) and so_far != before
        ]
        if hits:
            start, n = min(hits)
            expected, stop = so_far[:start], stops[n]
            break
    detokenizer = make(stops, min_tokens=min_tokens)
    found, i, turn, seen = None, 0, 0, ""
    while i < len(data) and found is None:
        size = sizes[turn % len(sizes)]
        found = detokenizer.update(data[i : i + size])
        seen += detokenizer.take_text()
        assert expected.startswith(seen)
        i, turn = i + size, turn + 1
    detokenizer.finish()
    assert (found, seen + detokenizer.take_text()) == (stop, expected)


def test_without_text():
    for tokenizer, detokenize in ((None, True), (byte_level(), False)):
        params = SamplingParams(detokenize=detokenize)
        detokenizer = IncrementalDetokenizer(tokenizer, [1], params)
        assert detokenizer.update([65, 66]) is None
        detokenizer.finish()
        assert detokenizer.text() == ""
        assert detokenizer.token_ids.tolist() == [65, 66]


def test_nothing_follows_a_stop_text():
    """The text that the completing token began is dropped, too."""

    class Pieces:
        has_bytes = True
        strips_leading_space = False
        all_special_ids = frozenset()

        def pieces(self, skipped):
            return ("one", b".\xc3", "!")

    params = SamplingParams(stop=["."], max_tokens=None)
    detokenizer = IncrementalDetokenizer(Pieces(), [], params)
    assert detokenizer.update([0, 1]) == "."
    detokenizer.finish()
    assert detokenizer.text() == "one"
    assert detokenizer.update([2]) is None
    assert detokenizer.text() == "one"


def test_long_answers_are_kept_in_few_pieces():
    params = SamplingParams(max_tokens=None)
    detokenizer = IncrementalDetokenizer(byte_level(), [], params)
    for _ in range(5000):
        detokenizer.update([65])
    assert len(detokenizer._released) < 300
    assert detokenizer.text() == "A" * 5000


def test_special_tokens_that_stay(shared_data):
    tokenizer = Tokenizer.from_folder(shared_data / "tokenizers" / "llama3")
    kept, dropped = tokenizer.encode("<|python_tag|><|eot_id|>", add_special_tokens=False)
    params = SamplingParams(preserved_token_ids=[kept], max_tokens=None)
    detokenizer = IncrementalDetokenizer(tokenizer, [], params)
    detokenizer.update([kept, dropped])
    detokenizer.finish()
    assert detokenizer.text() == "<|python_tag|>"
