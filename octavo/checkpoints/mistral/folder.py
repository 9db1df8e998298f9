"""Model folder with weights in Mistral's own form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Expected, Source, shorten_names
from octavo.checkpoints.config_json import ConfigJson
from octavo.checkpoints.folder import list_files, match_names
from octavo.checkpoints.mapped_file import MappedTensors, StoredTensor
from octavo.checkpoints.mistral.files import WEIGHTS
from octavo.checkpoints.mistral.names import rename
from octavo.checkpoints.model_files import without_weights
from octavo.checkpoints.safetensors_folder import SafetensorsFolder
from octavo.errors import ModelError
from octavo.system.tensor import HostTensor, from_numpy

_POSITIONS = "audio_tower.embed_positions.weight"
"""Tensor that only Hugging Face's form stores: the sinusoids of Whisper."""


class MistralFolder(SafetensorsFolder):
    """`Checkpoint` in params.json and consolidated*.safetensors.

    Tensors have the names of Hugging Face's form, and queries and keys its order of rows: a head
    has the first numbers of all rotated pairs before the second ones.
    """

    index = "consolidated.safetensors.index.json"
    pattern = WEIGHTS

    @property
    def weight_files(self) -> list[Path]:
        """Implement `Checkpoint`."""
        return list_files(self.path, self.index, self.pattern, left_out=())

    def read_header(self, file: Path) -> dict[str, StoredTensor]:
        """Return the tensors of a file by their names in Hugging Face's form.

        Raises:
            ModelError: the file is damaged, or its tensors do not suit params.json.
        """
        heads = _read_heads(self.config)
        found: dict[str, StoredTensor] = {}
        for name, stored in super().read_header(file).items():
            renamed = rename(name)
            if renamed is None:
                continue
            if renamed.name in found:
                raise ModelError(f"{file} has two tensors for {renamed.name}; download it again.")
            count = heads.get(renamed.heads, 0)
            if count and stored.shape and stored.shape[0] > 1:
                if stored.shape[0] % (2 * count):
                    raise ModelError(
                        f"{file}: {name} has shape {list(stored.shape)}, which {count} heads do "
                        "not divide; correct params.json, or download the model again."
                    )
                stored = replace(stored, paired_heads=count)
            found[renamed.name] = stored
        return found

    def open(self, expected: Expected) -> MistralTensors:
        """Map the files; see `Checkpoint`."""
        files = self.weight_files
        if not files:
            raise without_weights(self.path, self.pattern)
        stored: dict[str, StoredTensor] = {}
        for file in files:
            found = self.read_header(file)
            if twice := sorted(stored.keys() & found.keys()):
                raise ModelError(
                    f"{file} has tensors that an earlier file has, too: {shorten_names(twice)}. "
                    "Download the model again."
                )
            stored |= found
        made = {
            source.name: StoredTensor(files[0], source.shape, "float32")
            for source in expected.sources
            if source.name == _POSITIONS
            and not any(name in stored for name in expected.stored_names(source.name))
        }
        names = match_names(self.config_file, stored | made, expected)
        tables = {name: from_numpy(_sinusoids(*it.shape)) for name, it in made.items()}
        return MistralTensors(stored, names, tables)


class MistralTensors(MappedTensors):
    """`Tensors` of mapped files, and of tensors that this form leaves out.

    Args:
        stored: all tensors of the files.
        names: the stored name of each expected tensor.
        made: tensors that the files do not have, by their expected names.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        names: Mapping[str, str],
        made: Mapping[str, HostTensor],
    ) -> None:
        super().__init__(stored, names)
        self._made = made

    def read(self, source: Source) -> HostTensor:
        """Return a view of the mapped file, a copy in another order, or a tensor that is made."""
        made = self._made.get(source.name)
        return super().read(source) if made is None else made


def _read_heads(config: ConfigJson) -> dict[str, int]:
    """Return the numbers of heads of each kind of `Renamed.heads`."""
    text = config.section("text_config") if config.has("text_config") else config
    vision = config.section("vision_config")
    return {
        "queries": text.integer("num_attention_heads"),
        "keys": text.integer("num_key_value_heads"),
        "picture heads": vision.integer("num_attention_heads", default=1),
    }


def _sinusoids(length: int, size: int) -> NDArray[np.float32]:
    """Return Whisper's vectors of positions, float32 [length, size]: sines, then cosines.

    Angles are rounded as in OpenAI's whisper (`model.py`, sinusoids).
    """
    step = np.float32(math.log(10000) / (size // 2 - 1))
    exponents = -step * np.arange(size // 2, dtype=np.float32)
    rates = np.exp(exponents.astype(np.float64)).astype(np.float32)
    angles = np.arange(length, dtype=np.float32)[:, None] * rates
    wide = angles.astype(np.float64)
    return np.concatenate([np.sin(wide), np.cos(wide)], axis=1).astype(np.float32)
