"""Small random BERT models in folders, made by transformers, with a tokenizer of whole words."""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    "a",
    "the",
    "dog",
    "cat",
    "sun",
    "barks",
    "shines",
    "i",
    "like",
    "do",
    "not",
    "it",
    "which",
    "animal",
    "once",
    "upon",
    "time",
    "one",
    "two",
]


def write_tokenizer(folder: Path) -> int:
    """Write BERT's kind of tokenizer, with letters for unknown words; return its size."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)] + [*"0123456789?.,!'"]
    words = dict.fromkeys([*SPECIAL, *WORDS, *letters, *(f"##{c}" for c in letters)])
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    backend.save(str(folder / "tokenizer.json"))
    names = ("pad", "unk", "cls", "sep", "mask")
    config = {f"{name}_token": f"[{name.upper()}]" for name in names}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    )
    return len(vocab)


def write_bert(folder: Path, head: str = "", labels: int = 0) -> Path:
    """Write a model; `head` is that of its class, such as ForSequenceClassification."""
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=write_tokenizer(folder),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.3,
        **({"num_labels": labels} if labels else {}),
    )
    kind = getattr(transformers, f"Bert{head or 'Model'}")
    kind(config).eval().save_pretrained(folder)
    return folder
