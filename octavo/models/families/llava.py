"""LLaVA without pictures: a Llama, Mistral or Qwen2."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.config_defaults import DEFAULTS
from octavo.models.families import llama, mistral, qwen2
from octavo.models.families.base import text_part
from octavo.models.spec import ModelSpec

_READERS = {**llama.ARCHITECTURES, **mistral.ARCHITECTURES, **qwen2.ARCHITECTURES}
_KINDS = {DEFAULTS[name]["model_type"]: name for name in _READERS}


def read(config: ConfigJson) -> ModelSpec:
    """Read the text part of LLaVA."""
    architecture = config.section("text_config").choice("model_type", _KINDS, "llama")
    return _READERS[architecture](config.filled(DEFAULTS[architecture]))


ARCHITECTURES = {"LlavaForConditionalGeneration": text_part(read)}
