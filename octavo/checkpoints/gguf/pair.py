"""Model of pictures in two GGUF files: the text part, and the tower (mmproj)."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from octavo.checkpoints.base import Expected, LoadFormat, Source
from octavo.checkpoints.config_json import ConfigJson
from octavo.checkpoints.gguf.file import GGUFFile, GGUFTensors
from octavo.checkpoints.gguf.folder import choose_mmproj
from octavo.checkpoints.gguf.vision import VisionFile, VisionTensors, tower_name
from octavo.errors import ModelError
from octavo.system.tensor import HostTensor

OFF = "off"
"""Value of the setting `mmproj` for the text part alone."""


def open_pair(path: Path, mmproj: str | None) -> GGUFFile | GGUFPair:
    """Return the checkpoint of a GGUF file, with its tower.

    Args:
        path: the file of the text part.
        mmproj: the tower's file; off: none; None: the one beside the text part, if there is any.

    Raises:
        ModelError: the file does not exist, or there are several.
    """
    text = GGUFFile(path)
    if mmproj == OFF:
        return text
    if mmproj is not None:
        file = Path(mmproj).expanduser()
        if not file.is_file():
            raise ModelError(f"mmproj={mmproj}: there is no such file; name a GGUF file.")
        return GGUFPair(text, VisionFile(file), required=True)
    try:
        names = [file.name for file in path.parent.glob("*.gguf") if file != path]
    except OSError:
        names = []
    try:
        beside = choose_mmproj(names)
    except ModelError as error:
        raise ModelError(f"{path.parent}: {error}") from None
    if beside is None:
        return text
    return GGUFPair(text, VisionFile(path.parent / beside), required=False)


class GGUFPair:
    """`Checkpoint` in two GGUF files.

    Args:
        text: the text part.
        vision: the tower.
        required: False if a tower that the text part cannot have is left out.
    """

    load_format: LoadFormat = "gguf"

    def __init__(self, text: GGUFFile, vision: VisionFile, *, required: bool) -> None:
        self.path, self.config_file = text.path, text.config_file
        self._text, self._vision, self._required = text, vision, required

    @cached_property
    def _left_out(self) -> str:
        """The reason why the model has no tower; empty: it has one."""
        if self._required:
            return ""
        return self._vision.misfit(self._text.config, str(self._text.kind))

    @property
    def weight_files(self) -> list[Path]:
        """Implement `Checkpoint`."""
        return [*self._text.weight_files, *([] if self._left_out else [self._vision.path])]

    @cached_property
    def config(self) -> ConfigJson:
        """Return the text part's config with the fields of the tower; see `Checkpoint`."""
        text, vision = self._text.config, self._vision
        if self._left_out:
            left_out = f"the tower in {vision.path.name}: {self._left_out}"
            return text.replaced("gguf_left_out", left_out)
        fields = text.fields | vision.describe(text, str(self._text.kind))
        if vision.has_sections:
            rope = {"rope_type": "default", "rope_theta": text.get("rope_theta")}
            rope |= text.fields.get("rope_parameters", {})
            fields["rope_parameters"] = rope | {"mrope_section": self._text.sections()}
        if types := vision.block_types:
            described: dict[str, Any] = fields.get("quantization_config", {"quant_method": "gguf"})
            types = described.get("types", {}) | types
            fields["quantization_config"] = described | {"types": types}
        return ConfigJson(fields, f"{text.where} with {vision.path}")

    @property
    def generation_config(self) -> ConfigJson | None:
        """Implement `Checkpoint`."""
        return self._text.generation_config

    @property
    def dtype(self) -> str:
        """Implement `Checkpoint`."""
        return self._text.dtype

    def read_text(self, name: str) -> str | None:
        """Return a text that is made from the metadata; see `Checkpoint`."""
        if name == "preprocessor_config.json" and not self._left_out:
            return self._vision.preprocessor
        if name == "processor_config.json" and not self._left_out:
            return self._vision.feature_extractor
        return self._text.read_text(name)

    def file_names(self, pattern: str) -> list[str]:
        """Implement `Checkpoint`."""
        return self._text.file_names(pattern)

    def open(self, expected: Expected) -> GGUFTensors | PairTensors:
        """Compare the tensors with `expected`; see `Checkpoint`."""
        tower = [source for source in expected.sources if tower_name(source.name)]
        others = [source for source in expected.sources if not tower_name(source.name)]
        text = self._text.open(replace(expected, sources=others))
        if not tower:
            return text
        return PairTensors(text, self._vision.open(tower, expected.architecture))


class PairTensors:
    """`Tensors` of a text part and a tower."""

    def __init__(self, text: GGUFTensors, vision: VisionTensors) -> None:
        self._text, self._vision = text, vision

    def read(self, source: Source) -> HostTensor:
        """Implement `Tensors`."""
        return (self._vision if tower_name(source.name) else self._text).read(source)

    def done(self, tensor: HostTensor) -> None:
        """Implement `Tensors`."""
        self._text.done(tensor)
        self._vision.done(tensor)
