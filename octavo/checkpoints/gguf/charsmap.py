"""Table of replaced characters of SentencePiece's unigram models (precompiled_charsmap).

It is a trie in a double array (https://github.com/s-yata/darts-clone), then texts that end with a
zero byte. The `tokenizers` library does not check it, and fails on any text if it is damaged.
"""

from __future__ import annotations

import numpy as np


def check_charsmap(data: bytes) -> None:
    """Check that no text can lead outside of the table.

    Raises:
        ValueError: the table is damaged; the message is the reason.
    """
    nbytes = int.from_bytes(data[:4], "little")
    if len(data) < 8 or nbytes % 4 or not 4 <= nbytes <= len(data) - 4:
        raise ValueError(f"its array of {nbytes} bytes does not fit into {len(data)} bytes")
    units = np.frombuffer(data, "<u4", nbytes // 4, offset=4).astype(np.int64)
    texts = data[4 + nbytes :]
    texts.decode()  # a UnicodeDecodeError is a ValueError
    begins = np.zeros(len(texts) + 1, bool)  # bytes that begin a character
    begins[:-1] = (np.frombuffer(texts, np.uint8) & 0xC0) != 0x80
    offsets = (units >> 10) << ((units & (1 << 9)) >> 6)
    seen = np.zeros(len(units), bool)
    nodes = np.array([offsets[0]])  # positions to which the next byte is added
    while len(nodes):
        children = (nodes[:, None] ^ np.arange(1, 256)).ravel()
        if children.max() >= len(units):
            raise ValueError("its array refers to a position outside of it")
        labels = np.tile(np.arange(1, 256), len(nodes))
        children = children[(units[children] & (0x800000FF)) == labels]
        children = np.unique(children)
        children = children[~seen[children]]
        seen[children] = True
        nodes = children ^ offsets[children]
        if len(nodes) and nodes.max() >= len(units):
            raise ValueError("its array refers to a position outside of it")
        values = units[nodes[(units[children] >> 8) & 1 == 1]] & 0x7FFFFFFF
        if len(values) and (values.max() > len(texts) or not begins[values].all()):
            raise ValueError("it refers to a text that it does not contain")
