"""Towers of the architectures that read pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.encoder import EncoderSpec
from octavo.models.spec import ModelSpec
from octavo.models.towers import siglip

TOWERS: dict[str, Callable[[ConfigJson], EncoderSpec]] = {
    "Idefics3ForConditionalGeneration": siglip.read_idefics3,
    "SmolVLMForConditionalGeneration": siglip.read_idefics3,
}
"""Architectures -> readers of their towers. They read config.json with the fields of text_config at
the outside, as families do."""


def with_encoders(spec: ModelSpec, config: ConfigJson) -> ModelSpec:
    """Return a model for pictures and texts with its tower, if that is supported.

    Args:
        spec: the text part.
        config: config.json, with the fields of text_config at the outside.

    Raises:
        ModelError: a field of vision_config has an unsupported value.
    """
    read = TOWERS.get(spec.architecture)
    return spec if read is None else replace(spec, encoders=(read(config),))
