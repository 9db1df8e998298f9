"""Qwen3: norms over each head of queries and keys."""

from __future__ import annotations

from octavo.models.config_json import ConfigJson
from octavo.models.families.llama import LlamaLike, read_qwen_windows
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Qwen3."""
    bias = config.flag("attention_bias", False)
    windows = read_qwen_windows(config)
    return LlamaLike(windows=windows, qkv_bias=bias, o_bias=bias, qk_norm="head").read(config)


ARCHITECTURES = {"Qwen3ForCausalLM": read}
