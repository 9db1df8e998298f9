"""Models of SentencePiece (spiece.model, tokenizer.model, source.spm), as parts of tokenizer.json.

The file is a protobuf message, `ModelProto` of
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto. A text is divided
as `SentencePieceProcessor.encode` divides it; the names and ids of special tokens, which each
family of models arranges in its own way, are in `octavo.text.sentencepiece_families`.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from octavo.checkpoints.gguf.charsmap import check_charsmap
from octavo.errors import ModelError

SPACE = "\u2581"
"""Character that SentencePiece writes in place of a space."""
_MOST_PIECES = 2**20
_MOST_PIECE_CHARS = 1024
_MOST_MERGES_PER_PIECE = 64
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_UNIGRAM, _BPE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class Piece:
    """A token of a model, with its score and type."""

    text: str
    score: float
    kind: int

    @property
    def control(self) -> bool:
        """True for tokens such as "</s>", which no text has."""
        return self.kind in (_UNKNOWN, _CONTROL)


@dataclass(frozen=True)
class SentencePiece:
    """Content of a file.

    Attributes:
        pieces: the tokens by id.
        bpe: True for pairs that merge by score; False for the most probable tokens (unigram).
        byte_fallback: characters without a token become tokens of bytes.
        charsmap: table of replaced characters; may be empty.
        dummy_prefix: a text gets a space at its beginning.
        remove_spaces: spaces at both ends, and repeated ones, are removed.
    """

    pieces: tuple[Piece, ...]
    bpe: bool
    byte_fallback: bool
    charsmap: bytes
    dummy_prefix: bool
    remove_spaces: bool

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> SentencePiece:
        """Read a file.

        Args:
            data: its content.
            where: its name, for errors.

        Raises:
            ModelError: the file is damaged, or of an unsupported kind.
        """
        try:
            return _read(data)
        except (ValueError, struct.error) as error:
            raise ModelError(f"{where} is no usable SentencePiece model: {error}.") from None

    def normalizer(self, always_prefix: bool) -> dict[str, Any]:
        """Return the normalizer of tokenizer.json; see `pre_tokenizer`."""
        steps: list[dict[str, Any]] = []
        if self.charsmap:
            table = base64.b64encode(self.charsmap).decode()
            steps.append({"type": "Precompiled", "precompiled_charsmap": table})
        if self.remove_spaces:
            steps.append(replace_regex(r"\A +| +\z", ""))
            steps.append(replace_regex(" {2,}", " "))
        steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
        if self.remove_spaces:
            steps.append(replace_regex(rf"{SPACE}+\z", ""))  # also those that the text had
        if self.dummy_prefix and always_prefix:
            # Metaspace adds no space to a text that begins with one; SentencePiece does.
            steps.append(replace_regex(rf"\A{SPACE}", SPACE * 2))
        return {"type": "Sequence", "normalizers": steps}

    def pre_tokenizer(self, always_prefix: bool) -> dict[str, Any] | None:
        """Return the pre-tokenizer of tokenizer.json.

        Args:
            always_prefix: the text after a special token gets a space at its beginning, as the
                first one does.
        """
        steps: list[dict[str, Any]] = []
        if self.dummy_prefix:
            scheme = "always" if always_prefix else "first"
            # No token reaches over a space: a shorter text is divided faster.
            split = not any(SPACE in piece.text[1:] for piece in self.pieces)
            steps.append({"type": "Metaspace", "replacement": SPACE})
            steps[-1] |= {"prepend_scheme": scheme, "split": split}
        defined = [piece.text for piece in self.pieces if piece.kind == _USER_DEFINED]
        if defined:
            pattern = "|".join(map(re.escape, sorted(defined, key=len, reverse=True)))
            steps.append(
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
                | {"invert": False}
            )
        return {"type": "Sequence", "pretokenizers": steps} if steps else None

    def decoder(self) -> dict[str, Any]:
        """Return the decoder of tokenizer.json, also for tokens with the types of bytes."""
        steps: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if self.dummy_prefix:
            steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        return {"type": "Sequence", "decoders": steps}

    def model(self, tokens: list[tuple[str, float]], unk_id: int) -> dict[str, Any]:
        """Return the model of tokenizer.json.

        Args:
            tokens: all tokens by id, with their scores.
            unk_id: the token for unknown texts.

        Raises:
            ModelError: two tokens are equal.
        """
        ids = {token: i for i, (token, _) in enumerate(tokens)}
        if len(ids) < len(tokens):
            twice = next(token for i, (token, _) in enumerate(tokens) if ids[token] != i)
            raise ModelError(f"The SentencePiece model contains {twice[:80]!r} twice.")
        if not self.bpe:
            return {
                "type": "Unigram",
                "unk_id": unk_id,
                "vocab": [[token, score] for token, score in tokens],
                "byte_fallback": self.byte_fallback,
            }
        return {
            "type": "BPE",
            "unk_token": tokens[unk_id][0],
            "fuse_unk": True,
            "byte_fallback": self.byte_fallback,
            "ignore_merges": any(piece.kind == _USER_DEFINED for piece in self.pieces),
            "vocab": ids,
            "merges": self._merges(),
        }

    def _merges(self) -> list[tuple[str, str]]:
        """Return all pairs of tokens that make a token, in the order of its score."""
        ranks = {
            piece.text: (-piece.score, i)
            for i, piece in enumerate(self.pieces)
            if piece.kind == _NORMAL
        }
        ranked = []
        most = _MOST_MERGES_PER_PIECE * len(self.pieces)
        for token, rank in ranks.items():
            for cut in range(1, len(token)):
                if token[:cut] in ranks and token[cut:] in ranks:
                    ranked.append((rank, token[:cut], token[cut:]))
            if len(ranked) > most:
                raise ModelError(
                    f"The tokens of the SentencePiece model merge in more than {most} ways; the "
                    "file is not a tokenizer."
                )
        return [(left, right) for _, left, right in sorted(ranked)]


def replace_regex(pattern: str, content: str) -> dict[str, Any]:
    """Return a normalizer that replaces what matches a regular expression."""
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _read(data: bytes) -> SentencePiece:
    pieces: list[Piece] = []
    trainer: dict[int, Any] = {}
    rules: dict[int, Any] = {}
    for field, value in _fields(data):
        if field == 1:
            pieces.append(_piece(dict(_fields(_message(value)))))
            if len(pieces) > _MOST_PIECES:
                raise ValueError(f"it has more than {_MOST_PIECES} tokens")
        elif field == 2:
            trainer |= dict(_fields(_message(value)))
        elif field == 3:
            rules |= dict(_fields(_message(value)))
    if not pieces:
        raise ValueError("it has no tokens")
    kind = trainer.get(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise ValueError(f"its model_type is {kind}; unigram (1) and BPE (2) are supported")
    if trainer.get(24):
        raise ValueError("treat_whitespace_as_suffix is not supported")
    if not rules.get(5, 1):
        raise ValueError("escape_whitespaces=false is not supported")
    charsmap = _message(rules.get(2, b""))
    if charsmap:
        check_charsmap(charsmap)
    return SentencePiece(
        pieces=tuple(pieces),
        bpe=kind == _BPE,
        byte_fallback=bool(trainer.get(35, 0)),
        charsmap=charsmap,
        dummy_prefix=bool(rules.get(3, 1)),
        remove_spaces=bool(rules.get(4, 1)),
    )


def _piece(fields: dict[int, Any]) -> Piece:
    text = _message(fields.get(1, b"")).decode()
    if not 0 < len(text) <= _MOST_PIECE_CHARS:
        raise ValueError(f"a token has {len(text)} characters, not 1 to {_MOST_PIECE_CHARS}")
    score, kind = fields.get(2, 0.0), fields.get(3, _NORMAL)
    if not isinstance(score, float) or not math.isfinite(score) or not isinstance(kind, int):
        raise ValueError(f"the score or the type of the token {text[:80]!r} is wrong")
    return Piece(text, score, kind)


def _message(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field has the wrong type")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protobuf message: numbers, floats and bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == _VARINT:
            value: Any
            value, at = _varint(data, at)
        elif wire == _BYTES:
            length, at = _varint(data, at)
            if length > len(data) - at:
                raise ValueError("it is cut off")
            value, at = data[at : at + length], at + length
        elif wire == _FIXED32:
            (value,) = struct.unpack_from("<f", data, at)
            at += 4
        elif wire == _FIXED64:
            (value,) = struct.unpack_from("<d", data, at)
            at += 8
        else:
            raise ValueError(f"it has a field of the unknown kind {wire}")
        yield tag >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("it is cut off or damaged")
