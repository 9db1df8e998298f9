"""Whisper: an encoder of sound and a decoder that writes what is said."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.embedding import EmbedSpec, PositionsSpec
from octavo.models.blocks.head import HeadSpec
from octavo.models.families import base
from octavo.models.spec import ModelSpec
from octavo.models.towers.whisper import LIKE, read_encoder


def _read(config: ConfigJson) -> ModelSpec:
    """Read Whisper (Radford et al., arXiv:2212.04356)."""
    config.refuse("is_encoder_decoder", True, "only encoder-decoders are supported")
    hidden, length = config.integer("d_model"), config.integer("max_target_positions")
    embed = EmbedSpec(
        "model.decoder.embed_tokens",
        config.integer("vocab_size"),
        hidden,
        hidden,
        positions=PositionsSpec("model.decoder.embed_positions", length),
    )
    spec = base.model_spec(
        config,
        embed=embed,
        layers=LIKE.layers(config, "decoder"),
        head=HeadSpec(
            LIKE.final_norm(config, "decoder"),
            base.read_lm_head(config, embed, tied=True, module="proj_out"),
        ),
        head_module="proj_out",
        max_model_len=length,
        layer_names="model.decoder.layers.{}.",
        bare_prefix="model.",
    )

    return replace(spec, encoders=(read_encoder(config, "model.encoder."),))


ARCHITECTURES = {"WhisperForConditionalGeneration": _read}
