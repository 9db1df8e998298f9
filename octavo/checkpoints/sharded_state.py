"""Checkpoints in vLLM's sharded form: a file for each rank, with the rank's part of the tensors.

`LLM(load_format="sharded_state")` of vLLM writes and reads them. A rank has rows or columns of a
tensor. Queries, keys and values are stacked to one tensor, and gate and up projection, too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from octavo.checkpoints.base import Expected, Source, Tensors
from octavo.checkpoints.folder import Folder, require_dtype, require_no_more
from octavo.checkpoints.mapped_file import MappedFile, StoredTensor
from octavo.checkpoints.safetensors_header import read_header
from octavo.errors import ModelError
from octavo.system.tensor import HostTensor, concatenate

_FILE = re.compile(r"model-(?:rank-(\d+)|pp-\d+-tp-(\d+))-part-\d+\.safetensors")
SHARDED_PATTERN = "model-rank-{rank}-part-{part}.safetensors"
"""Names of the files of a sharded state."""
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


@dataclass(frozen=True)
class _Piece:
    """Rows of a tensor of a rank's file."""

    stored: StoredTensor
    name: str
    begin: int
    end: int


class ShardedStateFolder(Folder):
    """`Checkpoint` in the files of vLLM's ranks."""

    @property
    def weight_files(self) -> list[Path]:
        """Implement `Checkpoint`."""
        return sorted(self.path.glob("model-*-part-*.safetensors"))

    def open(self, expected: Expected) -> ShardedTensors:
        """Implement `Checkpoint`."""
        ranks: dict[int, dict[str, StoredTensor]] = defaultdict(dict)
        for file in self.weight_files:
            if found := _FILE.fullmatch(file.name):
                ranks[int(found[1] or found[2])] |= read_header(file)
        if not ranks or sorted(ranks) != list(range(len(ranks))):
            raise ModelError(
                f"{self.path} does not hold the files of all ranks (model-rank-0-part-0.safetensors"
                f" ...), which load_format=sharded_state reads; there are those of ranks "
                f"{sorted(ranks)}. Leave load_format out for another checkpoint."
            )
        return ShardedTensors(self.path, [ranks[number] for number in sorted(ranks)], expected)


class ShardedTensors(Tensors):
    """Whole tensors, combined from the ranks' parts.

    Args:
        folder: for error messages.
        ranks: the tensors of each rank.
        expected: tensors that the model expects.

    Raises:
        ModelError: tensors are missing, unexpected, or do not fit together.
    """

    def __init__(
        self, folder: Path, ranks: list[dict[str, StoredTensor]], expected: Expected
    ) -> None:
        self._ranks, self._config = ranks, folder / "config.json"
        self._shapes = {source.name: source.shape for source in expected.sources}
        used: set[str | None] = {self._stored_name(name) for name in expected.elsewhere}
        for source in expected.sources:
            name = self._stored_name(source.name)
            if name is None:
                raise ModelError(
                    f"{folder} lacks {source.name} of {expected.architecture}. The copy "
                    "may be incomplete, or config.json belongs to another checkpoint."
                )
            used.add(name)
        require_no_more(self._config, sorted(set().union(*ranks) - used), expected)
        for source in expected.sources:
            self._plan(source)

    def read(self, source: Source) -> HostTensor:
        """Return a tensor, combined from a copy of its parts."""
        pieces, dim = self._plan(source)
        parts = [
            MappedFile(piece.stored.file).tensor(piece.stored)[piece.begin : piece.end]
            for piece in pieces
        ]
        whole = parts[0] if len(parts) == 1 else concatenate(parts, dim)
        # Vocabularies are padded, so that all ranks have the same number of rows.
        tensor: HostTensor = whole[: source.shape[0]]
        return tensor

    def _stored_name(self, name: str) -> str | None:
        """Return the stored name of a tensor, or of the stacked tensor that contains it."""
        module, _, kind = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        candidates = [name]
        if last in FUSED:
            candidates.append(f"{parent}.{FUSED[last]}.{kind}")
        return next((n for n in candidates if any(n in rank for rank in self._ranks)), None)

    def _plan(self, source: Source) -> tuple[list[_Piece], int]:
        """Return the parts of a tensor, in order, and the dimension to concatenate them along.

        Raises:
            ModelError: the parts do not fit together.
        """
        name = self._stored_name(source.name)
        assert name is not None
        stored = [rank[name] for rank in self._ranks if name in rank]
        for part in stored:
            require_dtype(self._config, name, part, source)
        pieces = [_Piece(part, name, *self._rows(source, name, part.shape[0])) for part in stored]
        rows = [piece.end - piece.begin for piece in pieces]
        if stored[0].shape[1:] == source.shape[1:]:
            if rows[0] == source.shape[0]:  # every rank has all of it
                return pieces[:1], 0
            copies = sum(rows) // source.shape[0]
            if copies > 1 and name != source.name:  # ranks share heads of keys and values
                pieces, rows = pieces[::copies], rows[::copies]
            if sum(rows) >= source.shape[0]:
                return pieces, 0
        elif (rows[0], sum(part.shape[-1] for part in stored)) == source.shape:
            return pieces, 1
        raise ModelError(
            f"{stored[0].file}: {name} has shape {list(stored[0].shape)} in each of {len(stored)} "
            f"ranks, but config.json requires {list(source.shape)} of {source.name}."
        )

    def _rows(self, source: Source, name: str, count: int) -> tuple[int, int]:
        """Return the rows (begin, end) of a model's tensor in a rank's tensor of `count` rows."""
        if name == source.name:
            return 0, count
        module, _, kind = source.name.rpartition(".")
        parent, _, last = module.rpartition(".")
        if last in ("gate_proj", "up_proj"):
            half = count // 2
            return (0, half) if last == "gate_proj" else (half, count)
        queries = self._shapes[f"{parent}.q_proj.{kind}"][0] // len(self._ranks)
        keys = (count - queries) // 2
        begin = {"q_proj": 0, "k_proj": queries, "v_proj": queries + keys}[last]
        return begin, begin + (queries if last == "q_proj" else keys)
