"""Whisper: an encoder of sound and a decoder that writes what is said."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.embedding import EmbedSpec, PositionsSpec
from octavo.models.blocks.frames import FramesInputSpec
from octavo.models.blocks.head import HeadSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.encoder import EncoderSpec
from octavo.models.families import base
from octavo.models.families.bart import BartLike
from octavo.models.spec import ModelSpec

_LIKE = BartLike(pre_norm=True, embed_norm=False, key_bias=False)


def _read(config: ConfigJson) -> ModelSpec:
    """Read Whisper (Radford et al., arXiv:2212.04356)."""
    config.refuse("is_encoder_decoder", True, "only encoder-decoders are supported")
    config.refuse("scale_embedding", False, "the embedding has no scale")
    config.refuse("activation_function", "gelu", "only gelu is supported")
    hidden, frame = config.integer("d_model"), config.integer("num_mel_bins")
    length = config.integer("max_target_positions")
    positions = config.integer("max_source_positions")
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
        layers=_LIKE.layers(config, "decoder"),
        head=HeadSpec(
            _LIKE.final_norm(config, "decoder"),
            base.read_lm_head(config, embed, tied=True, module="proj_out"),
        ),
        head_module="proj_out",
        max_model_len=length,
        layer_names="model.decoder.layers.{}.",
        bare_prefix="model.",
    )

    def conv(name: str, inputs: int) -> LinearSpec:
        module = f"model.encoder.{name}"
        return LinearSpec(((module, hidden),), 3 * inputs, bias=True, layout="taps", groups=3)

    encoder = EncoderSpec(
        modality="audio",
        inputs=FramesInputSpec(
            conv("conv1", frame),
            conv("conv2", hidden),
            frame,
            hidden,
            "model.encoder.embed_positions.weight",
            positions,
        ),
        layers=tuple(_LIKE.layers(config, "encoder")),
        layer_names="model.encoder.layers.{}.",
        hidden_size=hidden,
        norm=_LIKE.final_norm(config, "encoder"),
        output=None,
        max_num_tokens=positions,
    )
    return replace(spec, encoders=(encoder,))


ARCHITECTURES = {"WhisperForConditionalGeneration": _read}
