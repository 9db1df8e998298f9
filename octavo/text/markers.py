"""Tokens of the texts around reasoning."""

from __future__ import annotations

from octavo.text.tokenizer import Tokenizer


def marker_tokens(
    tokenizer: Tokenizer, markers: tuple[str, str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens of the texts before and after reasoning; none for plain text.

    A marker must begin with an added token: a model may write plain text with other tokens.
    """
    added = set(tokenizer.get_added_vocab().values())
    sequences = []
    for ids in tokenizer.encode_all([text.strip() for text in markers]):
        while ids and ids[0] not in added and not tokenizer.decode(ids[:1]).strip():
            ids = ids[1:]  # a space of the tokenizer
        sequences.append(tuple(ids) if ids and ids[0] in added else ())
    begin, end = sequences
    return begin, end
