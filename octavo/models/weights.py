"""Weights of a model: shapes in memory, and where each comes from in a checkpoint. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.errors import ModelError
from octavo.models.config_json import ConfigJson

SHARDED_PATTERN = "model-rank-{rank}-part-{part}.safetensors"
"""Names of the files of a sharded state."""
_MOST_NAMES = 6  # listed in an error message


@dataclass(frozen=True)
class Source:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    transform: Literal["none", "transpose", "by_group", "skip_rows"] = "none"
    """How to come to the rows wanted: transpose (Conv1D); from q, k, v of each group of heads in
    turn to all q, all k, all v (BLOOM, Falcon); leave out the first rows (OPT's positions)."""
    groups: int = 1
    """by_group: heads of keys and values."""
    group_queries: int = 1
    """by_group: query heads of each of them."""
    columns: tuple[int, int] | None = None
    """Of each row the numbers from ... to ... that are wanted; None: all."""
    parts: tuple[tuple[int, int], ...] | None = None
    """Of the rows that are come to those from ... to ... that are wanted; None: all."""


@dataclass(frozen=True)
class Weight:
    """One tensor of the loaded model."""

    name: str
    """The model's own name, e.g. layers.0.qkv_proj.weight."""
    kind: Literal["linear", "embedding", "vector"]
    """linear: packed for the matrix product; the others are plain tensors."""
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    """To be stacked along the first dimension."""
    dummy: float | None = None
    """What it is filled with in a model without a checkpoint; None: random numbers."""
    whole: int | None = None
    """Rows of the weight that this is a rank's part of; None: it is no part."""

    @property
    def whole_rows(self) -> int:
        """Rows of the weight, or of the one that it is a part of."""
        return self.shape[0] if self.whole is None else self.whole


@dataclass(frozen=True)
class Names:
    """Where a block stands in a model: how the names of its weights begin."""

    own: str = ""
    """In the loaded model, e.g. layers.0.qkv_proj."""
    checkpoint: str = ""
    """In the checkpoint, e.g. model.layers.0."""

    def of(self, part: str) -> Names:
        """Of a part of the block; checkpoints have names of their own for these."""
        return Names(f"{self.own}{part}.", self.checkpoint)


def weight_files(folder: Path, load_format: str) -> list[Path]:
    """The files of a folder that hold the weights: `load_format` as in `LoadConfig`; dummy: none.

    Raises:
        ModelError: for an index that is damaged, or names files elsewhere or that are not there.
    """
    match load_format:
        case "dummy":
            return []
        case "pt":
            return _list_files(folder, "pytorch_model.bin.index.json", "pytorch_model*.bin")
        case "sharded_state":
            return sorted(folder.glob("model-*-part-*.safetensors"))
    return _list_files(folder, "model.safetensors.index.json", "*.safetensors")


def _list_files(folder: Path, index: str, pattern: str) -> list[Path]:
    """The weight files that the index names, or without one all that fit the pattern."""
    if not (folder / index).exists():
        return [
            file
            for file in sorted(folder.glob(pattern))
            if not file.name.startswith(("consolidated", "adapter_"))
        ]
    weight_map = ConfigJson.load(folder / index).section("weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside:
        raise ModelError(
            f"{folder / index} names files outside the folder: {shorten_names(outside)}."
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder / index} names files that are not there: {shorten_names(missing)}. "
            "Download the model again."
        )
    return [folder / name for name in names]


def shorten_names(names: list[str]) -> str:
    """The first of some names, for an error message, and how many there are besides."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
