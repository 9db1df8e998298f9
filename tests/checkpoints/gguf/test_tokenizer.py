"""Tokenizers of GGUF files: ids of each kind, added tokens, templates, and wrong values."""

import json

import numpy as np
import pytest
import tokenizers

from octavo.checkpoints.gguf.charsmap import check_charsmap
from octavo.checkpoints.gguf.pre_tokenizers import LINES_NAMES, PRE_TOKENIZERS
from octavo.checkpoints.gguf.tokenizer import tokenizer_texts
from octavo.errors import ModelError, RequestError
from octavo.system.byte_chars import CHAR_OF_BYTE
from octavo.text.pair_template import PairTemplate
from octavo.text.tokenizer import Tokenizer


def ggml(model, tokens, types=None, **changes):
    values = {"model": model, "tokens": tokens, "token_type": types} | changes
    return {f"tokenizer.ggml.{k}": v for k, v in values.items() if v is not None}


def llama(**changes):
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [2, 3, 3, *[6] * 256]
    names += ["▁", "a", "b", "▁a", "ab", "▁ab", "  ", "<|end|>"]
    types += [1, 1, 1, 1, 1, 1, 4, 1]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -3.0, -2.0, -1.0, 0.0, 0.0]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return ggml("llama", names, types, **{"scores": scores, **ids, **changes})


def byte_level(**changes):
    tokens = [*CHAR_OF_BYTE, "he", "hel", "<|im_start|>", "<|im_end|>"]
    types = [*[1] * 258, 3, 4]
    values = {"pre": "gpt-2", "merges": ["h e", "he l", "h e"], "eos_token_id": 258}
    return ggml("gpt2", tokens, types, **{**values, **changes})


def load(metadata, folder):
    for name, text in tokenizer_texts(metadata).items():
        (folder / name).write_text(text, "utf-8")
    return Tokenizer.from_folder(folder)


def test_sentencepiece(tmp_path):
    tokenizer = load(llama(), tmp_path)
    assert tokenizer.encode("ab b") == [1, 264, 259, 261]
    assert tokenizer.encode("é", False) == [259, 3 + 0xC3, 3 + 0xA9]
    # A user-defined token is one id, and so is a token that ends answers whatever its type.
    assert tokenizer.encode("a  a<|end|>", False) == [262, 265, 262, 266]
    assert tokenizer.decode(tokenizer.encode("ab é"), True) == "ab é"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert {0, 1, 2, 266} == tokenizer.all_special_ids
    plain = load(llama(add_space_prefix=False, add_bos_token=False, add_eos_token=True), tmp_path)
    assert plain.encode("ab") == [263, 2]


def test_arrays_of_numpy(tmp_path):
    metadata = llama()
    for key, dtype in (("scores", np.float32), ("token_type", np.int32)):
        key = f"tokenizer.ggml.{key}"
        metadata[key] = np.array(metadata[key], dtype)
    assert load(metadata, tmp_path).encode("ab b") == [1, 264, 259, 261]


def test_byte_level(tmp_path):
    tokenizer = load(byte_level(), tmp_path)
    assert tokenizer.encode("hello<|im_start|>é<|im_end|>") == [
        *[257, ord("l"), ord("o"), 258, 0xC3, 0xA9, 259]
    ]
    assert tokenizer.all_special_ids == {258}
    assert tokenizer.decode([257, 0xC3, 0xA9]) == "helé"


def test_every_pre_tokenizer_is_valid_and_keeps_the_text(tmp_path):
    text = "It's 12345 ½8963 camelCase\t  दी 中文\u3000\r\n!? "
    for name in PRE_TOKENIZERS.keys() | {"gpt-2"}:
        metadata = byte_level(pre=name, add_bos_token=False)
        backend = tokenizers.Tokenizer.from_str(tokenizer_texts(metadata)["tokenizer.json"])
        assert backend.decode(backend.encode(text).ids) == text, name


