"""Names of the files of Mistral's own form."""

from __future__ import annotations

from pathlib import Path

PARAMS = "params.json"
"""File in place of config.json."""
WEIGHTS = "consolidated*.safetensors"
"""Names of the weight files."""


def has_params_only(folder: Path) -> bool:
    """Return True if a folder has the model's description in Mistral's own form only."""
    return (folder / PARAMS).exists() and not (folder / "config.json").exists()
