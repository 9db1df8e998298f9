"""What grammars must know of a model's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.errors import GrammarError
from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model, one for each column of its logits."""

    token_bytes: list[bytes]
    """What each adds to a text; nothing for those that no text is made of, such as padding, stop
    tokens and other special ones."""
    stop_token_ids: list[int]
    """Those that end an answer."""
    encode: Callable[[str], list[int]]
    """Tokens of a text, without special ones."""

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> Vocabulary:
        """A tokenizer's.

        Args:
            tokenizer: the model's.
            vocab_size: width of the logits.
            eos_token_ids: the model's own stop tokens.

        Raises:
            GrammarError: its tokens stand for no fixed bytes, or there is no stop token.
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
        return cls(
            [b"" if i in silent else tokenizer.token_bytes(i) for i in range(vocab_size)],
            stop_token_ids,
            lambda text: tokenizer.encode(text, add_special_tokens=False),
        )

    @property
    def size(self) -> int:
        """Width of the logits."""
        return len(self.token_bytes)

    def tokenize(self, text: str, before: bytes, most: int) -> list[int]:
        """Tokens of a text that goes on behind another one, as the tokeniser would have it.

        Args:
            text: what to tokenise.
            before: the bytes of the token before it.
            most: no more tokens than these.
        """
        # Only a beginning is wanted, and no token is split by what comes far behind it.
        text = text[: 16 * most]
        data = text.encode()
        # Sentencepiece puts a space before a text, so that this cannot be its beginning.
        for context in (before.decode("utf-8", "ignore"), "\n", ""):
            ids, start = self.encode(context + text), self.encode(context) if context else []
            if ids[: len(start)] != start:
                continue
            rest = ids[len(start) :]
            if b"".join(self.token_bytes[i] for i in rest) == data:
                return rest[:most]
        return []
