"""Folders with SentencePiece models and no tokenizer.json.

`sentencepiece_files` has tiny models, and ids of odd texts that the library sentencepiece 0.2
divided (of Marian, M2M100 and Llama, transformers' tokenizers).
"""

import contextlib
import json
import shutil
from pathlib import Path

import pytest

from octavo.errors import ModelError, UnsupportedError
from octavo.text.sentencepiece import SentencePiece
from octavo.text.tokenizer import Tokenizer

FILES = Path(__file__).parent / "sentencepiece_files"
EXPECTED = json.loads((FILES / "expected.json").read_text("utf-8"))
FAMILIES = {
    "t5": ("t5", "spiece.model", {"tokenizer_class": "T5Tokenizer"}),
    "pegasus": ("t5", "spiece.model", {"tokenizer_class": "PegasusTokenizerFast"}),
    "xlm_roberta": ("fair", "sentencepiece.bpe.model", {"tokenizer_class": "XLMRobertaTokenizer"}),
    "mbart50": (
        "fair",
        "sentencepiece.bpe.model",
        {"tokenizer_class": "MBart50Tokenizer", "src_lang": "de_DE"},
    ),
    "nllb": (
        "fairbpe",
        "sentencepiece.bpe.model",
        {"tokenizer_class": "NllbTokenizer", "src_lang": "fra_Latn"}
        | {"additional_special_tokens": ["eng_Latn", "fra_Latn", "deu_Latn"]},
    ),
    "m2m100": (
        "fairbpe",
        "sentencepiece.bpe.model",
        {"tokenizer_class": "M2M100Tokenizer", "src_lang": "de"},
    ),
    "marian": ("source", "source.spm", {"source_lang": "en", "target_lang": "mul"}),
    "llama": ("llama", "tokenizer.model", {"tokenizer_class": "LlamaTokenizer", "legacy": False}),
}


def _folder(path: Path, family: str, **changes: object) -> Path:
    model, name, config = FAMILIES[family]
    shutil.copy(FILES / f"{model}.model", path / name)
    (path / "tokenizer_config.json").write_text(json.dumps(config | changes))
    if family in EXPECTED["vocabularies"]:
        (path / "vocab.json").write_text(json.dumps(EXPECTED["vocabularies"][family]))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_of_odd_texts(tmp_path, family):
    tokenizer = Tokenizer.from_folder(_folder(tmp_path, family))
    for text, ids in zip(EXPECTED["texts"], EXPECTED["ids"][family], strict=True):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.encode_text(text, None, True, max_tokens=None)[0] == ids, text


@pytest.mark.parametrize("family", FAMILIES)
def test_text_of_ids(tmp_path, family):
    tokenizer = Tokenizer.from_folder(_folder(tmp_path, family))
    text = "The engine, then tokens."
    ids = tokenizer.encode(text)
    if family not in ("m2m100", "marian"):  # whose vocab.json lacks some of the model's tokens
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert tokenizer.cut(f"{text} More text.", 3) == text[: len(tokenizer.cut(text, 3))]
    assert tokenizer.all_special_ids >= {ids[-1]} - set(tokenizer.encode(text, False))
    begin, end = tokenizer.special_ends()
    shorter = tokenizer(text, truncation=True, max_length=4).input_ids
    middle = tokenizer.encode(text, False)[: 4 - len(begin) - len(end)]
    assert shorter == begin + middle + end


def test_marians_codes_count_at_the_beginning_only(tmp_path):
    tokenizer = Tokenizer.from_folder(_folder(tmp_path, "marian"))
    code = tokenizer.token_to_id(">>fra<<")
    assert tokenizer.encode(">>fra<< engine")[0] == code
    assert tokenizer.encode(">>fra<< engine")[1:] == tokenizer.encode("engine")
    assert code not in tokenizer.encode("say >>fra<<")
    assert tokenizer.decode([code]) == ">>fra<<"


def test_mbart_reads_the_language_behind_the_text(tmp_path):
    folder = _folder(tmp_path, "mbart50", tokenizer_class="MBartTokenizer")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x"))[-2:] == ["</s>", "de_DE"]
    assert tokenizer.id_to_token(len(tokenizer) - 1) == "<mask>"


def test_class_by_the_type_of_the_model(tmp_path):
    folder = _folder(tmp_path, "t5", tokenizer_class=None)
    with pytest.raises(UnsupportedError, match="class 'unknown'"):
        Tokenizer.from_folder(folder)
    (folder / "config.json").write_text('{"model_type": "umt5"}')
    assert Tokenizer.from_folder(folder).token_to_id("<extra_id_0>") is not None


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("t5", {"tokenizer_class": "XLNetTokenizer"}, "XLNetTokenizer"),
        ("t5", {"extra_ids": -1}, "extra_ids"),
        ("pegasus", {"offset": 0}, "offset"),
        ("mbart50", {"src_lang": "xx"}, "src_lang='xx'"),
        ("nllb", {"additional_special_tokens": []}, "languages"),
        ("m2m100", {"language_codes": "other"}, "language_codes"),
        ("marian", {"separate_vocabs": True}, "separate_vocabs"),
        ("llama", {"tokenizer_class": "T5Tokenizer"}, "<pad>"),
    ],
)
def test_wrong_settings(tmp_path, family, changes, message):
    with pytest.raises((ModelError, UnsupportedError), match=message):
        Tokenizer.from_folder(_folder(tmp_path, family, **changes))


def test_wrong_vocabulary(tmp_path):
    folder = _folder(tmp_path, "marian")
    for vocab in ({}, {"</s>": 0, "<unk>": 0}, {"</s>": "0"}, {"</s>": -1}, {"a": 0}):
        (folder / "vocab.json").write_text(json.dumps(vocab))
        with pytest.raises(ModelError, match=r"vocab\.json"):
            Tokenizer.from_folder(folder)


def test_damaged_files():
    data = (FILES / "t5.model").read_bytes()
    readable = 0
    for cut in range(0, len(data), 97):
        changed = bytearray(data)
        changed[cut] ^= 0xFF
        for broken in (data[:cut], bytes(changed)):
            with contextlib.suppress(ModelError):  # no other error
                readable += bool(SentencePiece.from_bytes(broken, "x.model").pieces)
    assert readable < 2 * (len(data) // 97)
    for whole in (b"", b"\x0f", b"\xff" * 40, b"\n\x00"):
        with pytest.raises(ModelError, match=r"x\.model"):
            SentencePiece.from_bytes(whole, "x.model")
