"""Tokenizer of DeBERTa V2 and V3, which are published with a SentencePiece model only."""

import json

import pytest
import sentencepiece

from octavo.errors import UnsupportedError
from octavo.text.tokenizer import Tokenizer
from tests.text.test_sentencepiece_families import TEXTS, trained


@pytest.fixture(scope="module")
def data():
    names = {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "unk": "[UNK]"}
    options = {f"{name}_id": i for i, name in enumerate(names)}
    return trained(**options, **{f"{name}_piece": piece for name, piece in names.items()})


def write(folder, data, **config):
    (folder / "spm.model").write_bytes(data)
    (folder / "config.json").write_text('{"model_type": "deberta-v2"}')
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_texts_and_pairs(data, tmp_path):
    tokenizer = Tokenizer.from_folder(write(tmp_path, data, do_lower_case=False))
    model = sentencepiece.SentencePieceProcessor(model_proto=data)
    for text in TEXTS:
        if "\u0301" in text or "ﷺ" in text:
            continue  # the library tokenizers normalizes separate accents in another way
        assert tokenizer.encode(text) == [1, *model.encode(text), 2], text
    mask = len(model)
    assert tokenizer.encode("a [MASK] b").count(mask) == 1
    assert tokenizer.token_to_id("[MASK]") == mask
    first, second = model.encode("a b"), model.encode("Hello")
    ids, begin = tokenizer.encode_text("a b", "Hello", True, max_tokens=None)
    assert ids == [1, *first, 2, *second, 2]
    assert begin == len(first) + 2


@pytest.mark.parametrize("field", ["do_lower_case", "split_by_punct"])
def test_other_divisions_are_refused(field, data, tmp_path):
    with pytest.raises(UnsupportedError, match=f"{field}=true"):
        Tokenizer.from_folder(write(tmp_path, data, **{field: True}))
