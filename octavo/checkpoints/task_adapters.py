"""Adapters in a model's own checkpoint, one for each task: jina-embeddings-v3.

A linear layer M [outputs, inputs] has M.parametrizations.weight.original, and for all tasks
M.parametrizations.weight.0.lora_A [tasks, rank, inputs] and lora_B [tasks, outputs, rank]. Those of
an embedding [tokens, size] are [tasks, tokens, rank] and [tasks, rank, size].

Sturua et al., "jina-embeddings-v3: Multilingual Embeddings With Task LoRA", arXiv 2409.10173.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from octavo.checkpoints.adapter import (
    Factors,
    finite_scale,
    identity_of,
    pair_factors,
)
from octavo.checkpoints.base import FLOATS, Expected, Source
from octavo.checkpoints.config_json import ConfigJson
from octavo.checkpoints.mapped_file import StoredTensor
from octavo.checkpoints.model_files import printable
from octavo.checkpoints.safetensors_header import read_header
from octavo.checkpoints.tasks import TASKS, read_tasks
from octavo.errors import AdapterError
from octavo.system.tensor import itemsize

_WEIGHTS = "model.safetensors"
_FACTOR = re.compile(r"(.+)\.parametrizations\.weight\.0\.lora_([AB])")
_EMBEDDING = re.compile(r"(.*\.)?embeddings\..*")


def is_task(path: Path) -> bool:
    """Return True for the path of a task: FOLDER/lora_adaptations/TASK."""
    return path.parent.name == TASKS and not path.exists()


class TaskAdapter:
    """`AdapterFile` of a task.

    Args:
        path: FOLDER/lora_adaptations/TASK, with the folder of the model.

    Raises:
        AdapterError: the model does not have the task, or the checkpoint is damaged.
        ModelError: a file is missing or damaged.
    """

    kind = "LoRA"
    naming = "tasks"
    base: str | None = None
    invocation_tokens: tuple[int, ...] = ()
    settings = ""
    swaps_experts = False
    trained: Mapping[str, Mapping[str, StoredTensor]] = MappingProxyType({})
    copies: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    def __init__(self, path: Path) -> None:
        self.path, folder = path, path.parent.parent
        config = ConfigJson.load(folder / "config.json")
        tasks = read_tasks(config)
        if path.name not in tasks:
            raise AdapterError(
                f"{folder} has no task {printable(path.name)}; it has "
                f"{', '.join(map(printable, tasks)) or 'none'}."
            )
        self._rank, self._alpha = config.integer("lora_rank"), config.number("lora_alpha")
        self.file = folder / _WEIGHTS
        self.identity = identity_of(self.file)
        found: dict[str, dict[str, StoredTensor]] = {}
        for name, stored in read_header(self.file).items():
            match = _FACTOR.fullmatch(name)
            if match is None:
                continue
            if stored.dtype not in FLOATS:
                raise AdapterError(
                    f"{self.file}: {printable(name)} has type {stored.dtype}, and factors must be "
                    "floats; download the model again."
                )
            if len(stored.shape) != 3 or stored.shape[0] != len(tasks):
                raise AdapterError(
                    f"{self.file}: {printable(name)} has shape {list(stored.shape)}; it must be "
                    f"[{len(tasks)}, ...], with a matrix for each task of {TASKS}."
                )
            matrix = _matrix(stored, tasks.index(path.name))
            if _EMBEDDING.fullmatch(match[1]):
                matrix = matrix.transposed
            found.setdefault(match[1], {})[match[2]] = matrix
        if not found:
            raise AdapterError(f"{self.file} has no adapters; download the model again.")
        embeddings = {module for module in found if _EMBEDDING.fullmatch(module)}
        self.factors: Mapping[str, Factors] = pair_factors(self.file, found, embeddings)

    def scale(self, module: str, parameter: str | None = None, experts: int = 1) -> float:
        """Implement `AdapterFile`."""
        rank = self.factors[module].rank
        if rank != self._rank:
            raise AdapterError(
                f"{self.file}: the factors of {printable(module)} have rank {rank}, and lora_rank "
                f"is {self._rank}; download the model again."
            )
        return finite_scale(self._alpha / rank, self.path)

    def names(self, module: str, expected: Expected) -> list[str]:
        """Implement `AdapterFile`."""
        stored = expected.stored_names(f"{module}.weight")
        return [name.removesuffix(".weight") for name in stored if name.endswith(".weight")]

    def row_order(self, source: Source, rows: int, head_size: int) -> None:
        """Implement `AdapterFile`: the order is that of the checkpoint."""
        return


def _matrix(stored: StoredTensor, index: int) -> StoredTensor:
    """Return one of the matrices of a tensor."""
    _, rows, columns = stored.shape
    nbytes = rows * columns * itemsize(stored.dtype)
    return replace(stored, shape=(rows, columns), begin=stored.begin + index * nbytes)
