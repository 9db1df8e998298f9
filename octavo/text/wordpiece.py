"""Tokenizers of folders of BERT, DistilBERT and ELECTRA that have vocab.txt and no tokenizer.json.

Source: `BertTokenizer` of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.checkpoints.base import Checkpoint
from octavo.errors import ModelError

_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
_MODEL_TYPES = ("bert", "distilbert", "electra")
_NAMED = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
_NAMED |= {"cls_token": "[CLS]", "mask_token": "[MASK]"}


def build_wordpiece(
    checkpoint: Checkpoint, config: Mapping[str, Any]
) -> tuple[str, dict[str, Any]] | None:
    """Return tokenizer.json and the named tokens; None: the folder has no such vocabulary.

    Args:
        checkpoint: the folder.
        config: contents of special_tokens_map.json and tokenizer_config.json.

    Raises:
        ModelError: vocab.txt has no token for the begin, the end or unknown words.
    """
    text = checkpoint.read_text("vocab.txt")
    if text is None:
        return None
    named_class = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    known = named_class in _CLASSES
    if not named_class:
        known = checkpoint.config.get("model_type") in _MODEL_TYPES
    if not known:
        return None
    lines = text.removesuffix("\n").split("\n")
    vocab = {line.rstrip("\r"): i for i, line in enumerate(lines)}
    named = {name: _content(config.get(name)) or token for name, token in _NAMED.items()}
    for name in ("unk_token", "sep_token", "cls_token"):
        if named[name] not in vocab:
            raise ModelError(
                f"{checkpoint.path / 'vocab.txt'} has no token {named[name]!r}; download the "
                "file again."
            )
    named = {name: token for name, token in named.items() if token in vocab}
    strips = config.get("strip_accents")
    begin, end = named["cls_token"], named["sep_token"]

    def piece(kind: str, name: str, type_id: int) -> dict[str, Any]:
        return {kind: {"id": name, "type_id": type_id}}

    single = [piece("SpecialToken", begin, 0), piece("Sequence", "A", 0)]
    single.append(piece("SpecialToken", end, 0))
    second = [piece("Sequence", "B", 1), piece("SpecialToken", end, 1)]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": vocab[token], "content": token, "single_word": False, "lstrip": False}
            | {"rstrip": False, "normalized": False, "special": True}
            for token in sorted(set(named.values()), key=vocab.__getitem__)
        ],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": config.get("tokenize_chinese_chars", True) is not False,
            "strip_accents": strips if isinstance(strips, bool) else None,
            "lowercase": config.get("do_lower_case", True) is not False,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, *second],
            "special_tokens": {
                token: {"id": token, "ids": [vocab[token]], "tokens": [token]}
                for token in (begin, end)
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": named["unk_token"],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
    }
    return json.dumps(tokenizer, ensure_ascii=False), dict(named)


def _content(token: Any) -> str:
    """Return the text of a named token, which may be an object."""
    return str(token.get("content") or "") if isinstance(token, dict) else str(token or "")