@pytest.mark.parametrize(
    ("pre", "text", "parts"),
    [
        ("gpt-2", "I'm a  b 1234", ["I", "'m", " a", " ", " b", " 1234"]),
        ("llama-bpe", "I'M 1234\n\nx", ["I", "'M", " ", "123", "4", "\n\n", "x"]),
        ("qwen2", "a 12", ["a", " ", "1", "2"]),
        ("falcon", "a.1234", ["a", ".", "123", "4"]),
        ("gpt-4o", "camelCase's", ["camel", "Case's"]),
        ("afmoe", "x1234567y", ["x", "1", "234", "567", "y"]),
        ("tiny_aya", "1234 1234a", ["1", "234", " ", "123", "4", "a"]),
        ("superbpe", "a 12345", ["a ", "12", "345"]),
    ],
)
def test_parts(pre, text, parts):
    metadata = byte_level(pre=pre, add_bos_token=False)
    step = json.loads(tokenizer_texts(metadata)["tokenizer.json"])["pre_tokenizer"]
    for pattern in step["pretokenizers"][:-1]:
        assert pattern["type"] == "Split"
    backend = tokenizers.Tokenizer.from_str(tokenizer_texts(metadata)["tokenizer.json"])
    found = [text[slice(*span)] for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert found == parts


def test_long_numbers_take_linear_time():
    backend = tokenizers.Tokenizer.from_str(
        tokenizer_texts(byte_level(pre="tiny_aya"))["tokenizer.json"]
    )
    assert len(backend.pre_tokenizer.pre_tokenize_str("1" * 100_000)) == 33_334


def test_lines(tmp_path):
    tokens = ["<bos>", "<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a", "\n", "\n\n"]
    metadata = ggml(
        *("gemma4", tokens, [3, 2, *[6] * 256, *[1] * 5]),
        merges=["▁ a", "\n \n"],
        bos_token_id=0,
        unknown_token_id=1,
    )
    tokenizer = load(metadata, tmp_path)
    assert tokenizer.encode("a a\n\né") == [0, 259, 260, 262, 2 + 0xC3, 2 + 0xA9]
    assert "gemma4" in LINES_NAMES


def test_word_piece(tmp_path):
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁play", "ing", "▁a", "▁."]
    ids = {"unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3}
    tokenizer = load(ggml("bert", tokens, [3, 3, 3, 3, 1, 1, 1, 1], **ids), tmp_path)
    assert tokenizer.encode("Playing á. x") == [2, 4, 5, 6, 7, 1, 3]
    assert tokenizer.decode([4, 5]) == "playing"
    pair = tokenizer._backend.encode("playing", "a.")
    assert (pair.ids, pair.type_ids) == ([2, 4, 5, 3, 6, 7, 3], [0, 0, 0, 0, 1, 1, 1])


def world(**changes):
    data = [*(bytes([b]) for b in range(256)), b"ab", b"abcd", b" <", b"\n\n", b"'\\", b" \xe4\xbd"]
    data += ["é".encode(), "aé".encode()]
    tokens = ["<s>", *(repr(b)[2:-1] for b in data), "[PAD265]"]
    types = [3, *[1] * len(data), 5]
    return ggml("rwkv", tokens, types, **{"bos_token_id": 0, "eot_token_id": 260, **changes})


def test_longest_tokens(tmp_path):
    """Tokens may be parts of characters."""
    tokenizer = load(world(), tmp_path)
    cases = {
        "abcdab": [258, 257],
        "abc": [257, 1 + ord("c")],
        "xaéé": [1 + ord("x"), 264, 263],
        "\n\n\n": [260, 1 + 10],
        "'\\'": [261, 1 + ord("'")],
        " 你": [262, 1 + 0xA0],
        " <s>a <": [1 + ord(" "), 0, 1 + ord("a"), 259],  # special ones come first
        "": [],
    }
    for text, ids in cases.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes(262) == b" \xe4\xbd"
    assert tokenizer.encode_all(["ab", "é"]) == [[257], [263]]
    assert tokenizer.all_special_ids == {0}
    long = "abcd <é" * 20_000
    assert tokenizer.encode(long) == [258, 259, 263] * 20_000
    assert load(world(add_bos_token=True), tmp_path).encode("ab") == [0, 257]
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode("a\ud800")


def test_unigram(tmp_path):
    tokens = ["<pad>", "</s>", "<unk>", "▁", "a", "▁a", "b", "▁ab"]
    scores = [0.0, 0.0, 0.0, -2.0, -3.0, -4.0, -3.0, -6.0]
    metadata = ggml("t5", tokens, [3, 3, 2, 1, 1, 1, 1, 1], scores=scores)
    for flag in ("add_space_prefix", "remove_extra_whitespaces"):
        metadata[f"tokenizer.ggml.{flag}"] = True
    tokenizer = load(metadata, tmp_path)
    assert tokenizer.encode("  ab   a c ") == [7, 5, 3, 2, 1]


@pytest.mark.parametrize(
    ("architecture", "between"),
    [
        ("bert", [258, 258]),
        ("jina-bert-v2", [258, 258]),
        ("modern-bert", [258]),
        ("llama", [258, 256]),
    ],
)
def test_pairs_of_encoders(architecture, between, tmp_path):
    metadata = byte_level(bos_token_id=256, eos_token_id=258, add_bos_token=True)
    metadata |= {"general.architecture": architecture, "tokenizer.ggml.add_eos_token": True}
    tokenizer = load(metadata, tmp_path)
    a, b = (tokenizer.encode(text, False) for text in "ab")
    ids, second = tokenizer.encode_text("a", "b", True, max_tokens=None)
    assert ids == [256, *a, *between, *b, 258]
    assert second == 0  # these models have one type of tokens


def test_templates_and_names(tmp_path):
    metadata = byte_level(padding_token_id=2**32 - 1)
    metadata["tokenizer.chat_template"] = "{{ 1 }}"
    tokenizer = load(metadata, tmp_path)
    assert tokenizer.chat_templates == {"default": "{{ 1 }}"}
    assert tokenizer.special_tokens == {"eos_token": "<|im_start|>"}
    metadata["tokenizer.chat_template.tool_use"] = "{{ 2 }}"
    assert load(metadata, tmp_path).chat_templates == {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}


def test_the_template_of_a_reranker(tmp_path):
    metadata = byte_level()
    metadata["tokenizer.chat_template.rerank"] = "<Query>: {query}\n<Document>: {document}\n{x}"
    template = PairTemplate.find(load(metadata, tmp_path))
    text = template.submit("Is {document} a word?", "No, {query}").result()
    assert text == "<Query>: Is {document} a word?\n<Document>: No, {query}\n{x}"
    metadata["tokenizer.chat_template.rerank"] = "{{ messages[0].content }}"
    assert load(metadata, tmp_path).chat_templates == {"rerank": "{{ messages[0].content }}"}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "model is missing"),
        (ggml("plamo2", ["a"]), "'plamo2'; supported: llama"),
        (ggml("rwkv", ["a"]), "tokens lacks some of the 256 single bytes"),
        (ggml("rwkv", ["a", r"\x61"]), "tokens contains the same bytes twice"),
        (byte_level(pre="new"), "pre is 'new'.*known: .*gemma4"),
        (byte_level(pre=None), "pre is missing"),
        (byte_level(pre=3), "pre is 3, not a text"),
        (byte_level(merges=["h x"]), "merges contains 'h x', but 'hx' is not"),
        (byte_level(merges=["he"]), "'' is not a token"),
        (byte_level(merges=None), "merges is missing"),
        (byte_level(merges=[1]), "merges is not an array of str"),
        (ggml("gpt2", None), "tokens is missing"),
        (byte_level(token_type=[1]), "token_type has 1 values for 260 tokens"),
        (byte_level(eos_token_id=260), "eos_token_id is 260"),
        (byte_level(eos_token_id="x"), "eos_token_id is 'x'"),
        (byte_level(pre="llama-bpe"), r"bos_token_id is missing.*add_bos_token"),
        (byte_level(add_bos_token=1), "add_bos_token is 1, not true or false"),
        (ggml("gpt2", ["a", "a"]), r"'a' twice \(ids 0 and 1\)"),
        (ggml("gpt2", ["a" * 2000]), "2000 characters"),
        (ggml("llama", ["a"]), "scores is missing"),
        (byte_level(token_type=[9] * 260), "token_type is 9 at id 0"),
        (ggml("llama", ["a"], scores=[float("nan")]), "scores is nan at id 0"),
        (ggml("t5", ["a"], scores=[0.0], precompiled_charsmap=[1] * 9), "charsmap is damaged"),
        (byte_level() | {"tokenizer.chat_template": 1}, "chat_template is 1, not a text"),
        (byte_level() | {"tokenizer.chat_template.x": "x" * 2**21}, "at most 1048576"),
    ],
)
def test_wrong_values_are_named(metadata, message):
    with pytest.raises(ModelError, match=message):
        tokenizer_texts(metadata)


def test_merges_are_limited():
    tokens = ["a" * n for n in range(1, 300)]
    with pytest.raises(ModelError, match="more than 19136 ways"):
        tokenizer_texts(ggml("llama", tokens, scores=[0.0] * len(tokens)))


def test_charsmap_that_leads_outside():
    units = np.array([1 << 10, *[0] * 255], "<u4")
    data = units.nbytes.to_bytes(4, "little") + units.tobytes() + b"x\0"
    check_charsmap(data)
    units[0] = 1 << 20
    with pytest.raises(ValueError, match="outside"):
        check_charsmap(data[:4] + units.tobytes() + b"x\0")
