"""Gemma 3: two kinds of rotary positions, norms over each head of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families.base import Heads, read_num_layers, read_windows, text_part
from octavo.models.families.gemma import sandwich_like
from octavo.models.families.llama import read_max_position
from octavo.models.positions import read_rope
from octavo.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    """Read Gemma 3, the text model."""
    # transformers reads this field but does not apply it for Gemma 3.
    config.refuse("attn_logit_softcapping", None, "Gemma 3 has no soft cap in its attention")
    pattern = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    layer_types = [
        "sliding_attention" if (i + 1) % pattern else "full_attention"
        for i in range(read_num_layers(config))
    ]
    window = config.integer("sliding_window", default=4096)
    if config.get("use_bidirectional_attention") is True:
        window = window // 2 + 1  # EmbeddingGemma: half of it to each side, and the token itself
    windows = read_windows(config, layer_types, window)
    head_size = Heads.read(config).head_size
    max_position = read_max_position(config)
    full = read_rope(
        config,
        head_size=head_size,
        max_position=max_position,
        layer_type="full_attention",
        theta=1e6,
    )
    local = read_rope(
        config,
        head_size=head_size,
        max_position=max_position,
        layer_type="sliding_attention",
        theta_field="rope_local_base_freq",
    )
    variant = replace(
        sandwich_like(config),
        windows=windows,
        ropes=tuple(full if w is None else local for w in windows),
        # max_position_embeddings is already the scaled length.
        max_model_len=max_position,
        qk_norm="head",
    )
    return variant.read(config)


ARCHITECTURES = {
    "Gemma3ForCausalLM": read,
    "Gemma3ForConditionalGeneration": text_part(read),
}
