"""Tokenizer of a model folder as metadata of a GGUF file.

GGUF has no steps before and after BPE: llama.cpp knows them by names. The name is found by its
effect, and `octavo.model_tools.gguf_writer` compares the tokens of the written file with the
original's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

from octavo.checkpoints.gguf.pre_tokenizers import PRE_TOKENIZERS
from octavo.checkpoints.gguf.tokenizer import TokenType, tokenizer_texts
from octavo.errors import ModelError
from octavo.text.tokenizer import Tokenizer

PROBES = (
    "Once upon a time, in 1984, there were 3 dogs; they'd eaten 12345678 bones!",
    "  two spaces\n\n\tTabs\r\nand   lines \n \n\n\nHello   world  ",
    "I'm, you're, HE'S, we'LL; don't. CamelCaseWords snake_case_words x=y+1; // code {}[]()",
    "def f(a, b):\n    return a ** b  # 3.14e-10, 0x1F, 1,000,000.00\n\n\n    pass\n",
    "Über straße naïve café Ωμέγα Привет мир שלום مرحبا नमस्ते สวัสดี",
    "你好,世界。こんにちは、カタカナ 한국어 12\uff13\uff14 ①②½",
    "emoji 😀👍🏽👨\u200d👩\u200d👧 e\u0301 \u200b\u00a0\ufeff \u2028 end...!!!???",
    "https://example.com/a?b=c&d=e_f#g user@example.org $5.00 50% #tag @name",
    "",
    " ",
    "a",
)
"""Texts whose tokens are compared."""
_ORDER = ("gpt-2", "llama-bpe", "qwen2", "smollm", "default")
"""Names to try first: those that the most programs know."""
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def tokenizer_metadata(
    text: str,
    tokenizer: Tokenizer,
    vocab_size: int,
    end_tokens: tuple[int, ...],
    bos_token: int | None,
) -> dict[str, Any]:
    """Return the metadata of a tokenizer.

    Args:
        text: contents of tokenizer.json.
        tokenizer: the same tokenizer.
        vocab_size: number of the model's tokens.
        end_tokens: ids of the tokens that end an answer.
        bos_token: id of the model's first token, for a tokenizer that names none.

    Raises:
        ModelError: GGUF has no name for the tokenizer's kind, or it does not fit the model.
    """
    data: dict[str, Any] = json.loads(text)
    model = data["model"]
    if model.get("type", "BPE") != "BPE":
        raise ModelError(
            f"tokenizer.json is of the kind {model.get('type')}, which convert does not write to "
            "GGUF; supported: BPE."
        )
    tokens, types = _tokens(data, vocab_size)
    metadata: dict[str, Any] = {"tokens": tokens, "token_type": types}
    merges = [" ".join(m) if isinstance(m, list) else str(m) for m in model["merges"]]
    if _is_byte_level(data):
        metadata |= {"model": "gpt2", "pre": _find_pre(text, model), "merges": merges}
    else:
        metadata |= {"model": "llama", "pre": "default", "scores": _scores(tokens, types, merges)}
        metadata["add_space_prefix"] = tokenizer.strips_leading_space
    for name, key in _SPECIAL.items():
        named_token = tokenizer.special_tokens.get(name)
        number = None if named_token is None else tokenizer.token_to_id(named_token)
        if number is not None:
            metadata[key] = number
    if bos_token is not None and bos_token < vocab_size:
        metadata.setdefault("bos_token_id", bos_token)
    ends = [token for token in end_tokens if token < vocab_size]
    for key, token in zip(("eos_token_id", "eot_token_id", "eom_token_id"), ends, strict=False):
        metadata[key] = token
    ids = tokenizer.encode("a")
    metadata["add_bos_token"] = bool(ids) and ids[0] == metadata.get("bos_token_id", -1)
    metadata["add_eos_token"] = bool(ids) and ids[-1] == metadata.get("eos_token_id", -1)
    named = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    for name, template in tokenizer.chat_templates.items():
        suffix = "" if name == "default" else f".{name}"
        named[f"tokenizer.chat_template{suffix}"] = template
    return named


def _tokens(data: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the texts and types of all tokens by their ids."""
    vocab: dict[str, int] = data["model"]["vocab"]
    unknown = data["model"].get("unk_token")
    by_id = {number: token for token, number in vocab.items()}
    added = {entry["id"]: entry for entry in data.get("added_tokens") or ()}
    by_id |= {number: entry["content"] for number, entry in added.items()}
    if by_id and max(by_id) >= vocab_size:
        raise ModelError(
            f"tokenizer.json has the token {max(by_id)}, and the model has {vocab_size} tokens; "
            "they do not belong together."
        )
    tokens, types = [], []
    is_byte_level = _is_byte_level(data)
    for number in range(vocab_size):
        token = by_id.get(number)
        if token is None:
            tokens.append(f"[PAD{number}]")
            types.append(TokenType.UNUSED)
            continue
        tokens.append(token)
        if token == unknown and not is_byte_level:
            types.append(TokenType.UNKNOWN)
        elif number in added:
            special = added[number].get("special", False)
            types.append(TokenType.CONTROL if special else TokenType.USER_DEFINED)
        elif not is_byte_level and _is_byte(token):
            types.append(TokenType.BYTE)
        else:
            types.append(TokenType.NORMAL)
    return tokens, [int(kind) for kind in types]


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _is_byte_level(data: Mapping[str, Any]) -> bool:
    """Return True if the tokens are texts of bytes, as in GPT-2."""
    return '"ByteLevel"' in json.dumps([data.get("pre_tokenizer"), data.get("decoder")])


def _scores(tokens: list[str], types: list[int], merges: list[str]) -> list[float]:
    """Return scores for which SentencePiece's BPE merges in the order of the merges.

    Tokens that no merge makes have a score below all others, special ones and bytes 0.
    """
    rank: dict[str, int] = {}
    for i, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), i)
    return [
        -float(rank.get(token, len(merges))) if kind == TokenType.NORMAL else 0.0
        for token, kind in zip(tokens, types, strict=True)
    ]


def _find_pre(text: str, model: Mapping[str, Any]) -> str:
    """Return the name of the pre-tokenizer that splits texts in the same way.

    Raises:
        ModelError: no known name does.
    """
    original = tokenizers.Tokenizer.from_str(text)
    merges_all = not model.get("ignore_merges", False)
    expected = _split(original)
    names = [*_ORDER, *(name for name in PRE_TOKENIZERS if name not in _ORDER)]
    for name in names:
        if PRE_TOKENIZERS[name].ignore_merges == merges_all:
            continue
        small = {"model": "gpt2", "pre": name, "tokens": ["a"], "merges": []}
        metadata: dict[str, Any] = {f"tokenizer.ggml.{key}": v for key, v in small.items()}
        metadata["tokenizer.ggml.add_bos_token"] = False
        built = tokenizers.Tokenizer.from_str(tokenizer_texts(metadata)["tokenizer.json"])
        if _split(built) == expected:
            return name
    raise ModelError(
        "tokenizer.json splits texts in a way for which GGUF has no name that Octavo knows."
    )


def _split(backend: tokenizers.Tokenizer) -> list[Any]:
    """Return the parts of all probes, normalized."""
    parts = []
    for probe in PROBES:
        text = probe if backend.normalizer is None else backend.normalizer.normalize_str(probe)
        splitter = backend.pre_tokenizer
        parts.append([text] if splitter is None else splitter.pre_tokenize_str(text))
    return parts
