"""Tokenizer of a GGUF file, as the texts that a Hugging Face folder has in its place.

The file contains the tokens with their types, and scores or merges. The steps before and after the
model (normalizer, pre-tokenizer, special tokens) are those of llama.cpp, by the names of the file.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, Literal

import msgspec

from octavo.checkpoints.gguf.charsmap import check_charsmap
from octavo.checkpoints.gguf.pre_tokenizers import (
    LINES,
    LINES_NAMES,
    NFC_NAMES,
    PRE_TOKENIZERS,
)
from octavo.errors import ModelError
from octavo.system.byte_chars import CHAR_OF_BYTE

_KEY = "tokenizer.ggml."
_CHAT_TEMPLATE = "tokenizer.chat_template"
_SPACE = "\u2581"
NO_TOKEN = 2**32 - 1
"""Id -1 of a file that has no such token, as GGUF's ids are unsigned."""
_MOST_TOKEN_CHARS = 1024
_MOST_TEMPLATE_CHARS = 2**20
_MOST_MERGES_PER_TOKEN = 64
_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
"""Named tokens of tokenizer_config.json, and their keys (GGUF spells "seperator")."""
_CONTROL_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> "
    "<eos> <turn|> <|tool_response> <\uff5cend\u2581of\u2581sentence\uff5c> [e~["
)
"""Tokens that end an answer: control tokens also in files that call them normal.

llama.cpp has "</s>", too, which is a plain token of Qwen's own vocabulary.
"""
_INFILL_TEXTS = (
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> \u2581<PRE> "
    "<|code_prefix|> <|prefix|> <|fim_suffix|> <fim-suffix> <fim_suffix> "
    "<\uff5cfim\u2581hole\uff5c> <SUF> \u2581<SUF> <|code_suffix|> <|suffix|> <|fim_middle|> "
    "<fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> \u2581<MID> <|code_middle|> "
    "<|middle|> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> "
    "<fim-repo> <REPO> <reponame> <|file_sep|>"
)
"""Tokens that fill gaps in code, which are control tokens, too."""


_ROBERTAS = ("bert", "bert-moe", "bert-v2", "bert-v3")
"""Ends of the architectures whose tokenizers, if they are not BERT's, are RoBERTa's."""


