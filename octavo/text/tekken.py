"""Mistral's tekken.json as the files of a Hugging Face tokenizer.

A tekken.json has the special tokens and the ranks of byte-level BPE, as tiktoken files do. The
merges follow from the ranks: each way to divide a token into two tokens is a merge.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec

from octavo.errors import ModelError
from octavo.system.byte_chars import CHAR_OF_BYTE
from octavo.text.mistral_template import ModelSettings, chat_template

_MOST_SPECIAL, _LONGEST = 2**16, 1024
"""Most special tokens, and most bytes of a token, which bound memory and time."""
_OLD_SPECIAL: tuple[str, ...] = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]")
_OLD_SPECIAL += ("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]")
_OLD_SPECIAL += ("[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]")
_OLD_SPECIAL += ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]")
"""Special tokens of a file that does not list them."""


class _Entry(msgspec.Struct):
    rank: int
    token_bytes: str


class _Special(msgspec.Struct):
    rank: int
    token_str: str


class _Config(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int
    version: str = ""


class _File(msgspec.Struct):
    config: _Config
    vocab: list[_Entry]
    special_tokens: list[_Special] | None = None
    model_settings_builder: ModelSettings | None = None


def read_tekken(text: str, where: str) -> tuple[str, dict[str, Any]]:
    """Return tokenizer.json, and the content of tokenizer_config.json.

    Args:
        text: the content of tekken.json.
        where: its name, for errors.

    Raises:
        ModelError: the file is damaged.
    """
    try:
        file = msgspec.json.decode(text, type=_File)
        count, size = file.config.default_num_special_tokens, file.config.default_vocab_size
        if not 0 < count <= min(size, _MOST_SPECIAL):
            raise ValueError(f"default_num_special_tokens={count}, and default_vocab_size={size}")
        entries = file.vocab[: size - count]
        tokens = [base64.b64decode(entry.token_bytes, validate=True) for entry in entries]
    except ValueError as error:  # also msgspec's
        raise ModelError(f"{where} is damaged: {error}.") from None
    if [entry.rank for entry in entries] != list(range(len(entries))) or len(set(tokens)) < len(
        tokens
    ):
        raise ModelError(f"{where} is damaged: the ranks of its tokens are not 0, 1, 2 ....")
    if tokens[:256] != [bytes([i]) for i in range(256)]:
        raise ModelError(f"{where} is damaged: its first 256 tokens are not the single bytes.")
    if any(not 0 < len(token) <= _LONGEST for token in tokens):
        raise ModelError(
            f"{where} is not supported: a token has no bytes, or more than {_LONGEST}."
        )
    special = [f"<SPECIAL_{i}>" for i in range(count)]
    listed = file.special_tokens or [_Special(i, name) for i, name in enumerate(_OLD_SPECIAL)]
    if len({token.rank for token in listed}) < len(listed):
        raise ModelError(f"{where} is damaged: two special tokens have one rank.")
    for token in listed:
        if not 0 <= token.rank < count:
            raise ModelError(f"{where} is damaged: {token.token_str!r} is no special token.")
        special[token.rank] = token.token_str
    ids = {name: i for i, name in enumerate(special)}
    if len(ids) < count or not {"<s>", "</s>"} <= ids.keys():
        raise ModelError(f"{where} is damaged: its special tokens are not different ones with <s>.")
    written = ["".join(CHAR_OF_BYTE[byte] for byte in token) for token in tokens]
    if same := ids.keys() & set(written):
        raise ModelError(f"{where} is damaged: {min(same)!r} is a special token and a text's.")
    added: dict[str, Any] = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": name, "special": True} | added for i, name in enumerate(special)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": file.config.pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
                | {"trim_offsets": True},
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [_one("SpecialToken", "<s>", 0), _one("Sequence", "A", 0)],
            "pair": [
                _one("SpecialToken", "<s>", 0),
                _one("Sequence", "A", 0),
                _one("Sequence", "B", 1),
            ],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [ids["<s>"]], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteLevel"}
        | {"add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": ids | {token: count + i for i, token in enumerate(written)},
            "merges": _merges(written),
            "ignore_merges": True,
        },
    }
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    config |= {
        key: name for key, name in (("unk_token", "<unk>"), ("pad_token", "<pad>")) if name in ids
    }
    template = chat_template(file.config.version, ids.keys(), file.model_settings_builder)
    if template is not None:
        config["chat_template"] = template
    return json.dumps(tokenizer, ensure_ascii=False), config


def _one(kind: str, name: str, type_id: int) -> dict[str, Any]:
    return {kind: {"id": name, "type_id": type_id}}


def _merges(tokens: list[str]) -> list[tuple[str, str]]:
    """Return the merges in the order of their ranks."""
    ranks = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for token in tokens:
        divided = [
            (ranks[token[:i]], ranks[token[i:]], i)
            for i in range(1, len(token))
            if token[:i] in ranks and token[i:] in ranks
        ]
        merges += [(token[:i], token[i:]) for _, _, i in sorted(divided)]
    return merges
