"""Prompts with media: a placeholder becomes as many tokens as the encoder has rows for its item."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.errors import RequestError
from octavo.messages import PlaceholderRange
from octavo.multimodal.processors.base import Place


class TextTokenizer(Protocol):
    """Methods of a tokenizer that this module needs."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text, in which special tokens may be written."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""


@dataclass(frozen=True)
class Placeholders:
    """Items of one modality in a prompt."""

    name: str
    """Name of an item, for errors."""
    embed_id: int
    """Token that the encoder's rows replace."""
    items: Sequence[Sequence[Place]]
    """Places of the parts of each item, in the order of the prompt."""
    around: tuple[int, int] | None = None
    """Tokens before and after a placeholder that an item's own text replaces."""


def expand_prompt(
    token_ids: Sequence[int], placeholders: Mapping[int, Placeholders], tokenizer: TextTokenizer
) -> tuple[list[int], list[tuple[int, PlaceholderRange]]]:
    """Replace each placeholder of a prompt by the tokens of its item.

    The result has the tokens of the text in which the placeholders are replaced. So line ends at
    the edges of an item's text are tokenised together with the prompt's line ends beside them.

    Args:
        token_ids: the prompt, with one placeholder for each item.
        placeholders: the items, by the token of their placeholders.
        tokenizer: the model's tokenizer.

    Returns:
        The tokens, and for each part of an item, in the order of the prompt, the token of its
        placeholder and the range from its first to its last row.

    Raises:
        RequestError: the numbers of placeholders and of items differ.
    """
    counts = Counter(token for token in token_ids if token in placeholders)
    for token, given in placeholders.items():
        if counts[token] != len(given.items):
            raise RequestError(
                f"The prompt has {counts[token]} placeholders for {given.name}s "
                f"({tokenizer.decode([token], skip_special_tokens=False)}), and the request has "
                f"{len(given.items)} {given.name}s; give as many of one as of the other. A text "
                "counts, too, if the tokenizer reads it as a placeholder.",
                "prompt",
            )
    writer = _Writer(tokenizer)
    following = {token: iter(given.items) for token, given in placeholders.items()}
    owners: list[int] = []
    skipped = -1
    for token in token_ids:
        is_skipped, skipped = token == skipped, -1
        if token not in placeholders:
            if not is_skipped:
                writer.add_token(token)
            continue
        if (around := placeholders[token].around) is not None:
            writer.drop(around[0])
            skipped = around[1]
        for place in next(following[token]):
            writer.add_place(place, placeholders[token].embed_id)
            owners.append(token)
    writer.write_text()
    return writer.token_ids, list(zip(owners, writer.ranges, strict=True))


def arrange_prefix(
    token_ids: Sequence[int],
    num_pictures: int,
    placeholder_id: int,
    bos_id: int | None,
    end_ids: Sequence[int],
) -> list[int]:
    """Return a prompt in PaliGemma's form: pictures, the beginning of text, a text, its end.

    The tokens that the prompt has already are not repeated. Without placeholders all pictures
    precede the text.

    Args:
        token_ids: the prompt.
        num_pictures: number of its pictures.
        placeholder_id: token of a placeholder.
        bos_id: token of the beginning of a text; None if the tokenizer has no such token.
        end_ids: tokens of the end.
    """
    ids = list(token_ids)
    if bos_id is not None and ids[:1] == [bos_id]:
        del ids[0]  # the tokenizer's
    if placeholder_id not in ids:
        ids = [placeholder_id] * num_pictures + ids
    begin = len(ids) - ids[::-1].index(placeholder_id)
    if bos_id is not None and ids[begin : begin + 1] != [bos_id]:
        ids.insert(begin, bos_id)
    end = list(end_ids)
    return ids if ids[-len(end) :] == end else ids + end


class _Writer:
    """Tokens of a prompt, as they are written.

    Text of items is held back until a token or a row follows, since it is tokenised as a whole.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = ""
        self.token_ids: list[int] = []
        self._is_embed = bytearray()
        """One byte for each token: 1 for rows of the encoder."""
        self.ranges: list[PlaceholderRange] = []

    def add_token(self, token: int) -> None:
        """Append a token of the prompt."""
        if self._text.endswith("\n") and (line_ends := self._line_ends(token)):
            self._text += line_ends
            return
        self.write_text()
        self._append([token], 0)

    def drop(self, token: int) -> None:
        """Take back a token, if it is the last one."""
        if not self._text and self.token_ids[-1:] == [token]:
            del self.token_ids[-1], self._is_embed[-1]

    def add_place(self, place: Place, embed_id: int) -> None:
        """Append the tokens of an item, or of a part of it."""
        first = place.pieces[0]
        if not self._text and isinstance(first, str) and first.startswith("\n"):
            while self.token_ids and (line_ends := self._line_ends(self.token_ids[-1])):
                self._text = line_ends + self._text
                del self.token_ids[-1], self._is_embed[-1]
        begin = end = -1
        for piece in place.pieces:
            if isinstance(piece, str):
                self._text += piece
                continue
            self.write_text()
            begin = len(self.token_ids) if begin < 0 else begin
            self._append([embed_id] * piece, 1)
            end = len(self.token_ids)
        is_embed = bytes(self._is_embed[begin:end])
        self.ranges.append(
            PlaceholderRange(begin, end - begin, None if all(is_embed) else is_embed)
        )

    def write_text(self) -> None:
        """Tokenise the text that is held back."""
        if self._text:
            self._append(self._tokenizer.encode(self._text, add_special_tokens=False), 0)
            self._text = ""

    def _append(self, token_ids: list[int], is_embed: int) -> None:
        self.token_ids += token_ids
        self._is_embed += bytes([is_embed]) * len(token_ids)

    def _line_ends(self, token: int) -> str:
        """Return the text of a token if it has line ends only, else an empty text."""
        text = self._tokenizer.decode([token])
        return text if not text.strip("\n") else ""
