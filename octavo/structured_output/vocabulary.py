"""View of a model's tokens for grammars."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from octavo.errors import GrammarError
from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a model, one for each column of its logits."""

    token_bytes: list[bytes]
    """Bytes that each token adds to a text; empty for tokens outside of texts, such as padding,
    stop tokens and other special ones."""
    stop_token_ids: list[int]
    """Tokens that end an answer."""
    encode: Callable[[str], list[int]]
    """Tokenizer of a text, without special tokens."""
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """Special tokens by their text. A grammar may contain them; a stop token ends it there."""

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> Vocabulary:
        """Return the vocabulary of a tokenizer.

        Args:
            tokenizer: the model's tokenizer.
            vocab_size: width of the logits.
            eos_token_ids: stop tokens of the model.

        Raises:
            GrammarError: the tokens stand for no fixed bytes, or the model has no stop token.
        """
        if not tokenizer.has_bytes:
            raise GrammarError(
                "Structured output needs a tokenizer whose tokens stand for fixed bytes (byte-"
                "level BPE, sentencepiece with byte fallback), unlike this model's; leave it out."
            )
        stops = {*eos_token_ids, tokenizer.eos_token_id}
        stop_token_ids = sorted(i for i in stops if i is not None and 0 <= i < vocab_size)
        if not stop_token_ids:
            raise GrammarError(
                "Structured output needs a stop token, and this model has none; leave the grammar "
                "out."
            )
        silent = tokenizer.all_special_ids.union(stop_token_ids)
        special = [i for i in sorted(silent) if i < vocab_size]
        return cls(
            [b"" if i in silent else tokenizer.token_bytes(i) for i in range(vocab_size)],
            stop_token_ids,
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            dict(zip(tokenizer.convert_ids_to_tokens(special), special, strict=True)),
        )

    @property
    def size(self) -> int:
        """Width of the logits."""
        return len(self.token_bytes)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Texts of special tokens that can be divided."""
        texts = sorted((t for t in self.special_tokens if len(t) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) if texts else "(?!)")

    def tokenize(self, text: str, before: bytes, most: int) -> list[int]:
        """Return the tokens of a text that continues another one, as the tokenizer would split it.

        The tokenizer reads the text of a special token as the token, which is no text. Such a
        text is divided first.

        Args:
            text: text to tokenize.
            before: bytes of the token before the text.
            most: maximum number of tokens.
        """
        # Only a beginning is needed, and text far after a token does not change its split.
        text = text[: 16 * most]
        tokens, begin = list[int](), 0
        for end in [*(found.start() + 1 for found in self._special.finditer(text)), len(text)]:
            piece = self._tokenize_piece(text[begin:end], before if begin == 0 else b"")
            if begin < end and not piece:
                return []
            tokens += piece
            begin = end
        return tokens[:most]

    def _tokenize_piece(self, text: str, before: bytes) -> list[int]:
        data = text.encode()
        # Sentencepiece puts a space before a text, so the text cannot be tokenized alone.
        for context in (before.decode("utf-8", "ignore"), "\n", ""):
            ids, start = self.encode(context + text), self.encode(context) if context else []
            if ids[: len(start)] != start:
                continue
            rest = ids[len(start) :]
            if b"".join(self.token_bytes[i] for i in rest) == data:
                return rest
        return []
