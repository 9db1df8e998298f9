"""Phi-3, Phi-4 and the text part of Phi-4 multimodal: fused projections, longrope."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import read_num_layers
from octavo.models.families.llama import LlamaLike, read_llama_rope
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Phi-3 or Phi-4."""
    num_layers = read_num_layers(config)
    rope = read_llama_rope(
        config,
        aliases={"su": "longrope", "yarn": "longrope"},
        default_original=4096,
        partial=1.0,
    )
    variant = LlamaLike(
        qkv_modules=("self_attn.qkv_proj",),
        gate_up_modules=("mlp.gate_up_proj",),
        windows=(config.optional_integer("sliding_window", least=1),) * num_layers,
        ropes=(rope,) * num_layers,
    )
    return variant.read(config)


def read_multimodal(config: ConfigJson) -> ModelSpec:
    """Read the text part of Phi-4 multimodal."""
    spec = read(config)
    ignored = *spec.ignored, r"model\.embed_tokens_extend\..*", r".*\.lora_[AB]\..*"
    return replace(spec, ignored=ignored, left_out="pictures and sound")


ARCHITECTURES = {
    "Phi3ForCausalLM": read,
    "Phi4MMForCausalLM": read_multimodal,
    "Phi4MultimodalForCausalLM": read_multimodal,
}