class TokenType(IntEnum):
    """Type of a token, `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_ADDED = {TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED}
"""Types of the tokens that are found in a text before anything else."""


def tokenizer_texts(metadata: Mapping[str, object]) -> dict[str, str]:
    """Return tokenizer.json and tokenizer_config.json of a GGUF file.

    Args:
        metadata: values of the file's header by key.

    Raises:
        ModelError: the file has no tokenizer, or one of an unsupported kind, or a value is wrong.
    """
    vocabulary = _Vocabulary(metadata)
    steps = _MODELS[vocabulary.model](vocabulary)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": steps.normalizer,
        "pre_tokenizer": steps.pre_tokenizer,
        "post_processor": _post_processor(vocabulary.tokens, steps),
        "decoder": steps.decoder,
        "model": steps.model,
    }
    config: dict[str, Any] = {
        name: vocabulary.tokens[i]
        for name, key in _SPECIAL_KEYS.items()
        if (i := vocabulary.special_id(key)) is not None
    }
    if templates := _chat_templates(metadata):
        named = [{"name": n, "template": t} for n, t in templates.items()]
        config["chat_template"] = templates["default"] if [*templates] == ["default"] else named
    return {
        "tokenizer.json": msgspec.json.encode(tokenizer).decode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False),
    }


@dataclass
class _Steps:
    """Parts of tokenizer.json that depend on the kind of the model."""

    model: dict[str, Any]
    decoder: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    begin: int | None = None
    """Id of the token before each text."""
    end: int | None = None
    """Id of the token after each text."""
    before_second: Literal["begin", "end", "none"] = "begin"
    """Special token before the second text of a pair, after the `end` of the first text."""
    second_type: int = 0
    """Type of the tokens of the second text."""


class _Vocabulary:
    """Tokens of a GGUF file, and its other values with their types checked."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self.metadata = metadata
        self.model = self._model()
        self.tokens = self._tokens()
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            second = next(i for i, token in enumerate(self.tokens) if self.ids[token] != i)
            raise _wrong(
                "tokens",
                f"contains {self.tokens[second]!r} twice (ids {second} and "
                f"{self.ids[self.tokens[second]]})",
            )

    def _model(self) -> str:
        model = self.text("model")
        if model is None:
            raise ModelError(
                f"The file has no tokenizer ({_KEY}model is missing); name a folder that has one "
                "with --tokenizer, or give --skip-tokenizer-init."
            )
        if model not in _MODELS:
            raise ModelError(
                f"{_KEY}model is {model[:80]!r}; supported: {', '.join(_MODELS)}. Name a folder "
                "with tokenizer.json with --tokenizer."
            )
        return model

    def _tokens(self) -> list[str]:
        tokens = self.array("tokens", {str})
        if not tokens:
            raise _wrong("tokens", "is missing or empty")
        lengths = [*map(len, tokens)]
        if max(lengths) > _MOST_TOKEN_CHARS:
            i = next(i for i, length in enumerate(lengths) if length > _MOST_TOKEN_CHARS)
            raise _wrong(
                "tokens",
                f"has {lengths[i]} characters at id {i}; at most {_MOST_TOKEN_CHARS} are supported",
            )
        if not all(lengths):
            return [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        return tokens

    def array(self, name: str, types: set[type]) -> list[Any] | None:
        """Return an array; None: the file has none."""
        value = self.metadata.get(_KEY + name)
        if value is None:
            return None
        if not isinstance(value, (str, bytes)):
            if hasattr(value, "tolist"):
                value = value.tolist()
            if isinstance(value, Sequence) and set(map(type, value)) <= types:
                return list(value)
        kinds = " or ".join(sorted(t.__name__ for t in types))
        raise _wrong(name, f"is not an array of {kinds}")

    def _numbers(self, name: str, types: set[type]) -> list[Any] | None:
        """Return an array with a number for each token."""
        numbers = self.array(name, types)
        if numbers is not None and len(numbers) != len(self.tokens):
            raise _wrong(name, f"has {len(numbers)} values for {len(self.tokens)} tokens")
        return numbers

    def text(self, name: str) -> str | None:
        """Return a text; None: the file has none."""
        value = self.metadata.get(_KEY + name)
        if value is not None and not isinstance(value, str):
            raise _wrong(name, f"is {_short(value)}, not a text")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a truth value."""
        value = self.metadata.get(_KEY + name, default)
        if not isinstance(value, bool):
            raise _wrong(name, f"is {_short(value)}, not true or false")
        return value

    def special_id(self, key: str, default: int | None = None) -> int | None:
        """Return the id of a named token; None: the file has none.

        Args:
            key: its key, without "tokenizer.ggml.".
            default: llama.cpp's id for files without the key.
        """
        value = self.metadata.get(_KEY + key)
        if value is None:
            return default if default is not None and default < len(self.tokens) else None
        if value in (-1, NO_TOKEN):
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise _wrong(key, f"is {_short(value)}, not the id of a token")
        if not 0 <= value < len(self.tokens):
            raise _wrong(key, f"is {value}, but there are only {len(self.tokens)} tokens")
        return value

    def added_id(self, flag: str, key: str, add: bool, default: int | None = None) -> int | None:
        """Return the id of the token that every text begins or ends with, or None.

        Args:
            flag: key of the truth value that adds it.
            key: key of its id.
            add: llama.cpp's truth value for files without one.
            default: llama.cpp's id for files without one.
        """
        if not self.flag(flag, add):
            return None
        found = self.special_id(key, default)
        if found is None:
            raise _wrong(key, f"is missing, but every text has this token ({flag})")
        return found

    def before_second(self) -> Literal["begin", "end", "none"]:
        """Return the token before the second text of a pair; see `_Steps.before_second`.

        The file does not state it: RoBERTa repeats the end of the first text, ModernBERT has
        nothing, and decoders have the beginning of a text.
        """
        architecture = str(self.metadata.get("general.architecture", ""))
        if architecture == "modern-bert":
            return "none"
        return "end" if architecture.endswith(_ROBERTAS) else "begin"

    @cached_property
    def types(self) -> list[int]:
        """Type of each token."""
        types = self._numbers("token_type", {int})
        if types is None:
            return [TokenType.NORMAL] * len(self.tokens)
        if not set(types) <= set(TokenType):
            i = next(i for i, kind in enumerate(types) if kind not in set(TokenType))
            raise _wrong("token_type", f"is {types[i]} at id {i}, which is no type of a token")
        return types

    @cached_property
    def scores(self) -> list[float]:
        """Score of each token."""
        scores = self._numbers("scores", {int, float})
        if scores is None:
            raise _wrong("scores", f"is missing, which model={self.model!r} needs")
        if not all(map(math.isfinite, scores)):
            i = next(i for i, score in enumerate(scores) if not math.isfinite(score))
            raise _wrong("scores", f"is {scores[i]} at id {i}")
        return scores

    def merges(self) -> list[str]:
        """Return the merges of BPE, most important first: two tokens with a space between."""
        merges = self.array("merges", {str})
        if merges is None:
            raise _wrong("merges", f"is missing, which model={self.model!r} needs")
        merges = list(dict.fromkeys(merges))
        pairs = [merge.partition(" ") for merge in merges]
        needed = {left for left, _, _ in pairs}
        needed.update(right for _, _, right in pairs)
        needed.update(left + right for left, _, right in pairs)
        if missing := needed - self.ids.keys():
            merge, token = next(
                (merge, token)
                for merge, (left, _, right) in zip(merges, pairs, strict=True)
                for token in (left, right, left + right)
                if token in missing
            )
            raise _wrong("merges", f"contains {merge[:80]!r}, but {token[:80]!r} is not a token")
        return merges

    def merges_of_scores(self) -> list[str]:
        """Return all pairs of tokens that make a token, in the order of its score."""
        tokens, ids, scores = self.tokens, self.ids, self.scores
        merges = []
        most = _MOST_MERGES_PER_TOKEN * len(tokens)
        for i in sorted(range(len(tokens)), key=lambda i: -scores[i]):
            token = tokens[i]
            if " " in token:  # no text has spaces at this point
                continue
            for cut in range(1, len(token)):
                left = token[:cut]
                if left in ids and (right := token[cut:]) in ids:
                    merges.append(f"{left} {right}")
            if len(merges) > most:
                raise _wrong(
                    "tokens", f"can be merged in more than {most} ways; the file is not a tokenizer"
                )
        return merges

    def added_tokens(self) -> list[dict[str, Any]]:
        """Return the tokens that are found in a text before anything else.

        These are the control and user-defined tokens: the markers of chat templates.
        """
        control = {*_CONTROL_TEXTS.split(), *_INFILL_TEXTS.split()}
        strips = self._strips()
        added = []
        found = {i for i, kind in enumerate(self.types) if kind in _ADDED}
        found |= {self.ids[token] for token in control if token in self.ids}
        for i in sorted(found):
            token = self.tokens[i]
            left, right = strips(token)
            added.append(
                {
                    "id": i,
                    "content": token,
                    "single_word": False,
                    "lstrip": left,
                    "rstrip": right,
                    "normalized": False,
                    "special": self.types[i] != TokenType.USER_DEFINED,
                }
            )
        return added

    def _strips(self) -> Callable[[str], tuple[bool, bool]]:
        """Return a function that returns True if a token removes the spaces before and after it.

        The file does not state it, so it depends on the model, as in llama.cpp.
        """
        get = self.metadata.get
        name = str(get("general.name", "")).lower()
        pre, architecture = str(get(_KEY + "pre", "")), str(get("general.architecture", ""))
        if pre in ("jina-v2-de", "jina-v2-es", "jina-v2-code") or architecture in (
            "nomic-bert-moe",
            "jina-bert-v3",
        ):
            return lambda token: (token == "<mask>", False)
        if "phi-3" in name or "phi3" in name:
            return lambda token: (False, token not in ("<unk>", "<s>", "<|endoftext|>"))
        if "modern-bert" in name:
            return lambda token: (token == "[MASK]", False)
        return lambda token: (False, False)


def _sentencepiece(vocabulary: _Vocabulary) -> _Steps:
    """Return the steps of SentencePiece's BPE: the pair with the highest score merges first."""
    prefix = vocabulary.flag("add_space_prefix", True)
    return _Steps(
        model=_bpe(
            vocabulary,
            vocabulary.merges_of_scores(),
            unk_token=vocabulary.special_id("unknown_token_id", 0),
        ),
        normalizer=_spaces_to_marks(prefix),
        decoder=_marks_to_spaces(prefix),
        begin=vocabulary.added_id("add_bos_token", "bos_token_id", True, 1),
        end=vocabulary.added_id("add_eos_token", "eos_token_id", False, 2),
    )


def _byte_level(vocabulary: _Vocabulary) -> _Steps:
    """Return the steps of GPT-2's BPE of bytes, which depend on the file's pre-tokenizer."""
    pre = vocabulary.text("pre")
    if pre in LINES_NAMES:
        return _lines(vocabulary)
    if pre is None or pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS.keys() | LINES_NAMES))
        state = (
            "is missing (the file is older than May 2024)" if pre is None else f"is {pre[:80]!r}"
        )
        raise ModelError(
            f"{_KEY}pre {state}, so the way to split a text is unknown; known: {known}. Convert "
            "the model again, or name a folder with its tokenizer.json with --tokenizer."
        )
    rules = PRE_TOKENIZERS[pre]
    splits = [_split(pattern) for pattern in rules.patterns]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return _Steps(
        model=_bpe(vocabulary, vocabulary.merges(), ignore_merges=rules.ignore_merges),
        normalizer={"type": "NFC"} if pre in NFC_NAMES else None,
        pre_tokenizer=_sequence("pretokenizers", [*splits, level | {"use_regex": False}]),
        decoder=level | {"use_regex": True},
        begin=vocabulary.added_id("add_bos_token", "bos_token_id", rules.add_bos),
        end=vocabulary.added_id("add_eos_token", "eos_token_id", False),
        before_second=vocabulary.before_second(),
    )


