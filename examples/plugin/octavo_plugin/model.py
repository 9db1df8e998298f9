"""An architecture: Llama with its logits capped, as Gemma 2 has them."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config_json import ConfigJson
from octavo.models.families import llama
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """What a folder with this architecture holds."""
    spec = llama.read(config)
    return replace(spec, head=replace(spec.head, soft_cap=config.number("logits_cap", default=30)))
