"""Qwen1.5 and Qwen2: biases on queries, keys and values."""

from __future__ import annotations

from octavo.models.config_json import ConfigJson
from octavo.models.families.llama import LlamaLike, read_qwen_windows
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Qwen1.5 or Qwen2."""
    return LlamaLike(windows=read_qwen_windows(config), qkv_bias=True).read(config)


ARCHITECTURES = {"Qwen2ForCausalLM": read}
