"""Hand-made tokenizers of the usual kinds, small enough to reason about."""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from octavo.system.byte_chars import CHAR_OF_BYTE
from octavo.text.tokenizer import Tokenizer

BOS, EOS = 256, 257


def byte_level() -> Tokenizer:
    """Return a tokenizer where token b is the byte b; then <s>, </s>, "hello" and "中"."""
    of_byte = CHAR_OF_BYTE

    def spell(text: str) -> str:
        return "".join(of_byte[b] for b in text.encode())

    words = ["hello", "中"]
    vocab = {of_byte[b]: b for b in range(256)}
    merges = []
    backend_vocab = vocab | {"<s>": BOS, "</s>": EOS}
    for word in words:  # each word is built up from the left
        left = spell(word)[0]
        for char in spell(word)[1:]:
            merges.append((left, char))
            left += char
            backend_vocab.setdefault(left, len(backend_vocab))
    backend = tokenizers.Tokenizer(models.BPE(vocab=backend_vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


def sentencepiece() -> Tokenizer:
    """Return Llama 2's kind: "▁" for spaces, and bytes as tokens for unknown characters."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    names += ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab"]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})


def word_piece() -> Tokenizer:
    """Return BERT's kind: the text of a token depends on the one before."""
    vocab = {"[UNK]": 0, "[CLS]": 1, "play": 2, "##ing": 3, "##er": 4, "a": 5, ".": 6}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.add_special_tokens(["[UNK]", "[CLS]"])
    return Tokenizer(backend, {"cls_token": "[CLS]"})


def save(tokenizer: Tokenizer, folder: Path, config: dict | None = None) -> Path:
    """Write a tokenizer as a model folder contains it."""
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
