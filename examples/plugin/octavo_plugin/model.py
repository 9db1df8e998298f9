"""Custom architecture: Llama with its logits capped, as in Gemma 2."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config_json import ConfigJson
from octavo.models.families import llama
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read the config.json of this architecture."""
    spec = llama.read(config)
    return replace(spec, head=replace(spec.head, soft_cap=config.number("logits_cap", default=30)))
