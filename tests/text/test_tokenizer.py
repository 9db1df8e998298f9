"""Tokenizer: compared with transformers, files of all kinds, and the bytes of each token."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import decoders, pre_tokenizers

from octavo.errors import ContextLengthError, ModelError, RequestError
from octavo.text.tokenizer import Tokenizer
from tests.small_tokenizers import BOS, EOS, byte_level, save, sentencepiece, word_piece

TEXTS = [
    "Hello, world!",
    "  two spaces,\ttab\nnewline\r\n",
    "naïve Straße 中文 日本語 한국어 🤗👩‍👩‍👧 e\u0301",
    "x" * 300,
    "",
    "<|endoftext|></s><s>",
    "\x00\x7f\u200b\ufffd",
]
REAL = ["qwen2", "gpt2", "llama2", "llama3", "bert"]


@pytest.fixture(scope="module", params=REAL)
def real(request, shared_data):
    folder = shared_data / "tokenizers" / request.param
    return folder, Tokenizer.from_folder(folder)


def test_same_ids_and_texts_as_transformers(real):
    transformers = pytest.importorskip("transformers")
    folder, tokenizer = real
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            expected = theirs(text, add_special_tokens=special)["input_ids"]
            assert tokenizer.encode(text, special) == expected
        ids = tokenizer.encode(text)
        for skip in (True, False):
            decoded = theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert tokenizer.decode(ids, skip) == decoded
    assert len(tokenizer) == len(theirs)
    assert tokenizer.vocab_size == theirs.vocab_size
    assert tokenizer.eos_token_id == theirs.eos_token_id
    assert tokenizer.bos_token_id == theirs.bos_token_id
    assert set(theirs.all_special_ids) <= tokenizer.all_special_ids


def test_token_bytes_add_up_to_the_text(real):
    _, tokenizer = real
    for text in TEXTS[:3]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
        if tokenizer.strips_leading_space:
            joined = joined.removeprefix(" ")
        assert joined.lstrip() == tokenizer.decode(ids).lstrip()


def test_has_bytes_is_known_for_the_usual_kinds(shared_data):
    kinds = {
        name: Tokenizer.from_folder(shared_data / "tokenizers" / name).has_bytes
        for name in ("gpt2", "llama2", "bert")
    }
    assert kinds == {"gpt2": True, "llama2": True, "bert": False}


def test_pieces_of_characters():
    tokenizer = byte_level()
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("中")] == ["中".encode()]
    assert tokenizer.token_bytes(0xE4) == b"\xe4"
    assert tokenizer.token_text(0xE4) == "\ufffd"
    assert tokenizer.token_text(BOS) == "<s>"
    assert tokenizer.token_text(10**6) == ""
    assert tokenizer.token_bytes(10**6) == b""
    llama = sentencepiece()
    assert llama.token_bytes(llama.token_to_id("<0xE4>")) == b"\xe4"
    assert llama.token_text(llama.token_to_id("▁ab")) == " ab"


def test_token_text_in_the_middle_of_a_text():
    tokenizer = word_piece()
    assert tokenizer.token_text(3) == "ing"
    assert tokenizer.token_text(2) == " play"


def test_conversions():
    tokenizer = byte_level()
    assert tokenizer.convert_ids_to_tokens([65, EOS, 10**6]) == ["A", "</s>", ""]
    assert tokenizer.convert_tokens_to_ids(["A", "</s>"]) == [65, EOS]
    with pytest.raises(RequestError, match="'nope'"):
        tokenizer.convert_tokens_to_ids(["A", "nope"])


@pytest.mark.parametrize("ids", [[-1], [2**40], ["a"], [1.5]])
def test_bad_ids_are_the_requests_fault(ids):
    with pytest.raises(RequestError):
        byte_level().decode(ids)
    assert byte_level().id_to_token(-1) is None


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "a\ud83d"])
def test_lone_surrogates_are_the_requests_fault(text):
    with pytest.raises(RequestError, match="surrogate") as caught:
        byte_level().encode(text)
    assert caught.value.param == "prompt"


def test_flags_add_what_the_post_processor_lacks(tmp_path):
    save(byte_level(), tmp_path)
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}

    def encode(**flags):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | flags))
        return Tokenizer.from_folder(tmp_path).encode("A")

    assert encode() == [65]
    assert encode(add_bos_token=True) == [BOS, 65]
    assert encode(add_bos_token=True, add_eos_token=True) == [BOS, 65, EOS]
    assert encode(add_bos_token=False) == [65]
    assert Tokenizer.from_folder(tmp_path).encode("A", add_special_tokens=False) == [65]


def test_post_processor_and_flag_do_not_add_twice(shared_data):
    tokenizer = Tokenizer.from_folder(shared_data / "tokenizers" / "llama2")
    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.encode("a").count(1) == 1


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    tokenizer = byte_level()
    tokenizer._backend.enable_truncation(3)
    tokenizer._backend.enable_padding(length=8)
    save(tokenizer, tmp_path, {})
    assert Tokenizer.from_folder(tmp_path).encode("abcdef") == list(b"abcdef")
    assert Tokenizer.from_folder(tmp_path).encode("a") == list(b"a")


def test_special_tokens_map_and_missing_tokens(tmp_path):
    size = len(byte_level())
    added = {str(size): {"content": "<|tool|>", "special": True}}
    save(byte_level(), tmp_path, {"added_tokens_decoder": added, "eos_token": None})
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.eos_token_id == EOS
    assert tokenizer.bos_token is None
    assert tokenizer.encode("<|tool|>") == [size]
    assert size in tokenizer.all_special_ids


def test_contradicting_files(tmp_path):
    added = {"9999": {"content": "<|tool|>", "special": True}}
    save(byte_level(), tmp_path, {"added_tokens_decoder": added})
    with pytest.raises(ModelError, match="9999"):
        Tokenizer.from_folder(tmp_path)


def test_chat_templates_of_all_forms(tmp_path):
    save(byte_level(), tmp_path, {"chat_template": "one"})
    assert Tokenizer.from_folder(tmp_path).chat_templates == {"default": "one"}
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    save(byte_level(), tmp_path, {"chat_template": named})
    assert Tokenizer.from_folder(tmp_path).chat_templates == {"default": "d", "tool_use": "t"}
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    templates = Tokenizer.from_folder(tmp_path).chat_templates
    assert templates == {"default": "file", "tool_use": "t", "rag": "r"}
    save(byte_level(), tmp_path, {"chat_template": ["x"]})
    with pytest.raises(ModelError, match="chat_template"):
        Tokenizer.from_folder(tmp_path)


def test_clear_errors(tmp_path):
    with pytest.raises(ModelError, match="no folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="skip-tokenizer-init"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ModelError, match=r"old form.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"tokenizer\.model is no usable SentencePiece model"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged"):
        Tokenizer.from_folder(tmp_path)
    save(byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match="JSON object"):
        Tokenizer.from_folder(tmp_path)


def test_threads(shared_data):
    tokenizer = Tokenizer.from_folder(shared_data / "tokenizers" / "gpt2")
    text = "A story about a 中 dog. " * 20
    expected = tokenizer.encode(text)

    def work(_):
        ids = tokenizer.encode(text)
        return ids == expected and "".join(map(tokenizer.token_text, ids)).count("dog") == 20

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))


def test_no_decoder_at_all():
    tokenizer = word_piece()
    tokenizer._backend.decoder = None
    plain = Tokenizer(tokenizer._backend)
    assert not plain.has_bytes
    assert plain.token_text(2) == " play"


def test_metaspace_keeps_its_spaces():
    backend = sentencepiece()._backend
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend)
    assert not tokenizer.has_bytes
    assert tokenizer.token_text(tokenizer.token_to_id("▁ab")) == " ab"


def test_long_texts_are_the_same_tokens():
    tokenizer = byte_level()
    for text in ("hello wörld </s>" * 200, "x" * 5000):
        parts = [i for piece in (text[:500], text[500:]) for i in tokenizer.encode(piece, False)]
        ids = tokenizer.encode(text, False)
        assert tokenizer.decode(ids) == tokenizer.decode(parts) == text
        assert tokenizer.encode_all([text, "a"]) == [ids, [97]]
    with pytest.raises(RequestError, match="Unicode"):
        tokenizer.encode("x" * 5000 + "\ud800")


def test_texts_of_too_many_tokens():
    tokenizer = byte_level()
    assert len(tokenizer.encode("ab" * 50, False, max_tokens=100)) == 100
    with pytest.raises(ContextLengthError, match="has 101 tokens"):
        tokenizer.encode("ab" * 50 + "c", False, max_tokens=100)
    with pytest.raises(ContextLengthError, match="characters"):
        tokenizer.encode("a" * 2**17, False, max_tokens=100)


def test_calls_as_transformers_has_them(real):
    transformers = pytest.importorskip("transformers")
    folder, tokenizer = real
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    text = TEXTS[0]
    encoded = tokenizer(text)
    assert encoded.input_ids == encoded["input_ids"] == theirs(text)["input_ids"]
    assert encoded.attention_mask == [1] * len(encoded.input_ids)
    several = tokenizer([text, text], truncation=True, max_length=2)
    assert several.input_ids == theirs([text, text], truncation=True, max_length=2)["input_ids"]
    assert tokenizer.get_vocab() == theirs.get_vocab()
    assert tokenizer.get_added_vocab() == theirs.get_added_vocab()
    assert set(theirs.all_special_tokens) <= set(tokenizer.all_special_tokens)
    assert tokenizer.pad_token == theirs.pad_token
    assert tokenizer.unk_token_id == theirs.unk_token_id
    first = encoded.input_ids[0]
    assert tokenizer.decode(first) == theirs.decode(first)


def test_a_chat_template_can_be_applied(tmp_path):
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ more }}"
    save(byte_level(), tmp_path, {"chat_template": source})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.chat_template == source
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, more="!")
    assert text == "<user>Hi!"
    ids = tokenizer.apply_chat_template([chat, chat], more="!")
    assert ids == [tokenizer.encode(text, add_special_tokens=False)] * 2
    assert tokenizer.apply_chat_template(chat, chat_template="{{ 5 }}", tokenize=False) == "5"
    with pytest.raises(RequestError, match="messages"):
        tokenizer.apply_chat_template([])


LONG = [
    "Once upon a time, naïve 中文 🤗 frogs sang. " * 4000,
    " " * 200_000 + "the end " * 9000,
    "x" * 150_000 + " a few words at the end",
]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [byte_level, sentencepiece, word_piece])
def test_the_end_of_a_long_text_is_that_of_all_its_tokens(make, side, monkeypatch):
    tokenizer = make()
    for text in LONG:
        whole = tokenizer.encode(text, add_special_tokens=False)
        expected = whole[:100] if side == "right" else whole[-100:]
        options = {"max_tokens": 100, "truncation_side": side}
        assert tokenizer.encode_text(text, None, False, **options) == (expected, 0)
    seen, encode = [], tokenizer._encode

    def spy(texts, special):
        seen.extend(map(len, texts))
        return encode(texts, special)

    monkeypatch.setattr(tokenizer, "_encode", spy)
    tokenizer.encode_text(LONG[0] * 9, None, True, **options)
    assert max(seen) == 2**16


def test_the_beginning_of_a_long_text():
    for tokenizer in (byte_level(), word_piece()):
        for text in LONG[:2]:
            cut = tokenizer.cut(text, 50)
            assert text.startswith(cut)
            whole = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.encode(cut, add_special_tokens=False) == whole[:50]
