"""Interface of a checkpoint: its config, its files, and its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.config_json import ConfigJson
from octavo.checkpoints.model_files import printable

if TYPE_CHECKING:
    from octavo.system.tensor import HostTensor

LoadFormat = Literal["auto", "safetensors", "pt", "gguf", "mistral", "sharded_state", "dummy"]
FLOATS = ("float64", "float32", "float16", "bfloat16")
_OLD_NAMES = {
    "LayerNorm.weight": "LayerNorm.gamma",
    "LayerNorm.bias": "LayerNorm.beta",
    ".weight": ".parametrizations.weight.original",
}
"""Ends of names, and those of checkpoints that were converted from TensorFlow, or in which a weight
has adapters (torch.nn.utils.parametrize)."""
_MAX_NAMES = 6
"""Number of names listed in an error message."""


@dataclass(frozen=True)
class Source:
    """One tensor of a checkpoint, and the part of it that a weight needs."""

    name: str
    """Name of the tensor; FOLDER/NAME: that of a tensor in a folder of the checkpoint;
    FILE.pt/linear.NAME: that of a tensor in a file with one linear layer."""
    shape: tuple[int, ...]
    """Shape; -1: any size."""
    transform: Literal[
        "none",
        "transpose",
        "swap",
        "flat",
        "flat_or_zeros",
        "by_group",
        "by_shard",
        "halves",
        "skip_rows",
        "padded",
        "taps",
        "flat_rows",
        "softplus",
    ] = "none"
    """Change of the stored tensor before a part is selected. transpose: from [inputs, outputs] to
    [outputs, inputs] (Conv1D); GGUF files store the result. swap: exchange rows and columns, also
    of GGUF files. flat: one dimension with all numbers (Kimi Linear). flat_or_zeros: the same, and
    zeros for a tensor that is `optional` (BART). by_group: reorder rows from queries, keys and
    values of each group of heads in turn to all queries, all keys, all values (BLOOM, Falcon); a
    group may have other parts. by_shard: the same from queries, values and keys of each of several
    equal parts of the heads (CodeGen). halves: exchange the halves of the rows (GTE). skip_rows:
    drop the first rows (OPT's positions). padded: append as many zeros (DeBERTa V1). taps: from
    [outputs, inputs, taps] to [outputs, taps * inputs] (DeBERTa V2). flat_rows: from [outputs, ...]
    to [outputs, all others] (patches of pictures). softplus: log(1 + exp(x)) of each number x
    (Gemma 4's sounds)."""
    groups: int = 1
    """by_group: number of heads of keys and values. by_shard: number of parts."""
    group_queries: int = 1
    """by_group: number of query heads in each group."""
    group_parts: tuple[int, ...] = ()
    """by_group: sizes of the parts of each group, in any unit, instead of queries, a key and a
    value (Qwen3-Next)."""
    alternate: bool = False
    """True if the rows are those of two modules in turn: they are read as all of the first, then
    all of the second."""
    order: tuple[int, ...] | None = None
    """Rows to read, in this order and some of them several times, before any other change (MPNet).
    None: all rows."""
    index: int | None = None
    """Index in the first dimension of the part that is one tensor; None: the whole is one. The
    stored tensor may have the parts one after the other, without that dimension."""
    columns: tuple[int, int] | None = None
    """Inputs [begin, end) that are needed; None: all."""
    parts: tuple[tuple[int, int], ...] | None = None
    """Outputs [begin, end) that are needed; None: all."""
    dtypes: tuple[str, ...] = FLOATS
    """Types that the tensor may have."""
    other_shapes: tuple[tuple[int, ...], ...] = ()
    """Other shapes that the tensor may have."""
    optional: bool = False
    """True if checkpoints may lack the tensor; it is then read as a tensor without elements."""
    dummy: float | None = None
    """Value of all elements with load_format=dummy; None: random numbers."""

    def row_order(self, rows: int) -> NDArray[np.int64]:
        """Return the stored rows, part by part: for by_group, by_shard, halves and `alternate`."""
        if self.alternate:
            return np.arange(rows).reshape(-1, 2).T.ravel()
        if self.transform == "halves":
            return np.roll(np.arange(rows), rows // 2)
        if self.transform == "by_shard":
            queries, values, keys = np.arange(rows).reshape(self.groups, 3, -1).swapaxes(0, 1)
            return np.concatenate([queries.ravel(), keys.ravel(), values.ravel()])
        parts = self.group_parts or (self.group_queries, 1, 1)
        groups = np.arange(rows).reshape(self.groups, sum(parts), -1)
        split = np.split(groups, np.cumsum(parts)[:-1], axis=1)
        return np.concatenate([part.ravel() for part in split])


@dataclass(frozen=True)
class Expected:
    """Tensors that a model expects in its checkpoint."""

    architecture: str
    sources: Sequence[Source]
    bare_prefix: str
    """Prefix of names that checkpoints of the bare model (without LM head) omit, e.g. `model.`"""
    ignored: tuple[str, ...] = ()
    """Regular expressions of names that are not weights."""
    elsewhere: frozenset[str] = frozenset()
    """Names of the tensors that only other pipeline stages need."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """Pairs (expected, stored) of prefixes: other beginnings of names in checkpoints."""

    @property
    def folders(self) -> list[str]:
        """Folders, and files with one linear layer, of the checkpoint that have some tensors."""
        names = [source.name for source in self.sources]
        return sorted({name.rpartition("/")[0] for name in names if "/" in name})

    def stored_names(self, name: str) -> list[str]:
        """Return the names that a tensor may have in a checkpoint, the most usual one first."""
        names = [name, name.removeprefix(self.bare_prefix)]
        names += [
            stored + name.removeprefix(expected)
            for expected, stored in self.prefixes
            if name.startswith(expected)
        ]
        return names + [
            known.removesuffix(end) + old
            for end, old in _OLD_NAMES.items()
            for known in names
            if known.endswith(end)
        ]


class Tensors(Protocol):
    """Tensors of an open checkpoint; names, shapes and types are checked already."""

    def read(self, source: Source) -> HostTensor:
        """Return a whole tensor, or the part with the source's index, as it is stored."""
        ...

    def done(self, tensor: HostTensor) -> None:
        """Release a tensor of `read` that the caller no longer uses; default: do nothing.

        The caller must not use views of the tensor either.
        """
        return


class Checkpoint(Protocol):
    """Published model: config, weights and tokenizer. Each is read when it is first needed."""

    path: Path
    """Path for error messages."""
    load_format: LoadFormat

    @property
    def config(self) -> ConfigJson:
        """Contents of the model's config.json.

        Raises:
            ModelError: config.json does not exist, or is damaged.
        """
        ...

    @property
    def generation_config(self) -> ConfigJson | None:
        """Contents of the model's generation_config.json; None: the checkpoint has none."""
        ...

    @property
    def dtype(self) -> str:
        """Type of the stored weights, for a config that does not name it.

        Raises:
            ModelError: a file is damaged.
        """
        ...

    @property
    def config_file(self) -> Path:
        """File of `config`."""
        ...

    @property
    def weight_files(self) -> list[Path]:
        """Files of the weights; empty for random weights.

        Raises:
            ModelError: an index is damaged, or names files that cannot be used.
        """
        ...

    def read_text(self, name: str) -> str | None:
        """Return a text of the tokenizer, or a chat template; None: the checkpoint has none.

        Args:
            name: the name of its file in a Hugging Face folder, such as tokenizer.json.

        Raises:
            ModelError: the file cannot be read, or is not UTF-8.
        """
        ...

    def file_names(self, pattern: str) -> list[str]:
        """Return the names of the files that match a pattern, sorted."""
        ...

    def open(self, expected: Expected) -> Tensors:
        """Open the files and compare their tensors with `expected`.

        Args:
            expected: tensors that the model expects.

        Raises:
            ModelError: a tensor is missing, unexpected, or has a wrong shape or type.
        """
        ...


def shorten_names(names: list[str]) -> str:
    """Return the first names for an error message, and the number of the other names."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(map(printable, names[:_MAX_NAMES])) + more
