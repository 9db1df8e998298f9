"""Hugging Face model folder with any kind of weight files."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from octavo.checkpoints.base import FLOATS, Expected, LoadFormat, Source, shorten_names
from octavo.checkpoints.config_json import ConfigJson
from octavo.checkpoints.mapped_file import MappedFile, MappedTensors, StoredTensor
from octavo.checkpoints.mistral.files import PARAMS, has_params_only
from octavo.checkpoints.model_files import refuse_lfs_pointer, without_weights
from octavo.checkpoints.safetensors_header import read_header
from octavo.checkpoints.torch_header import read_torch_header
from octavo.errors import ModelError, reason_of
from octavo.system.tensor import HostTensor, itemsize


class Folder:
    """Parts of a `Checkpoint` that all folders have.

    Args:
        path: the folder.
        load_format: the setting that selects its weight files.
    """

    def __init__(self, path: Path, load_format: LoadFormat) -> None:
        self.path = path
        self.load_format = load_format

    @cached_property
    def is_mistral(self) -> bool:
        """True if the model is described in Mistral's own form."""
        return self.load_format == "mistral" or has_params_only(self.path)

    @property
    def config_file(self) -> Path:
        """Implement `Checkpoint`."""
        return self.path / (PARAMS if self.is_mistral else "config.json")

    @cached_property
    def config(self) -> ConfigJson:
        """Implement `Checkpoint`."""
        if self.is_mistral:
            from octavo.checkpoints.mistral.params import read_params  # few models need it

            return read_params(self.config_file)
        return ConfigJson.load(self.config_file)

    @property
    def generation_config(self) -> ConfigJson | None:
        """Implement `Checkpoint`."""
        file = self.path / "generation_config.json"
        return ConfigJson.load(file) if file.exists() else None

    @property
    def dtype(self) -> str:
        """Type of the first tensor in safetensors files; float32 if there are no such files."""
        for file in sorted(self.path.glob("*.safetensors")):
            for stored in read_header(file).values():
                if stored.dtype in FLOATS:
                    return stored.dtype
        return "float32"

    def read_text(self, name: str) -> str | None:
        """Implement `Checkpoint`."""
        file = self.path / name
        try:
            if not file.is_file():
                return self._made_text(name)
            refuse_lfs_pointer(file)
            return file.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read: {reason_of(error)}.") from error

    def _made_text(self, name: str) -> str | None:
        """Return a file's text that Mistral's params.json describes; None: it does not."""
        if not self.is_mistral or name != "preprocessor_config.json":
            return None
        from octavo.checkpoints.mistral.params import read_preprocessor  # few models need it

        made = read_preprocessor(self.config_file)
        return None if made is None else json.dumps(made)

    def file_names(self, pattern: str) -> list[str]:
        """Implement `Checkpoint`."""
        return sorted(str(file.relative_to(self.path)) for file in self.path.glob(pattern))


class MappedFolder(Folder, ABC):
    """Folder whose weight files are mapped."""

    index: ClassVar[str]
    """Name of the file that names the weight files."""
    pattern: ClassVar[str]
    """Names of the weight files where there is no index."""

    @abstractmethod
    def read_header(self, file: Path) -> dict[str, StoredTensor]:
        """Return the tensors of a file by name.

        Raises:
            ModelError: the file is damaged, or of another kind.
        """

    @property
    def weight_files(self) -> list[Path]:
        """Implement `Checkpoint`."""
        return list_files(self.path, self.index, self.pattern)

    def open(self, expected: Expected) -> MappedTensors:
        """Map the files; see `Checkpoint`."""
        files = self.weight_files
        if not files:
            raise without_weights(self.path, self.pattern)
        stored = {name: found for file in files for name, found in self.read_header(file).items()}
        stored = _split_experts(stored, expected)
        for folder in expected.folders:
            file = module_file(self.path / folder)
            read = read_header if file.suffix == ".safetensors" else read_torch_header
            prefix = f"{folder}/linear." if file.suffix == ".pt" else f"{folder}/"
            stored |= {prefix + name: tensor for name, tensor in read(file).items()}
        return MappedTensors(stored, match_names(self.config_file, stored, expected))

    def read_tensor(self, name: str) -> HostTensor:
        """Return a tensor that is not one of the model's weights.

        Raises:
            ModelError: the folder has no tensor of that name, or its file is damaged.
        """
        for file in self.weight_files:
            if stored := self.read_header(file).get(name):
                return MappedFile(file).tensor(stored)
        raise ModelError(f"{self.path} lacks the tensor {name}.")


def module_file(folder: Path) -> Path:
    """Return the file with the weights of a module in a folder of its own.

    A path that ends with .pt is itself the file, of a module with one linear layer.

    Raises:
        ModelError: there is no such file.
    """
    if folder.suffix == ".pt":
        if not folder.is_file():
            raise ModelError(f"{folder} is missing; download the model again.")
        return folder
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return folder / name
    raise ModelError(
        f"{folder} has neither model.safetensors nor pytorch_model.bin; download the model again."
    )


def list_files(
    folder: Path,
    index: str,
    pattern: str,
    left_out: tuple[str, ...] = ("consolidated", "adapter_"),
) -> list[Path]:
    """Return the weight files that an index names; without an index, all that match a pattern.

    Args:
        folder: the model's folder.
        index: name of the index.
        pattern: names of weight files.
        left_out: beginnings of names of files that are not the model's weights in this form.

    Raises:
        ModelError: the index is damaged, or names files elsewhere or files that do not exist.
    """
    if not (folder / index).exists():
        return [file for file in sorted(folder.glob(pattern)) if not file.name.startswith(left_out)]
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


