"""Tokenizers from SentencePiece models: SentencePiece's division, and transformers' ids."""

import io
import json
from random import Random

import pytest
import sentencepiece
import transformers

from octavo.errors import ModelError, UnsupportedError
from octavo.text.tokenizer import Tokenizer

# transformers' Marian asks for a library that changes the punctuation only on request.
pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")

LINES = [
    "The quick brown fox jumps over the lazy dog.",
    "Hello world, how are you today? I am fine!",
    "Ein schöner Tag in München: 3,5 km, 20 °C.",
    "translate English to German: The house is wonderful.",
    "Straße, naïve café, Ångström, ½ litre, № 5",
    "日本語の文章。 한국어 문장. Русский текст.",
] * 40
TEXTS = [
    "Hello world",
    "  two  spaces   and\ttabs \n lines ",
    "",
    " ",
    "ﬁne ½ Å \uff21\uff42\uff43 ① №",
    "unseen: \U0001f600 क्षि ﷽ \u200b x\u0301",
    "▁ marks ▁▁ of spaces ▁ ▁",
    "1 ▁▁",
    "日本語 한국어",
    "a" * 300,
]


def trained(**options):
    """Return the bytes of a model that is trained on `LINES`."""
    made = io.BytesIO()
    settings = {"vocab_size": 220, "hard_vocab_limit": False, "minloglevel": 2} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=made, **settings
    )
    return made.getvalue()


@pytest.fixture(scope="module")
def models():
    decoder = {"byte_fallback": True, "normalization_rule_name": "identity", "vocab_size": 500}
    decoder |= {"model_type": "bpe", "remove_extra_whitespaces": False}
    return {
        "fairseq": trained(),
        "t5": trained(pad_id=0, eos_id=1, unk_id=2, bos_id=-1),
        "pegasus": trained(pad_id=0, eos_id=1, unk_id=2, bos_id=-1),
        "marian": trained(unk_id=0, bos_id=1, eos_id=2, normalization_rule_name="identity"),
        "llama": trained(**decoder),
    }


def pieces_of(data):
    model = sentencepiece.SentencePieceProcessor(model_proto=data)
    return [model.id_to_piece(i) for i in range(len(model))]


def write(folder, name, data, config, **files):
    (folder / name).write_bytes(data)
    files["tokenizer_config"] = config
    for file, content in files.items():
        (folder / f"{file}.json").write_text(json.dumps(content))


NLLB = ["eng_Latn", "fra_Latn", "deu_Latn"]
CASES = {
    "T5Tokenizer": ("spiece.model", "t5", {}),
    "PegasusTokenizer": ("spiece.model", "pegasus", {}),
    "XLMRobertaTokenizer": ("sentencepiece.bpe.model", "fairseq", {}),
    "MBartTokenizer": ("sentencepiece.bpe.model", "fairseq", {"src_lang": "en_XX"}),
    "MBart50Tokenizer": ("sentencepiece.bpe.model", "fairseq", {"src_lang": "fr_XX"}),
    "NllbTokenizer": (
        "sentencepiece.bpe.model",
        "fairseq",
        {"src_lang": "fra_Latn", "additional_special_tokens": NLLB},
    ),
    "LlamaTokenizer": ("tokenizer.model", "llama", {}),
    "M2M100Tokenizer": ("sentencepiece.bpe.model", "fairseq", {"src_lang": "fr"}),
    "MarianTokenizer": ("source.spm", "marian", {}),
}


def folder_of(path, kind, models):
    """Write the files of a family as they are published; return its tokenizer's options."""
    name, model, config = CASES[kind]
    files = {}
    data = models[model]
    if kind in ("M2M100Tokenizer", "MarianTokenizer"):
        named = ["<s>", "<pad>", "</s>", "<unk>"]
        if kind == "MarianTokenizer":
            named = ["</s>", "<unk>"]
        # The vocabulary lacks some tokens of the model, in another order.
        rest = [p for p in reversed(pieces_of(data)[4:]) if p not in named]
        vocab = [*named, *rest[5:]]
        if kind == "MarianTokenizer":
            vocab += [">>fra<<", ">>deu<<", ">>sr-Latn<<", "<pad>"]
            (path / "target.spm").write_bytes(data)
            config = config | {"source_lang": "en", "target_lang": "mul"}
        files["vocab"] = {token: i for i, token in enumerate(vocab)}
    write(path, name, data, config | {"tokenizer_class": kind}, **files)
    return config


def layout_of(folder, kind, data, options):
    """Return ids by token, and the special tokens before and after a text."""
    if kind == "LlamaTokenizer":
        return {piece: i for i, piece in enumerate(pieces_of(data))}, [1], []
    if kind == "NllbTokenizer":  # transformers 5 puts the mask before languages that a file names
        tokens = ["<s>", "<pad>", "</s>", "<unk>", *pieces_of(data)[3:], *NLLB, "<mask>"]
        vocab = {token: i for i, token in enumerate(tokens)}
        return vocab, [vocab["fra_Latn"]], [2]
    theirs = getattr(transformers, kind).from_pretrained(folder, **options)
    around = theirs("")["input_ids"]
    end = around.index(theirs.eos_token_id)
    return theirs.get_vocab(), around[:end], around[end:]


