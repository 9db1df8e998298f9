"""Whisper's encoder of sound (Radford et al., arXiv:2212.04356), alone and in front of decoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError
from octavo.models.blocks.frames import FramesInputSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.blocks.projector import ProjectorActivation, ProjectorSpec
from octavo.models.blocks.spectrogram import CHUNK, SpectrogramInputSpec, halved, num_tokens
from octavo.models.encoder import EncoderSpec
from octavo.models.families.bart import BartLike
from octavo.models.spec import ModelSpec
from octavo.models.towers.gemma4_audio import read_gemma4_audio
from octavo.models.towers.gemma4_unified import read_gemma4_unified_audio

LIKE = BartLike(pre_norm=True, embed_norm=False, key_bias=False)
"""Layers of Whisper."""
_PREFIXES = (
    ("audio_tower.", "model.audio_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
_EPS = 1e-5
_ACTIVATIONS: dict[str, ProjectorActivation] = {"gelu": "gelu", "silu": "silu", "relu": "relu"}
_ENCODER: dict[str, Any] = {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20}
_ENCODER |= {"encoder_ffn_dim": 5120, "num_mel_bins": 128, "max_source_positions": 1500}
_ENCODER |= {"activation_function": "gelu"}
_QWEN3: dict[str, Any] = {"d_model": 1024, "encoder_layers": 24, "encoder_attention_heads": 16}
_QWEN3 |= {"encoder_ffn_dim": 4096, "num_mel_bins": 128, "output_dim": 3584}
_QWEN3 |= {"downsample_hidden_size": 480, "activation_function": "gelu"}
MAX_SECONDS = 120
"""Longest sound of Qwen3-ASR, which bounds the memory of its encoder."""
_OTHER_NAMES = {
    "d_model": "hidden_size",
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
}
"""Names of Voxtral's fields."""


def read_encoder(config: ConfigJson, prefix: str) -> EncoderSpec:
    """Read an encoder of whole windows, whose tokens are its rows.

    Args:
        config: its fields, with Whisper's names.
        prefix: begin of the names of its weights.
    """
    config.refuse("scale_embedding", False, "the embedding has no scale")
    config.refuse("activation_function", "gelu", "only gelu is supported")
    hidden, frame = config.integer("d_model"), config.integer("num_mel_bins")
    positions = config.integer("max_source_positions")

    def conv(name: str, inputs: int) -> LinearSpec:
        module = f"{prefix}{name}"
        return LinearSpec(((module, hidden),), 3 * inputs, bias=True, layout="taps", groups=3)

    return EncoderSpec(
        modality="audio",
        inputs=FramesInputSpec(
            conv("conv1", frame),
            conv("conv2", hidden),
            frame,
            hidden,
            f"{prefix}embed_positions.weight",
            positions,
        ),
        layers=tuple(LIKE.layers(config, "encoder")),
        layer_names=f"{prefix}layers.{{}}.",
        hidden_size=hidden,
        norm=LayerNormSpec(f"{prefix}layer_norm", hidden, _EPS),
        output=None,
        max_num_tokens=positions,
    )


def _read_qwen2_audio(config: ConfigJson) -> EncoderSpec:
    """Read the tower of Qwen2-Audio (arXiv:2407.10759): means of two tokens, and a projection."""
    audio = config.section("audio_config").filled(_ENCODER)
    encoder = read_encoder(audio, "audio_tower.")
    linear = LinearSpec(
        (("multi_modal_projector.linear", config.integer("hidden_size")),),
        encoder.hidden_size,
        bias=True,
    )
    assert isinstance(encoder.inputs, FramesInputSpec)
    return replace(
        encoder,
        inputs=replace(encoder.inputs, whole=False, averages=2),
        norm=None,
        output=ProjectorSpec(((linear, None),), norm=encoder.norm, averages=2),
        prefixes=_PREFIXES,
    )


