"""Ids of tokens by their texts, from tokenizer.json, for heads that depend on some tokens."""

from __future__ import annotations

import json

from octavo.checkpoints.base import Checkpoint
from octavo.errors import ModelError


def read_vocabulary(checkpoint: Checkpoint) -> dict[str, int] | None:
    """Return the ids of the tokens as tokenizer.json spells them; None: there is no such file.

    Raises:
        ModelError: the file is damaged.
    """
    text = checkpoint.read_text("tokenizer.json")
    if text is None:
        return None
    try:
        read = json.loads(text)
        found = read["model"]["vocab"]
        if isinstance(found, list):
            found = {piece: i for i, (piece, _) in enumerate(found)}
        return dict(found) | {it["content"]: it["id"] for it in read.get("added_tokens") or ()}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ModelError(
            f"{checkpoint.path / 'tokenizer.json'} is damaged; download it again."
        ) from None