def _lines(vocabulary: _Vocabulary) -> _Steps:
    """Return the steps of Gemma 4's BPE of characters."""
    always = vocabulary.text("pre") != "sarvam-moe"
    return _Steps(
        model=_bpe(
            vocabulary, vocabulary.merges(), unk_token=vocabulary.special_id("unknown_token_id")
        ),
        normalizer=_spaces_to_marks(False),
        pre_tokenizer=_sequence("pretokenizers", [_split(p) for p in LINES.patterns]),
        decoder=_marks_to_spaces(False),
        begin=vocabulary.special_id("bos_token_id")
        if always
        else vocabulary.added_id("add_bos_token", "bos_token_id", False),
        end=vocabulary.added_id("add_eos_token", "eos_token_id", False),
    )


def _bpe(
    vocabulary: _Vocabulary,
    merges: list[str],
    unk_token: int | None = None,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if unk_token is None else vocabulary.tokens[unk_token],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": unk_token is not None,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary.ids,
        "merges": merges,
    }


def _word_piece(vocabulary: _Vocabulary) -> _Steps:
    """Return the steps of BERT: the longest token that a word begins with, then the next one."""
    vocabulary.tokens = [_of_word_piece(token) for token in vocabulary.tokens]
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    if len(vocab) < len(vocabulary.tokens):
        raise _wrong("tokens", "contains a token twice, once as BERT spells it")
    lowercase = vocabulary.flag("normalizer.lowercase", True)
    cls_id = vocabulary.special_id("cls_token_id", 101)
    unk_id = vocabulary.special_id("unknown_token_id", 100)
    if unk_id is None:
        raise _wrong("unknown_token_id", "is missing, which model='bert' needs")
    return _Steps(
        model={
            "type": "WordPiece",
            "unk_token": vocabulary.tokens[unk_id],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
        normalizer={
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": vocabulary.flag("normalizer.strip_accents", lowercase),
            "lowercase": lowercase,
        },
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
        begin=vocabulary.special_id("bos_token_id", cls_id),
        end=vocabulary.special_id("seperator_token_id", 102),
        before_second="none",
        second_type=1,
    )


def _of_word_piece(token: str) -> str:
    """Return BERT's spelling of a token: llama.cpp marks the beginnings of words instead."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[1:] if token.startswith(_SPACE) else f"##{token}"


def _unigram(vocabulary: _Vocabulary) -> _Steps:
    """Return the steps of SentencePiece's unigram model: the most probable tokens of a text."""
    prefix = vocabulary.flag("add_space_prefix", False)
    remove = vocabulary.flag("remove_extra_whitespaces", False)
    steps: list[dict[str, Any]] = []
    if charsmap := _charsmap(vocabulary):
        text = base64.b64encode(charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": text})
    if remove:
        steps.append(_replace({"Regex": " {2,}"}, " "))
        steps.append(_replace({"Regex": r"\A | \z"}, ""))
    normalizer = _spaces_to_marks(prefix or remove)
    steps += normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    scores = vocabulary.scores
    pairs = [
        [token, 0.0 if kind == TokenType.USER_DEFINED else score]
        for token, kind, score in zip(vocabulary.tokens, vocabulary.types, scores, strict=True)
    ]
    return _Steps(
        model={
            "type": "Unigram",
            "unk_id": vocabulary.special_id("unknown_token_id", 2),
            "vocab": pairs,
            "byte_fallback": False,
        },
        normalizer=_sequence("normalizers", steps),
        decoder=_marks_to_spaces(prefix or remove),
        begin=vocabulary.added_id("add_bos_token", "bos_token_id", False),
        end=vocabulary.added_id("add_eos_token", "eos_token_id", True, 1),
        before_second=vocabulary.before_second(),
    )


def _world(vocabulary: _Vocabulary) -> _Steps:
    """Return the steps of RWKV: the longest token that a text begins with, then the next one.

    The file writes bytes that are not printable as Python does: \\n, \\xff.
    """
    added = {i for i, kind in enumerate(vocabulary.types) if kind in _ADDED}
    vocabulary.tokens = [
        token if i in added else "".join(CHAR_OF_BYTE[byte] for byte in _unescape(token))
        for i, token in enumerate(vocabulary.tokens)
    ]
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    if len(vocab) < len(vocabulary.tokens):
        raise _wrong("tokens", "contains the same bytes twice")
    if not vocab.keys() >= set(CHAR_OF_BYTE):
        raise _wrong("tokens", "lacks some of the 256 single bytes")
    return _Steps(
        model={
            "type": "WordPiece",
            "unk_token": vocabulary.tokens[0],
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": _MOST_TOKEN_CHARS,
            "vocab": vocab,
        },
        decoder={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        | {"use_regex": False},
        begin=vocabulary.added_id("add_bos_token", "bos_token_id", False),
        end=vocabulary.added_id("add_eos_token", "eos_token_id", False),
    )


_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_CONTROL = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


def _unescape(token: str) -> bytes:
    """Return the bytes of a token of RWKV, as llama.cpp does."""
    return _ESCAPE.sub(
        lambda m: bytes.fromhex(m[1].decode()) if m[1] else _CONTROL.get(m[2], m[2]), token.encode()
    )


_MODELS = {
    "llama": _sentencepiece,
    "gpt2": _byte_level,
    "gemma4": _lines,
    "bert": _word_piece,
    "t5": _unigram,
    "rwkv": _world,
}
"""Steps by `tokenizer.ggml.model`."""


def _charsmap(vocabulary: _Vocabulary) -> bytes:
    """Return the table of replaced characters; empty: the file has none."""
    values = vocabulary.array("precompiled_charsmap", {int})
    if not values:
        return b""
    try:
        data = bytes(value & 0xFF for value in values)
        check_charsmap(data)
    except ValueError as error:
        raise _wrong("precompiled_charsmap", f"is damaged: {error}") from None
    return data


def _sequence(name: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", name: steps}


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _spaces_to_marks(prefix: bool) -> dict[str, Any]:
    """Return the normalizer that writes spaces as "▁", with one more at the beginning or not."""
    replace = _replace({"String": " "}, _SPACE)
    if not prefix:
        return replace
    return _sequence("normalizers", [{"type": "Prepend", "prepend": _SPACE}, replace])


def _marks_to_spaces(prefix: bool) -> dict[str, Any]:
    """Return the decoder that undoes `_spaces_to_marks`, and joins bytes to characters."""
    steps = [_replace({"String": _SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _sequence("decoders", steps)


def _post_processor(tokens: Sequence[str], steps: _Steps) -> dict[str, Any] | None:
    """Return the step that adds a token before and after each text."""
    begin, end = steps.begin, steps.end
    if begin is None and end is None:
        return None

    def around(sequence: str, before: int | None, kind: int) -> Iterable[dict[str, Any]]:
        if before is not None:
            yield {"SpecialToken": {"id": tokens[before], "type_id": kind}}
        yield {"Sequence": {"id": sequence, "type_id": kind}}
        if end is not None:
            yield {"SpecialToken": {"id": tokens[end], "type_id": kind}}

    first = [*around("A", begin, 0)]
    before_second = {"begin": begin, "end": end, "none": None}[steps.before_second]
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": [*first, *around("B", before_second, steps.second_type)],
        "special_tokens": {
            tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]}
            for i in (begin, end)
            if i is not None
        },
    }


def _chat_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    """Return the chat templates by name; the main one is "default"."""
    templates = {}
    for key, value in metadata.items():
        if key != _CHAT_TEMPLATE and not key.startswith(f"{_CHAT_TEMPLATE}."):
            continue
        if not isinstance(value, str):
            raise ModelError(f"{key} is {_short(value)}, not a text; {_FIX}.")
        if len(value) > _MOST_TEMPLATE_CHARS:
            raise ModelError(
                f"{key} has {len(value)} characters; at most {_MOST_TEMPLATE_CHARS} are supported. "
                "Name another template with --chat-template."
            )
        name = key.removeprefix(_CHAT_TEMPLATE).removeprefix(".") or "default"
        templates[name] = _pair_template(value) if name == "rerank" else value
    return templates


def _pair_template(text: str) -> str:
    """Return llama.cpp's template of a reranker, a text with {query} and {document}, as Jinja."""
    if "{{" in text or "{%" in text:
        return text
    for role in ("query", "document"):
        content = f'{{{{ (messages | selectattr("role", "eq", "{role}") | first).content }}}}'
        text = text.replace(f"{{{role}}}", content)
    return text


_FIX = "download the file again, or convert the model again"


def _wrong(name: str, problem: str) -> ModelError:
    return ModelError(f"{_KEY}{name} {problem}; {_FIX}.")


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
    return text[:80]
