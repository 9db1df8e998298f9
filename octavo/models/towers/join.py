"""Models of pictures and texts: a text part that reads the rows of a tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError
from octavo.layers.mrope import SECTIONS, MRopeArray
from octavo.layers.ranges import RangeArray
from octavo.layers.rope_spec import RopeSpec
from octavo.models.blocks.attention import AttentionSpec, SectionRope
from octavo.models.blocks.base import BlockSpec
from octavo.models.encoder import Sight
from octavo.models.spec import ModelSpec
from octavo.models.towers.registry import tower_name, with_encoders

_PLAIN: tuple[str, ...] = (
    "Gemma3",
    "Gemma4",
    "Gemma4Unified",
    "Idefics3",
    "InternVL",
    "InternVLChatModel",
    "Llava",
    "LlavaNext",
    "LlavaOnevision",
    "Mistral3",
    "PaliGemma",
    "SmolVLM",
)
"""Models whose text part reads rows as it reads embeddings."""
_SECTIONS: Mapping[str, tuple[int, ...] | None] = {
    "Qwen2VL": None,
    "Qwen2_5_VL": None,
    "Qwen3VL": (24, 20, 20),
    "Qwen3VLMoe": (24, 20, 20),
    "Qwen3_5": (11, 11, 10),
    "Qwen3_5Moe": (11, 11, 10),
}
"""Models whose rotary positions have sections -> the default sections (None: no default). Those
of Qwen3-VL and Qwen3.5 are interleaved."""


def with_pictures(spec: ModelSpec, config: ConfigJson) -> ModelSpec:
    """Return a model with its tower, if its text part can read the tower's rows.

    A checkpoint whose config describes no tower, such as one GGUF file, remains a text model.

    Args:
        spec: the text part.
        config: config.json, with the fields of text_config at the outside.

    Raises:
        ModelError: a field of the tower, or of the positions, has an unsupported value.
    """
    if config.has("gguf_left_out"):
        return replace(spec, left_out=str(config.get("gguf_left_out")))
    name = tower_name(spec, config)
    if not config.has("vision_config") or name not in (*_PLAIN, *_SECTIONS) or spec.sees_all:
        return spec
    try:
        joined = replace(with_encoders(spec, config), left_out="")
    except ModelError as error:
        raise ModelError(
            f"{error} The model can answer texts with language_model_only=True."
        ) from None
    (encoder,) = joined.encoders
    if encoder.sight is not None:
        joined = _with_ranges(joined, encoder.sight)
    if joined.embed.layer_inputs is not None:
        pad = config.integer("pad_token_id", default=0, least=0)
        joined = replace(joined, embed=replace(joined.embed, item_token=pad))
    if name not in _SECTIONS:
        return joined
    sections = _read_sections(config, _SECTIONS[name])
    return _with_sections(joined, config, sections, interleaved=name.startswith("Qwen3"))


def _read_sections(config: ConfigJson, default: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the numbers of pairs of a head for time, height and width."""
    where = next((n for n in ("rope_parameters", "rope_scaling") if config.has(n)), None)
    found = default if where is None else config.section(where).get("mrope_section") or default
    valid = isinstance(found, list | tuple) and len(found) == SECTIONS
    if not valid or any(type(n) is not int or n < 0 for n in found or ()):
        raise config.error(
            where or "rope_parameters", f"mrope_section must be a list of {SECTIONS} numbers"
        )
    assert found is not None
    return tuple(found)


def _with_ranges(spec: ModelSpec, sight: Sight) -> ModelSpec:
    """Return a model in which tokens of ranges see each other."""
    array = RangeArray(sight.widens)

    def changed(block: BlockSpec) -> BlockSpec:
        if not isinstance(block, AttentionSpec):
            return block
        sees = sight.layers == "all" or block.sliding_window is not None
        return replace(block, ranges=array) if sees else block

    return _with_blocks(spec, changed)


def _with_sections(
    spec: ModelSpec, config: ConfigJson, sections: tuple[int, ...], *, interleaved: bool
) -> ModelSpec:
    """Return a model with sections of its rotary positions."""

    def changed(block: BlockSpec) -> BlockSpec:
        if not isinstance(block, AttentionSpec) or not isinstance(block.positions, RopeSpec):
            return block
        rope = block.positions
        changes = rope.rope_type in ("dynamic", "longrope")
        if changes or sum(sections) != rope.rotary_dim // 2:
            raise config.error(
                "rope_parameters",
                f"mrope_section must have the sum {rope.rotary_dim // 2}, half of the rotated "
                "elements of a head, and rope_type must not be dynamic or longrope",
            )
        array = MRopeArray(rope, sections, interleaved)
        return replace(block, positions=SectionRope(rope.is_neox, array=array))

    return _with_blocks(spec, changed)


def _with_blocks(spec: ModelSpec, changed: Callable[[BlockSpec], BlockSpec]) -> ModelSpec:
    """Return a model with other blocks."""
    layers = {
        id(layer): layer.with_blocks([changed(block) for block in layer.blocks])
        for layer in spec.distinct_layers
    }
    return replace(spec, layers=tuple(layers[id(layer)] for layer in spec.layers))
