"""Ministral 3, Mistral Small 4, and Mistral's models that read pictures, too.

At positions beyond the original context, queries have a factor that grows with the position.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.attention import QueryScale
from octavo.models.config_defaults import DEFAULTS
from octavo.models.families import mistral
from octavo.models.families.base import Family, read_num_layers, read_windows, text_part
from octavo.models.families.deepseek import read_latent
from octavo.models.families.experts import GROUPED, read_grouped_experts
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Ministral 3."""
    window = config.optional_integer("sliding_window", least=1)
    kind = "full_attention" if window is None else "sliding_attention"
    windows = read_windows(config, [kind] * read_num_layers(config), window)
    return LlamaLike(windows=windows, query_scale=_read_query_scale(config)).read(config)


def _read_query_scale(config: ConfigJson) -> QueryScale | None:
    rope = config.section("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    if not rope.has("llama_4_scaling_beta"):
        return None
    length = rope.integer("original_max_position_embeddings")
    return QueryScale(rope.number("llama_4_scaling_beta"), length)


def read_mistral4(config: ConfigJson) -> ModelSpec:
    """Read Mistral Small 4: latent attention, and experts."""
    # partial_rotary_factor repeats what qk_rope_head_dim says: which part of a head is rotated.
    rope = config.section("rope_parameters").fields
    rope.pop("partial_rotary_factor", None)
    config = config.replaced("rope_parameters", rope)
    block = read_grouped_experts(config, replace(GROUPED, choice_bias=None), score="softmax")
    is_neox = not config.flag("rope_interleave", True)
    return read_latent(config, block, is_neox=is_neox, query_scale=_read_query_scale(config))


def read_mistral3(config: ConfigJson) -> ModelSpec:
    """Read Mistral Small 3.1 and later, and Ministral 3, which also read pictures."""
    text = config.section("text_config")
    # Only text_config decides. The outer config is tied by transformers' default, but published
    # checkpoints have an LM head of their own.
    config = config.replaced("tie_word_embeddings", text.flag("tie_word_embeddings", False))
    kinds = {DEFAULTS[name]["model_type"]: name for name in _TEXT_PARTS}
    architecture = text.choice("model_type", kinds, "mistral")
    return _TEXT_PARTS[architecture](config.filled(DEFAULTS[architecture]))


_TEXT_PARTS: dict[str, Family] = {
    "MistralForCausalLM": mistral.read,
    "Ministral3ForCausalLM": read,
    "Mistral4ForCausalLM": read_mistral4,
}
ARCHITECTURES = {
    "Ministral3ForCausalLM": read,
    "Mistral4ForCausalLM": read_mistral4,
    "Mistral3ForConditionalGeneration": text_part(read_mistral3),
}
