"""Ministral 3, and Mistral's models with pictures: queries grow beyond the original context."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.attention import QueryScale
from octavo.models.config_defaults import DEFAULTS
from octavo.models.families import mistral
from octavo.models.families.base import read_num_layers, read_windows, text_part
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Ministral 3."""
    window = config.optional_integer("sliding_window", least=1)
    kind = "full_attention" if window is None else "sliding_attention"
    rope = config.section("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    scale = None
    if rope.has("llama_4_scaling_beta"):
        length = rope.integer("original_max_position_embeddings")
        scale = QueryScale(rope.number("llama_4_scaling_beta"), length)
    windows = read_windows(config, [kind] * read_num_layers(config), window)
    return LlamaLike(windows=windows, query_scale=scale).read(config)


def read_mistral3(config: ConfigJson) -> ModelSpec:
    """Read Mistral Small 3.1 and later, and Ministral 3, with pictures."""
    text = config.section("text_config")
    # Published checkpoints have an LM head of their own where only the whole model is said to be
    # tied, as transformers assumes.
    config = config.replaced("tie_word_embeddings", text.flag("tie_word_embeddings", False))
    kinds = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}
    architecture = text.choice("model_type", kinds, "mistral")
    reader = read if architecture == "Ministral3ForCausalLM" else mistral.read
    return reader(config.filled(DEFAULTS[architecture]))


ARCHITECTURES = {
    "Ministral3ForCausalLM": read,
    "Mistral3ForConditionalGeneration": text_part(read_mistral3),
}
