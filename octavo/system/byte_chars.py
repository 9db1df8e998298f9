"""Characters that stand for bytes in the vocabularies of byte-level tokenizers."""

from __future__ import annotations


def _byte_of_char() -> dict[str, int]:
    """Return the inverse of GPT-2's map from bytes to printable characters.

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()
CHAR_OF_BYTE = [char for char, _ in sorted(BYTE_OF_CHAR.items(), key=lambda item: item[1])]


def bytes_of(token: str) -> bytes:
    """Return the bytes of a token; one with other characters stands for its own text."""
    codes = [BYTE_OF_CHAR.get(char, -1) for char in token]
    return token.encode() if -1 in codes else bytes(codes)