def _read_voxtral(config: ConfigJson) -> EncoderSpec:
    """Read the tower of Voxtral (arXiv:2507.13264): groups of tokens, and two layers."""
    section = config.section("audio_config")
    for name, other in _OTHER_NAMES.items():
        if not section.has(name) and section.has(other):
            section = section.replaced(name, section.get(other))
    audio = section.filled(_ENCODER)
    encoder = read_encoder(audio, "audio_tower.")
    inputs, size = audio.integer("encoder_ffn_dim"), config.integer("hidden_size")
    group = inputs // encoder.hidden_size
    if not group or inputs % encoder.hidden_size or encoder.max_num_tokens % group:
        raise section.error(
            "intermediate_size",
            f"it must be a multiple of {encoder.hidden_size}, and the number of tokens of a row "
            f"must divide {encoder.max_num_tokens}",
        )
    first, second = (
        LinearSpec(((f"multi_modal_projector.linear_{i}", size),), width)
        for i, width in ((1, inputs), (2, size))
    )
    activation = config.choice("projector_hidden_act", _ACTIVATIONS, "gelu")
    assert isinstance(encoder.inputs, FramesInputSpec)
    return replace(
        encoder,
        inputs=replace(encoder.inputs, group=group),
        output=ProjectorSpec(((first, activation), (second, None)), group=group),
        prefixes=_PREFIXES,
    )


def _read_qwen3_asr(config: ConfigJson) -> EncoderSpec:
    """Read the tower of Qwen3-ASR, with its projector of two layers."""
    audio = config.section("audio_config").filled(_QWEN3)
    audio.refuse("scale_embedding", False, "the embedding has no scale")
    audio.refuse("activation_function", "gelu", "only gelu is supported")
    audio.refuse("n_window", CHUNK // 2, f"only chunks of {CHUNK} frames are supported")
    hidden, channels = audio.integer("d_model"), audio.integer("downsample_hidden_size")
    bands, infer = audio.integer("num_mel_bins"), audio.integer("n_window_infer", default=800)
    size, prefix = audio.integer("output_dim"), "audio_tower."
    if size != config.integer("hidden_size"):
        raise audio.error("output_dim", "it must be the hidden size of the text part")
    if infer % CHUNK or hidden % 2 or hidden < 4:
        raise audio.error("n_window_infer", f"only a multiple of {CHUNK} and an even d_model are")

    def conv(number: int, inputs: int) -> LinearSpec:
        rows = ((f"{prefix}conv2d{number}", channels),)
        return LinearSpec(rows, 9 * inputs, bias=True, layout="taps", groups=9)

    last = halved(halved(halved(bands)))
    out = ((f"{prefix}conv_out", hidden),)
    project = LinearSpec(out, channels * last, layout="taps", groups=last)
    first, second = (
        LinearSpec(((f"multi_modal_projector.linear_{i}", rows),), hidden, bias=True)
        for i, rows in ((1, hidden), (2, size))
    )
    return EncoderSpec(
        modality="audio",
        inputs=SpectrogramInputSpec(
            (conv(1, 1), conv(2, channels), conv(3, channels)),
            project,
            bands,
            channels,
            hidden,
            infer // CHUNK,
        ),
        layers=tuple(replace(LIKE, key_bias=True).layers(audio, "encoder")),
        layer_names=f"{prefix}layers.{{}}.",
        hidden_size=hidden,
        norm=LayerNormSpec(f"{prefix}ln_post", hidden, _EPS),
        output=ProjectorSpec(((first, "gelu"), (second, None))),
        max_num_tokens=num_tokens(MAX_SECONDS * CHUNK),
        prefixes=_PREFIXES,
    )


_TOWERS: Mapping[str, Callable[[ConfigJson], EncoderSpec]] = {
    "Gemma4ForConditionalGeneration": read_gemma4_audio,
    "Gemma4UnifiedForConditionalGeneration": read_gemma4_unified_audio,
    "Qwen2AudioForConditionalGeneration": _read_qwen2_audio,
    "Qwen3ASRForConditionalGeneration": _read_qwen3_asr,
    "VoxtralForConditionalGeneration": _read_voxtral,
}


def with_sounds(spec: ModelSpec, config: ConfigJson) -> ModelSpec:
    """Return a model with its encoder of sounds, if it has one that is supported.

    Args:
        spec: the text part.
        config: config.json, with the fields of text_config at the outside.

    Raises:
        ModelError: a field of the encoder has an unsupported value.
    """
    of_file = config.get("gguf_tower")  # the text part has an architecture of its own
    read = _TOWERS.get(f"{of_file}ForConditionalGeneration" if of_file else spec.architecture)
    if read is None or not config.has("audio_config"):
        return spec
    try:
        return replace(spec, encoders=(*spec.encoders, read(config)), left_out="")
    except ModelError as error:
        raise ModelError(
            f"{error} The model can answer texts with language_model_only=True."
        ) from None