@pytest.mark.parametrize("kind", list(CASES))
def test_a_text_is_divided_as_by_sentencepiece(tmp_path, models, kind):
    data = models[CASES[kind][1]]
    model = sentencepiece.SentencePieceProcessor(model_proto=data)
    vocab, before, after = layout_of(tmp_path, kind, data, folder_of(tmp_path, kind, models))
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        pieces = model.encode(text, out_type=str)
        ids = [vocab.get(piece, vocab["<unk>"]) for piece in pieces]
        assert tokenizer.encode(text) == [*before, *ids, *after], text
        if vocab["<unk>"] not in ids:
            shown = tokenizer.decode([*before, *ids, *after], skip_special_tokens=True)
            assert shown == model.decode(pieces), text


@pytest.mark.parametrize("kind", ["T5Tokenizer", "MarianTokenizer", "MBartTokenizer"])
def test_special_tokens_in_a_text(tmp_path, models, kind):
    data = models[CASES[kind][1]]
    model = sentencepiece.SentencePieceProcessor(model_proto=data)
    vocab, before, after = layout_of(tmp_path, kind, data, folder_of(tmp_path, kind, models))
    parts = ["The ", "</s>", " quick ", "<pad>", " fox"]
    ids = [
        [vocab[part]]
        if part in vocab
        else [vocab.get(p, vocab["<unk>"]) for p in model.encode(part, out_type=str)]
        for part in parts
    ]
    assert Tokenizer.from_folder(tmp_path).encode("".join(parts)) == [
        *before,
        *(i for part in ids for i in part),
        *after,
    ]


@pytest.mark.parametrize(
    "text",
    [
        ">>fra<< Hello >>deu<< world",
        " >>fra<< Hello",
        ">>sr-Latn<<Hello >>sr-Latn<<",
        "<s> Hello </s>>>fra<< x",
    ],
)
def test_marians_codes_and_control_tokens_of_the_model(tmp_path, models, text):
    folder_of(tmp_path, "MarianTokenizer", models)
    theirs = transformers.MarianTokenizer.from_pretrained(tmp_path)
    assert Tokenizer.from_folder(tmp_path).encode(text) == theirs(text)["input_ids"]


def varied(data, seed):
    random = Random(seed)
    changed = bytearray(data)
    for _ in range(random.choice((1, 4, 40))):
        changed[random.randrange(min(len(changed), 4000))] = random.randrange(256)
    return bytes(changed[: random.choice((len(changed), random.randrange(len(changed))))])


def test_damaged_files_are_errors(tmp_path, models):
    made = 0
    for seed in range(60):
        write(
            tmp_path, "spiece.model", varied(models["t5"], seed), {"tokenizer_class": "T5Tokenizer"}
        )
        try:
            Tokenizer.from_folder(tmp_path).encode("Hello")
            made += 1
        except (ModelError, UnsupportedError):
            pass
    assert made < 60


def test_errors_name_the_fix(tmp_path, models):
    write(tmp_path, "spiece.model", models["t5"], {"tokenizer_class": "OtherTokenizer"})
    with pytest.raises(UnsupportedError, match=r"OtherTokenizer.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)
    write(
        tmp_path, "spiece.model", models["t5"], {"tokenizer_class": "T5Tokenizer", "extra_ids": -1}
    )
    with pytest.raises(ModelError, match="extra_ids"):
        Tokenizer.from_folder(tmp_path)
    folder_of(tmp_path, "MarianTokenizer", models)
    (tmp_path / "spiece.model").unlink()
    (tmp_path / "vocab.json").write_text('{"</s>": 0, "<unk>": 0}')
    with pytest.raises(ModelError, match=r"vocab\.json"):
        Tokenizer.from_folder(tmp_path)


def test_added_tokens(models, tmp_path):
    """Tokens of added_tokens.json are found in texts; ids that leave a gap are refused."""
    size = len(pieces_of(models["llama"]))
    config = {"tokenizer_class": "LlamaTokenizer", "additional_special_tokens": ["<|end|>"]}
    for first in (size, size + 1):
        added = {"<|start|>": first, "<|end|>": first + 1}
        write(tmp_path, "tokenizer.model", models["llama"], config, added_tokens=added)
        if first > size:
            with pytest.raises(
                ModelError, match=r"added_tokens\.json gives the token '<.start.>' the id"
            ):
                Tokenizer.from_folder(tmp_path)
            continue
        tokenizer = Tokenizer.from_folder(tmp_path)
        found = tokenizer.encode("<|start|>a<|end|>")
        assert (found[1], found[-1]) == (size, size + 1)
        assert tokenizer.decode(found, skip_special_tokens=True).strip() == "<|start|> a"
    (tmp_path / "added_tokens.json").write_text('{"<|start|>": "5"}')
    with pytest.raises(ModelError, match=r"added_tokens\.json has the wrong id '5'"):
        Tokenizer.from_folder(tmp_path)
