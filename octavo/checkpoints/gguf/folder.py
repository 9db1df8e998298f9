"""The GGUF file of a folder."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.checkpoints.base import shorten_names
from octavo.errors import ModelError

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf$")
"""Name of a part of a split model: groups of its stem, its index from 1, and their number."""


def find_gguf(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that has no config.json; None: it has no such file.

    Raises:
        ModelError: there are several models.
    """
    if (folder / "config.json").exists():
        return None
    files = sorted(folder.glob("*.gguf"))
    firsts = [file for file in files if not (part := PART.match(file.name)) or int(part[2]) == 1]
    models = [file for file in firsts if not file.name.startswith("mmproj")]
    if len(models) > 1:
        names = shorten_names([file.name for file in models])
        raise ModelError(f"{folder} holds several GGUF models: {names}. Name one of these files.")
    return models[0] if models else None
