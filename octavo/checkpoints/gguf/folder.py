"""The GGUF files of a folder: the model, and perhaps the tower of a model of pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from octavo.checkpoints.base import shorten_names
from octavo.errors import ModelError

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf$")
"""Name of a part of a split model: groups of its stem, its index from 1, and their number."""

_PREFERRED = ("F16", "BF16", "Q8_0", "F32")
"""Ends of names, of which the first that a model has is chosen."""


def is_mmproj(name: str) -> bool:
    """Return True for the name of the file of a tower."""
    return re.fullmatch(r"mmproj.*\.gguf", name, re.IGNORECASE) is not None


def find_gguf(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that has no config.json; None: it has no such file.

    Raises:
        ModelError: there are several models.
    """
    if (folder / "config.json").exists():
        return None
    files = sorted(folder.glob("*.gguf"))
    firsts = [file for file in files if not (part := PART.match(file.name)) or int(part[2]) == 1]
    models = [file for file in firsts if not is_mmproj(file.name)]
    if len(models) > 1:
        names = shorten_names([file.name for file in models])
        raise ModelError(f"{folder} holds several GGUF models: {names}. Name one of these files.")
    return models[0] if models else None


def choose_mmproj(names: Sequence[str]) -> str | None:
    """Return the mmproj file among the names of a folder's files, or None.

    Of several, F16 is preferred, then BF16, Q8_0 and F32: they are one tower in several types.

    Raises:
        ModelError: the types do not tell which of several is meant.
    """
    found = sorted(filter(is_mmproj, names))
    if len(found) < 2:
        return found[0] if found else None
    for end in _PREFERRED:
        pattern = rf".*(?<![a-z]){end}\.gguf"
        those = [name for name in found if re.fullmatch(pattern, name, re.IGNORECASE)]
        if len(those) == 1:
            return those[0]
    raise ModelError(
        f"there are several mmproj files: {', '.join(found[:6])}. Name one with --mmproj, or start "
        "with --no-mmproj."
    )
