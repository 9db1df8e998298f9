from types import SimpleNamespace

import pytest

from octavo.config import ModelConfig
from octavo.server.abilities import input_modalities


def spec_of(architecture, *kinds, encoder_decoder=False):
    return SimpleNamespace(
        architecture=architecture,
        is_encoder_decoder=encoder_decoder,
        encoder_modality=kinds[0] if kinds else None,
        encoder=lambda kind: kind if kind in kinds else None,
    )


@pytest.mark.parametrize(
    ("spec", "settings", "expected"),
    [
        (spec_of("LlamaForCausalLM"), {}, ["text"]),
        (spec_of("Qwen3VL", "image", "video"), {}, ["text", "image", "video"]),
        (spec_of("Qwen3VL", "image", "video"), {"video": 0}, ["text", "image"]),
        (spec_of("VoxtralForConditionalGeneration", "audio"), {}, ["text", "audio"]),
        (spec_of("Whisper", "audio", encoder_decoder=True), {}, ["audio"]),
        (spec_of("T5", "text", encoder_decoder=True), {}, ["text"]),
    ],
)
def test_input_modalities(spec, settings, expected):
    config = ModelConfig(model="m", limit_mm_per_prompt=settings)
    assert input_modalities(spec, config) == expected
