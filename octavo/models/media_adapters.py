"""Adapters of media that some models have in folders of their own beside their weights."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.messages import Modality

_PHI4: Mapping[Modality, str] = {"image": "vision-lora", "audio": "speech-lora"}
MEDIA_ADAPTERS: Mapping[str, Mapping[Modality, str]] = {
    "Phi4MMForCausalLM": _PHI4,
    "Phi4MultimodalForCausalLM": _PHI4,
}
"""Architectures -> folders in that of the model with the adapters of its media, by modality. A
prompt with several kinds of media has the first adapter."""