_MOST_EXPERTS = 4096
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Parts of the rows of tensors that may have the weights of all experts."""


def _split_experts(
    stored: Mapping[str, StoredTensor], expected: Expected
) -> dict[str, StoredTensor]:
    """Return the tensors, in which those of all experts are divided into those of each.

    Some checkpoints have one tensor [experts, outputs, inputs], or [experts, inputs, outputs]
    (Qwen3-VL), where others of the same architecture have a tensor for each expert. It is divided
    unless the model, or another stage of it, expects it whole.
    """
    names = {source.name for source in expected.sources} | expected.elsewhere
    wanted = {stored for name in names for stored in expected.stored_names(name)}
    shapes = {name: s.shape for s in expected.sources for name in expected.stored_names(s.name)}
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        prefix, _, last = name.rpartition(".")
        parts = _STACKED.get(last, ())
        divides = parts and prefix.endswith(".experts") and name not in wanted
        if not divides or not _is_stack(tensor):
            tensors[name] = tensor
            continue
        own = [
            [f"{prefix}.{expert}.{part}.weight" for part in parts]
            for expert in range(tensor.shape[0])
        ]
        expert_shape = next((shapes[first] for first, *_ in own if first in shapes), None)
        divided = _divide(tensor, len(parts), expert_shape)
        if divided is None:
            tensors[name] = tensor
        else:
            tensors |= zip((one for names in own for one in names), divided, strict=True)
    return tensors


def _is_stack(tensor: StoredTensor) -> bool:
    """Return True if a tensor may have the dense matrices of some experts."""
    dense = len(tensor.shape) == 3 and tensor.strides is None
    return dense and tensor.shape[0] <= _MOST_EXPERTS


def _divide(
    tensor: StoredTensor, parts: int, shape: tuple[int, ...] | None
) -> list[StoredTensor] | None:
    """Return the matrices of a stack, expert by expert and part by part.

    Args:
        tensor: dense: [experts, parts * outputs, inputs], or [experts, inputs, parts * outputs].
        parts: number of matrices of an expert.
        shape: outputs and inputs; None: the model needs none of these experts here.

    Returns:
        Matrices [outputs, inputs]; None: the tensor has no such parts.
    """
    count, rows, columns = tensor.shape
    size = itemsize(tensor.dtype)
    one_swapped = columns // parts, rows
    if columns % parts == 0 and one_swapped == shape != (rows // parts, columns):
        step, strides = columns // parts * size, (size, columns * size)
        one = replace(tensor, shape=one_swapped, strides=strides)
    elif rows % parts == 0:
        step = rows // parts * columns * size
        one = replace(tensor, shape=(rows // parts, columns))
    else:
        return None
    return [
        replace(one, begin=tensor.begin + expert * rows * columns * size + part * step)
        for expert in range(count)
        for part in range(parts)
    ]


def match_names(
    config: Path, stored: Mapping[str, StoredTensor], expected: Expected
) -> dict[str, str]:
    """Return the stored name of each expected tensor; compare names, shapes and types.

    Args:
        config: file in the model's folder that describes the model, for error messages.
        stored: the tensors of all files.
        expected: tensors that the model expects.

    Raises:
        ModelError: tensors are missing, unexpected, or of another shape or type.
    """

    def find(name: str) -> str | None:
        return next((n for n in expected.stored_names(name) if n in stored), None)

    sources = expected.sources
    names = {s.name: found for s in sources if (found := find(s.name)) is not None}
    missing = [s.name for s in sources if s.name not in names and not s.optional]
    if missing:
        raise ModelError(
            f"{config.parent} lacks {len(missing)} tensors of {expected.architecture}: "
            f"{shorten_names(missing)}. The download may be incomplete, or {config.name} belongs "
            "to another checkpoint."
        )
    used = set(names.values()) | {find(name) for name in expected.elsewhere}
    require_no_more(config, [name for name in stored if name not in used], expected)
    for source in sources:
        if source.name not in names:
            continue
        name = names[source.name]
        tensor = stored[name]
        shapes = source.shape, *source.other_shapes
        if not any(_fits(tensor.shape, shape) for shape in shapes):
            raise ModelError(
                f"{tensor.file}: {name} has shape {list(tensor.shape)}, but {config.name} "
                f"requires {' or '.join(str(list(shape)) for shape in shapes)}; correct "
                f"{config.name}, or download the model again."
            )
        require_dtype(config, name, tensor, source)
    return names


def _fits(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    same = len(found) == len(expected)
    return same and all(b in (a, -1) for a, b in zip(found, expected, strict=True))


def require_no_more(config: Path, unused: list[str], expected: Expected) -> None:
    """Check that all unused tensors are known tensors without weights; see `match_names`.

    Raises:
        ModelError: some unused tensors are unknown.
    """
    ignored = [re.compile(pattern) for pattern in expected.ignored]
    extra = [name for name in unused if not any(p.fullmatch(name) for p in ignored)]
    if extra:
        raise ModelError(
            f"{config.parent} holds {len(extra)} tensors that {expected.architecture} with this "
            f"{config.name} does not have: {shorten_names(extra)}. Correct {config.name}, or "
            "download the model again."
        )


def require_dtype(config: Path, name: str, stored: StoredTensor, source: Source) -> None:
    """Check the type of a stored tensor; see `match_names`.

    Raises:
        ModelError: the model does not support the type.
    """
    if stored.dtype not in source.dtypes:
        raise ModelError(
            f"{stored.file}: {name} has type {stored.dtype}; supported: "
            f"{', '.join(source.dtypes)}. Correct {config.name}, or download the model again."
        )
