"""Adapter that is merged into a model's weights when they are read: W + scale * B A.

The numbers are those of PEFT's `merge_and_unload` for a model that was loaded in the served type:
https://huggingface.co/docs/peft/developer_guides/lora#merge-lora-weights-into-the-base-model
The product is computed in float32, added to the weight in float32, and rounded once. Before it is
rounded, the rows of a DoRA get their norms. Quantization comes after it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.adapter import CONFIG, AdapterData, AdapterFile, adapter_errors
from octavo.checkpoints.base import (
    Checkpoint,
    Expected,
    LoadFormat,
    Source,
    Tensors,
    shorten_names,
)
from octavo.checkpoints.config_json import ConfigJson
from octavo.checkpoints.model_files import printable
from octavo.checkpoints.task_adapters import is_task
from octavo.errors import AdapterError, ConfigError
from octavo.models.adaptable_model import AdaptableModel
from octavo.models.adapters import open_adapter, open_adapter_file
from octavo.models.forms import quant_method
from octavo.models.spec import ModelSpec
from octavo.quantization.int8 import GroupedInt8
from octavo.quantization.registry import FORMS
from octavo.system.tensor import HostTensor, from_numpy, itemsize, numpy_dtype

logger = logging.getLogger(__name__)

_ROWS = 256
"""Rows of a weight that are computed at a time."""
_MOST_RANK = 2**31
"""Merging has no limit of the rank."""


def check_merge(folder: Path, spec: ModelSpec, checkpoint: Checkpoint, dtype: str) -> None:
    """Check an adapter that is to be merged into a model, and all of its numbers.

    Args:
        folder: the adapter.
        spec: the whole model.
        checkpoint: its checkpoint.
        dtype: type of the model: float32, float16 or bfloat16.

    Raises:
        AdapterError: the adapter cannot be used with this model.
        ConfigError: the weights of the model are quantized, or stored in a form that cannot be
            changed.
    """
    name = checkpoint.path
    fix = (
        "merge the adapter into the unquantized model, or serve it beside the model (enable_lora, "
        "lora_modules)"
    )
    made_here = (*FORMS.values(), GroupedInt8())
    if any(w.form not in made_here for w in spec.weights() if w.kind == "linear"):
        method = quant_method(checkpoint.config)
        raise ConfigError(f"lora_merge: {name} is stored quantized, by {method}; {fix}.")
    if checkpoint.load_format in ("gguf", "sharded_state"):
        raise ConfigError(
            f"lora_merge is not supported with load_format={checkpoint.load_format} ({name}); "
            f"{fix}."
        )
    if is_task(folder):
        raise AdapterError(
            f"lora_merge: {folder} is a task of a model's own checkpoint; prompt_name chooses it."
        )
    if folder.is_file():
        raise AdapterError(
            f"lora_merge: {folder} is a file; name the adapter's folder in PEFT's form."
        )
    if open_adapter_file(folder).invocation_tokens:
        raise AdapterError(
            f"lora_merge: {folder} is an activated LoRA (aLoRA), which changes a part of each "
            "prompt only. Serve it beside the model (enable_lora, lora_modules)."
        )
    adapter = open_adapter(folder, AdaptableModel(spec), dtype=dtype, max_lora_rank=_MOST_RANK)
    known = _stored_names(adapter.file, spec.expected)
    others = [name for name in adapter.stored_names if name not in known]
    if others:
        raise AdapterError(
            f"{folder} changes {shorten_names(others)}, which share a weight with other layers or "
            "experts and cannot be merged. Serve the adapter beside the model (enable_lora, "
            "lora_modules)."
        )
    factors = adapter.file.factors.values()
    for cannot, what in (
        (any(it.bias is not None for it in factors), "biases of B (lora_bias)"),
        (bool(adapter.file.trained), "whole modules (modules_to_save)"),
        (spec.tied and any(it.of_embedding for it in factors), "changes of a tied embedding"),
    ):
        if cannot:
            raise AdapterError(
                f"lora_merge: {folder} has {what}, which cannot be merged. Serve the adapter "
                "beside the model (enable_lora, lora_modules)."
            )
    adapter.read()
    logger.info("the adapter %s is merged into %s", folder, name)


def merge_nbytes(folder: Path, dtype: str) -> int:
    """Return the most bytes that a process needs for merging an adapter while it loads the model.

    Args:
        folder: the adapter.
        dtype: type of the model.
    """
    factors = open_adapter_file(folder).factors.values()
    widest = max(max(it.a.shape[1], it.b.shape[0]) for it in factors)
    largest = max(it.a.shape[1] * it.b.shape[0] for it in factors)
    numbers = sum(it.rank * (it.a.shape[1] + it.b.shape[0]) for it in factors)
    return largest * itemsize(dtype) + 4 * (numbers + 3 * widest * _ROWS)


class MergedCheckpoint:
    """`Checkpoint` that adds the changes of an adapter to the tensors that are read.

    The adapter's files count as files of its weights: what is kept under a name that they make,
    such as packed weights, differs from that of the model alone.

    Args:
        checkpoint: the model.
        adapter: folder of the adapter; `check_merge` has accepted it.
        dtype: type of the changed tensors: float32, float16 or bfloat16.
    """

    def __init__(self, checkpoint: Checkpoint, adapter: Path, dtype: str) -> None:
        self._checkpoint, self._adapter, self._dtype = checkpoint, adapter, dtype
        self.path = checkpoint.path
        self.load_format: LoadFormat = checkpoint.load_format

    @property
    def config(self) -> ConfigJson:
        """Implement `Checkpoint`."""
        return self._checkpoint.config

    @property
    def generation_config(self) -> ConfigJson | None:
        """Implement `Checkpoint`."""
        return self._checkpoint.generation_config

    @property
    def dtype(self) -> str:
        """Implement `Checkpoint`."""
        return self._checkpoint.dtype

    @property
    def config_file(self) -> Path:
        """Implement `Checkpoint`."""
        return self._checkpoint.config_file

    @property
    def weight_files(self) -> list[Path]:
        """Implement `Checkpoint`: the files of the model, then those of the adapter."""
        file = open_adapter_file(self._adapter).file
        return [*self._checkpoint.weight_files, self._adapter / CONFIG, file]

    def read_text(self, name: str) -> str | None:
        """Implement `Checkpoint`."""
        return self._checkpoint.read_text(name)

    def file_names(self, pattern: str) -> list[str]:
        """Implement `Checkpoint`."""
        return self._checkpoint.file_names(pattern)

    def open(self, expected: Expected) -> MergedTensors:
        """Open the model and read the adapter; see `Checkpoint`.

        Raises:
            AdapterError: the adapter is damaged.
        """
        file = open_adapter_file(self._adapter)
        return MergedTensors(
            self._checkpoint.open(expected), _read_changes(file, expected), self._dtype, file.file
        )


@dataclass(frozen=True)
class _Change:
    a: NDArray[Any]
    """A: [rank, inputs]."""
    b: NDArray[Any]
    """B: [outputs, rank]."""
    scale: float
    magnitude: NDArray[Any] | None
    """Norms of the rows of the changed weight [outputs], for DoRA."""


def _stored_names(file: AdapterFile, expected: Expected) -> dict[str, str]:
    """Return the tensors that may change, by the names of their modules in an adapter's file."""
    names: dict[str, str] = {}
    for source in expected.sources:
        module, _, last = source.name.rpartition(".")
        if last == "weight" and source.index is None and len(source.shape) == 2:
            names |= dict.fromkeys(file.names(module, expected), source.name)
    return names


