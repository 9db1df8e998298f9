"""Division of a text into the longest tokens, from its beginning on (RWKV's tokenizers)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from octavo.system.byte_chars import bytes_of


class LongestMatch:
    """Division of a text: the longest token that it begins with, then the rest in the same way.

    Args:
        tokens: tokens in the characters of `BYTE_OF_CHAR` (`octavo/system/byte_chars.py`); each
            single byte is one of them.
        added: texts that are found before anything else.
    """

    def __init__(self, tokens: Iterable[str], added: Iterable[str]) -> None:
        self._tokens: Mapping[bytes, str] = {bytes_of(token): token for token in tokens}
        lengths: dict[bytes, set[int]] = defaultdict(set)
        for data in self._tokens:
            lengths[data[:2]].add(len(data))
        self._lengths = {begin: sorted(own, reverse=True) for begin, own in lengths.items()}
        self._added = frozenset(added)
        texts = sorted(self._added, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None

    def split(self, text: str) -> list[str]:
        """Return the tokens of a text.

        Raises:
            UnicodeEncodeError: the text is not valid Unicode.
        """
        pieces: list[str] = []
        for part in [text] if self._pattern is None else self._pattern.split(text):
            if part in self._added:
                pieces.append(part)
            else:
                self._append(part.encode(), pieces)
        return pieces

    def _append(self, data: bytes, pieces: list[str]) -> None:
        tokens, lengths, at = self._tokens, self._lengths, 0
        while at < len(data):
            for length in lengths.get(data[at : at + 2], ()):
                token = tokens.get(data[at : at + length])
                if token is not None:
                    break
            else:
                length = 1
                token = tokens[data[at : at + 1]]
            pieces.append(token)
            at += length
