"""Tokenizers from vocab.txt, equal to transformers' tokenizer of BERT."""

import json

import pytest
import transformers

from octavo.errors import ModelError
from octavo.text.tokenizer import Tokenizer

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the a Hello hello world naive naïve un ##seen ##s , ! 日 本"
VOCAB = WORDS.split()
TEXTS = ["Hello WORLD, hello!", "unseens naïve", "日本 [MASK] the", "", "zzz \x00 a\n", "un " * 40]
TEXTS += ["unzzz [NEW]the the", "e\u0301 İ ﬁ \u200b\ufeff\u3000 \U0001f600", "[new] [mask] [SEP]"]


def write(folder, config, model_type="bert", vocab=VOCAB, end="\n"):
    (folder / "vocab.txt").write_text("\n".join(vocab) + end)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"do_lower_case": False, "tokenizer_class": "BertTokenizer"},
        {"do_lower_case": True, "strip_accents": False, "tokenize_chinese_chars": False},
        {"mask_token": "[MASK]", "tokenizer_class": "DistilBertTokenizer"},
        {"additional_special_tokens": ["zzz", "[NEW]"]},
        {"added_tokens_decoder": {"5": {"content": "the", "special": False, "single_word": True}}},
    ],
)
def test_same_as_transformers(config, tmp_path):
    ours = Tokenizer.from_folder(write(tmp_path, config, end="" if config else "\n"))
    theirs = transformers.BertTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
    assert ours.decode(ours.encode(TEXTS[0])) == theirs.decode(theirs(TEXTS[0])["input_ids"])


def test_other_vocabularies_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"has no token '\[SEP\]'"):
        Tokenizer.from_folder(write(tmp_path, {}, vocab=VOCAB[:3]))
    with pytest.raises(ModelError, match="vocabulary of the old form"):
        Tokenizer.from_folder(write(tmp_path, {"tokenizer_class": "MPNetTokenizer"}))
