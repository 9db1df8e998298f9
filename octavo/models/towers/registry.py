"""Towers of the architectures that read pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.encoder import EncoderSpec
from octavo.models.spec import ModelSpec
from octavo.models.towers import gemma4, gemma4_unified, internvl, pixtral, qwen_vl, siglip


def _read_llava(config: ConfigJson) -> EncoderSpec:
    """Read the tower of a model in LLaVA's form: Pixtral's, CLIP's or SigLIP's."""
    is_pixtral = config.section("vision_config").get("model_type") == "pixtral"
    return pixtral.read_pixtral(config) if is_pixtral else siglip.read_llava(config)


TOWERS: dict[str, Callable[[ConfigJson], EncoderSpec]] = {
    "Gemma3": siglip.read_gemma3,
    "Gemma4": gemma4.read_gemma4,
    "Gemma4Unified": gemma4_unified.read_gemma4_unified,
    "Idefics3": siglip.read_idefics3,
    "InternVL": internvl.read_internvl,
    "InternVLChatModel": internvl.read_internvl_chat,
    "Llava": _read_llava,
    "LlavaNext": siglip.read_llava_next,
    "LlavaOnevision": siglip.read_llava_onevision,
    "Mistral3": pixtral.read_mistral3,
    "PaliGemma": siglip.read_paligemma,
    "Qwen2VL": qwen_vl.read_qwen2,
    "Qwen2_5_VL": qwen_vl.read_qwen2_5,
    "Qwen3VL": qwen_vl.read_qwen3,
    "Qwen3VLMoe": qwen_vl.read_qwen3,
    "Qwen3_5": qwen_vl.read_qwen3_5,
    "Qwen3_5Moe": qwen_vl.read_qwen3_5,
    "SmolVLM": siglip.read_idefics3,
}
"""Architectures, without ForConditionalGeneration -> readers of their towers. They read config.json
with the fields of text_config at the outside, as families do."""


def tower_name(spec: ModelSpec, config: ConfigJson) -> str:
    """Return the architecture whose tower a model has.

    The text part of a model in two GGUF files has an architecture of its own.
    """
    of_file = config.get("gguf_tower")
    return str(of_file or spec.architecture.removesuffix("ForConditionalGeneration"))


def with_encoders(spec: ModelSpec, config: ConfigJson) -> ModelSpec:
    """Return a model for pictures and texts with its tower, if that is supported.

    Args:
        spec: the text part.
        config: config.json, with the fields of text_config at the outside.

    Raises:
        ModelError: a field of vision_config has an unsupported value.
    """
    read = TOWERS.get(tower_name(spec, config))
    return spec if read is None else replace(spec, encoders=(read(config),))
