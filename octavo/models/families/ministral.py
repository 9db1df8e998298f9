"""Ministral: Mistral, with sliding windows on the layers that layer_types names."""

from __future__ import annotations

from octavo.models.families import mistral

ARCHITECTURES = {"MinistralForCausalLM": mistral.read}
