"""Projections of Gemma 4 12B (Gemma 4 Unified), which has no towers.

Source: `Gemma4UnifiedVisionEmbedder` and `Gemma4UnifiedMultimodalEmbedder` of transformers. A patch
of a picture has one row, and so have the samples of 40 ms of a sound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.encoder_input import (
    Arrays,
    EncoderItem,
    PatchInputSpec,
    VectorInputSpec,
)
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import LayerNormSpec, RMSNormSpec
from octavo.models.blocks.projector import ProjectorSpec
from octavo.models.encoder import EncoderSpec
from octavo.models.towers.gemma4 import MOST_ROWS, check_places, places_of, read_sight
from octavo.models.towers.gemma4_audio import MAX_TOKENS
from octavo.models.towers.pixels import Floats
from octavo.models.towers.vit import read_vision

_VISION: dict[str, Any] = {"patch_size": 16, "pooling_kernel_size": 3, "mm_embed_dim": 3840}
_VISION |= {"mm_posemb_size": 1120, "rms_norm_eps": 1e-6}
_AUDIO: dict[str, Any] = {"audio_embed_dim": 640, "rms_norm_eps": 1e-6}
_PREFIX = "vision_embedder."
_PREFIXES = (
    (_PREFIX, f"model.{_PREFIX}"),
    ("embed_vision.", "model.embed_vision."),
    ("embed_audio.", "model.embed_audio."),
    # The names of transformers' modules.
    (_PREFIX, "model.embed_vision."),
    ("embed_vision.", "model.embed_vision.multimodal_embedder."),
)
_EPS = 1e-5
"""Term of the layer norms."""


@dataclass(frozen=True)
class PlacedLayout:
    """Patches of a picture row by row, each of which is a row of the result.

    The item's arrays are those of `PositionedLayout`.
    """

    numbers: int
    """Numbers of a patch."""
    num_positions: int
    """Number of learned positions of an axis; the table has those of an index one after the
    other, first that of the column."""

    def sizes(self, data: Arrays) -> tuple[int, int]:
        """Implement `PatchLayout`."""
        tokens = check_places(data, self.numbers, self.num_positions)
        return tokens, tokens

    def read(self, data: Arrays) -> EncoderItem:
        """Implement `PatchLayout`."""
        patches = data["pixel_values"].astype(np.float32, copy=False)
        return self._item(patches, data["image_position_ids"])

    def largest(self, num_tokens: int) -> EncoderItem:
        """Implement `PatchLayout`."""
        patches = np.zeros((num_tokens, self.numbers), np.float32)
        return self._item(patches, places_of(1, num_tokens) % self.num_positions)

    def _item(self, patches: Floats, places: NDArray[np.int64]) -> EncoderItem:
        count = len(patches)
        return EncoderItem(
            count,
            (np.array([count]),),
            numbers={"patches": patches},
            arrays={"places": (2 * places + np.array([0, 1])).astype(np.int32)},
        )


def _projector(module: str, inputs: int, outputs: int, eps: float) -> ProjectorSpec:
    linear = LinearSpec(((f"{module}.embedding_projection", outputs),), inputs)
    return ProjectorSpec(((linear, None),), norm=RMSNormSpec(None, inputs, eps))


def read_gemma4_unified(config: ConfigJson) -> EncoderSpec:
    """Read the projection of pictures and of frames of videos.

    Raises:
        ModelError: a field has an unsupported value.
    """
    vision = read_vision(config, _VISION)
    side = vision.integer("patch_size") * vision.integer("pooling_kernel_size")
    vision.refuse("model_patch_size", side, "it must be patch_size * pooling_kernel_size")
    size, positions = vision.integer("mm_embed_dim"), vision.integer("mm_posemb_size")
    numbers = 3 * side**2
    return EncoderSpec(
        "image",
        PatchInputSpec(
            LinearSpec(((f"{_PREFIX}patch_dense", size),), numbers, bias=True),
            PlacedLayout(numbers, positions),
            size,
            ((f"{_PREFIX}pos_embedding", (positions, 2, size)),),
            LayerNormSpec(f"{_PREFIX}pos_norm", size, _EPS),
            LayerNormSpec(f"{_PREFIX}patch_ln1", numbers, _EPS),
            LayerNormSpec(f"{_PREFIX}patch_ln2", size, _EPS),
        ),
        (),
        "",
        size,
        None,
        _projector(
            "embed_vision", size, config.integer("hidden_size"), vision.number("rms_norm_eps")
        ),
        max_num_tokens=MOST_ROWS,
        prefixes=_PREFIXES,
        modalities=("video",),
        sight=read_sight(config),
    )


def read_gemma4_unified_audio(config: ConfigJson) -> EncoderSpec:
    """Read the projection of sounds.

    Raises:
        ModelError: a field has an unsupported value.
    """
    audio = config.section("audio_config").filled(_AUDIO)
    size = audio.integer("audio_embed_dim")
    return EncoderSpec(
        "audio",
        VectorInputSpec(size),
        (),
        "",
        size,
        None,
        _projector(
            "embed_audio", size, config.integer("hidden_size"), audio.number("rms_norm_eps")
        ),
        max_num_tokens=MAX_TOKENS,
        prefixes=_PREFIXES,
    )
