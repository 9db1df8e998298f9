"""Mistral: sliding windows, on all layers or on those that layer_types names."""

from __future__ import annotations

from octavo.models.config_json import ConfigJson
from octavo.models.families.base import read_num_layers, read_windows
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Mistral."""
    window = config.optional_integer("sliding_window", least=1)
    kind = "full_attention" if window is None else "sliding_attention"
    layer_types = [kind] * read_num_layers(config)
    return LlamaLike(windows=read_windows(config, layer_types, window)).read(config)


ARCHITECTURES = {"MistralForCausalLM": read}