def _read_changes(file: AdapterFile, expected: Expected) -> dict[str, _Change]:
    """Return the change of each tensor of the model, by the tensor's name."""
    changes, stored_names = {}, _stored_names(file, expected)
    with adapter_errors(), AdapterData(file) as data:
        for stored, factors in file.factors.items():
            if (name := stored_names.get(stored)) is not None:  # else, a weight of another rank
                _, read = data.read(list(factors.tensors.values()))
                own = dict(zip(factors.tensors, read, strict=True))
                a, b = own["A"], own["B"]
                if factors.of_embedding:
                    a, b = b.T, a.T
                changes[name] = _Change(a, b, file.scale(stored), own.get("magnitude"))
        data.check()
    return changes


class MergedTensors(Tensors):
    """Tensors of a model, with the changes of an adapter.

    Args:
        tensors: those of the model.
        changes: change of each tensor, by its name.
        dtype: type of the changed tensors.
        file: file of the adapter, for error messages.
    """

    def __init__(
        self, tensors: Tensors, changes: dict[str, _Change], dtype: str, file: Path
    ) -> None:
        self._tensors, self._changes = tensors, changes
        self._dtype, self._file = dtype, file
        self._own: set[int] = set()
        """Addresses of the changed tensors that are in use."""

    def read(self, source: Source) -> HostTensor:
        """Implement `Tensors`: the model's tensor, or a changed copy in the model's type.

        Raises:
            AdapterError: a sum is beyond float16.
        """
        tensor = self._tensors.read(source)
        change = self._changes.get(source.name)
        if change is None:
            return tensor
        merged = self._merge(source, tensor, change)
        self._tensors.done(tensor)
        self._own.add(merged.data_ptr())
        return merged

    def done(self, tensor: HostTensor) -> None:
        """Implement `Tensors`."""
        if tensor.data_ptr() in self._own:
            self._own.discard(tensor.data_ptr())
        else:
            self._tensors.done(tensor)

    def _merge(self, source: Source, tensor: HostTensor, change: _Change) -> HostTensor:
        number = numpy_dtype(self._dtype)
        weight = tensor.numpy()
        merged = np.empty(weight.shape, number)
        a, b, scale = change.a.astype(np.float32), change.b, np.float32(change.scale)
        outputs = source.transform in ("transpose", "swap")  # [inputs, outputs] is stored
        turned, out = (weight.T, merged.T) if outputs else (weight, merged)
        for begin in range(0, len(turned), _ROWS):
            rows = slice(begin, begin + _ROWS)
            delta = b[rows].astype(np.float32) @ a
            delta *= scale
            delta += turned[rows].astype(number).astype(np.float32)
            if change.magnitude is not None:
                norms = np.sqrt(np.square(delta).sum(1))
                with np.errstate(all="ignore"):  # of a row of zeros
                    delta *= (change.magnitude[rows].astype(np.float32) / norms)[:, None]
            with np.errstate(over="ignore"):
                out[rows] = delta.astype(number)
        is_unsafe = self._dtype == "float16" or change.magnitude is not None
        if is_unsafe and not np.isfinite(merged).all():
            raise AdapterError(
                f"{self._file}: merged into the model, {printable(source.name)} has numbers that "
                f"are not finite in {self._dtype}; set dtype=bfloat16 or float32, or load another "
                "adapter."
            )
        whole: HostTensor = from_numpy(merged)
        return whole
