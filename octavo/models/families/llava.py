"""Models that read pictures or sound, and whose text part is a model of another family.

Only the text part is run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import ModuleType

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.config_defaults import DEFAULTS
from octavo.models.families import (
    cohere,
    exaone4,
    gemma,
    gemma2,
    granite,
    internlm2,
    internlm3,
    llama,
    mistral,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)
from octavo.models.families.base import Family, text_part
from octavo.models.spec import ModelSpec

_FAMILIES: tuple[ModuleType, ...] = (llama, mistral, qwen2, qwen3, cohere, gemma, gemma2, granite)
_FAMILIES += (exaone4, internlm2, internlm3, phi3, smollm3)
_READERS: dict[str, Family] = {
    name: read for family in _FAMILIES for name, read in family.ARCHITECTURES.items()
}
_KINDS = {DEFAULTS[name]["model_type"]: name for name in _READERS}

_MODELS = {"AyaVision": "cohere2", "Cohere2Vision": "cohere2", "GotOcr2": "qwen2"}
_MODELS |= {"Idefics2": "mistral", "Idefics3": "llama", "InternVL": "qwen2"}
_MODELS |= {"LightOnOcr": "qwen3", "Llava": "llama", "LlavaNext": "llama"}
_MODELS |= {"LlavaOnevision": "qwen2", "Qwen2Audio": "qwen2", "Qwen3ASR": "qwen3"}
_MODELS |= {"DeepseekVL": "llama", "Exaone4_5_": "exaone4", "GraniteSpeech": "granite"}
_MODELS |= {"LlavaNextVideo": "llama", "Ovis2": "qwen2"}
_MODELS |= {"VideoLlama3": "qwen2", "VideoLlava": "llama"}
_MODELS |= {"PaliGemma": "gemma", "SmolVLM": "llama"}
_MODELS |= {"VipLlava": "llama", "Voxtral": "llama"}
"""Models -> model_type of the text part if its config names none."""


def read(config: ConfigJson, default: str | None, section: str = "text_config") -> ModelSpec:
    """Read the text part by the model_type of its section."""
    architecture = config.section(section).choice("model_type", _KINDS, default)
    return _READERS[architecture](config.filled(DEFAULTS[architecture]))


def read_internvl_chat(config: ConfigJson) -> ModelSpec:
    """Read the text part of InternVL in its first form, with custom code."""
    tied = config.section("llm_config").get("tie_word_embeddings")
    return read(config.replaced("tie_word_embeddings", tied), None, "llm_config")


def read_onevision(config: ConfigJson) -> ModelSpec:
    """Read the text part of LLaVA-OneVision, whose text_config may tie the LM head, too."""
    if config.section("text_config").flag("tie_word_embeddings", False):
        config = config.replaced("tie_word_embeddings", True)
    return read(config, _MODELS["LlavaOnevision"])


def read_paligemma(config: ConfigJson) -> ModelSpec:
    """Read the text part of PaliGemma 1 or 2, with causal attention in prompts."""
    spec = text_part(partial(read, default=_MODELS["PaliGemma"]))(config)
    return replace(spec, left_out="pictures and the attention of a prompt to its later tokens")


ARCHITECTURES = {
    f"{name}ForConditionalGeneration": text_part(partial(read, default=default))
    for name, default in _MODELS.items()
}
ARCHITECTURES |= {
    "InternVLChatModel": text_part(read_internvl_chat),
    "LlavaOnevisionForConditionalGeneration": text_part(read_onevision),
    "PaliGemmaForConditionalGeneration": read_paligemma,
}
