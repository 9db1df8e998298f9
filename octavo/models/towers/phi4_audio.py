"""Encoder of sounds of Phi-4 multimodal: a conformer with a bias for each distance.

Source: `Phi4MultimodalAudioModel` of transformers; Conformer (Gulati et al., arXiv:2005.08100),
and Abouelenin et al., arXiv:2503.01743, section 2.3.
"""

from __future__ import annotations

from typing import Any

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.attention import AttentionSpec, DistanceBias
from octavo.models.blocks.conformer_conv import ConformerConvSpec
from octavo.models.blocks.conv import ConvSpec
from octavo.models.blocks.layer import LayerSpec, Sublayer
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.mlp import MLPSpec
from octavo.models.blocks.nemo import SEGMENT, NemoInputSpec, SeparableConv, num_tokens
from octavo.models.blocks.norm import LayerNormSpec, ScaledNormSpec, StandardSpec
from octavo.models.blocks.projector import ProjectorActivation, ProjectorSpec
from octavo.models.blocks.spectrogram import halved
from octavo.models.encoder import EncoderSpec
from octavo.models.phi4mm import sound_prefixes

MAX_SECONDS = 600
"""Longest sound, which bounds the memory of the encoder."""

_MOST_BLOCKS = 256
"""Most layers: each has names of its own, with which each tensor's is compared."""

_AUDIO: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 1536, "num_blocks": 24}
_AUDIO |= {"num_attention_heads": 16, "input_size": 80, "kernel_size": 3}
_AUDIO |= {"nemo_conv_channels": 1024, "bias_max_distance": 1000}
_PREFIX = "model.embed_tokens_extend.audio_embed."
_EPS = 1e-5
_FIXED: dict[str, Any] = {"activation": "swish", "conv_activation": "swish", "chunk_size": -1}
_FIXED |= {"conv_glu_type": "swish", "nemo_activation": "relu", "time_reduction": 8}
_FIXED |= {"bias_symmetric": False, "depthwise_multiplier": 1, "downsample_rate": 1}


def read_phi4_audio(config: ConfigJson) -> EncoderSpec:
    """Read the encoder of sounds of Phi-4 multimodal.

    Raises:
        ModelError: a field has an unsupported value.
    """
    audio = config.section("audio_config").filled(_AUDIO)
    for name, only in _FIXED.items():
        audio.refuse(name, only, f"only {only} is supported")
    size, heads = audio.integer("hidden_size"), audio.integer("num_attention_heads")
    for name in ("ext_pw_out_channel", "depthwise_separable_out_channel"):
        if audio.integer(name, default=1024) != size:
            raise audio.error(name, f"it must be {size}, the hidden size")
    if size % heads:
        raise audio.error("hidden_size", "it must be a multiple of the number of heads")
    inner, distance = audio.integer("intermediate_size"), audio.integer("bias_max_distance")
    prefix = f"{_PREFIX}encoder."

    def linear(module: str, outputs: int, inputs: int = size) -> LinearSpec:
        return LinearSpec(((module, outputs),), inputs, bias=True)

    def point(module: str, outputs: int) -> LinearSpec:
        """Return a convolution with one tap."""
        return LinearSpec(((module, outputs),), size, bias=True, stored=(size, 1))

    def half_step(name: str) -> Sublayer:
        up = LinearSpec(((f"{name}.gate_up_proj", 2 * inner),), size, bias=True, layout="halves")
        block = MLPSpec(up, linear(f"{name}.down_proj", size, inner), "silu", gated=True)
        norm = LayerNormSpec(f"{name}.layer_norm", size, _EPS)
        return Sublayer(name, block, norm, ScaledNormSpec(None, 0.5))

    attention = AttentionSpec(
        LinearSpec(tuple((f"self_attn.{name}_proj", size) for name in "qkv"), size, bias=True),
        linear("self_attn.o_proj", size),
        heads,
        heads,
        size // heads,
        (size // heads) ** -0.5,
        None,
        causal=False,
        bias=DistanceBias(
            f"{prefix}relative_attention_bias_layer.bias_values", 2 * distance, heads, distance
        ),
    )
    convolution = ConformerConvSpec(
        point("conv.glu.ext_pw_conv_1d", 2 * size),
        ("conv.glu.b1", "conv.glu.b2"),
        ConvSpec(
            "conv.dw_sep_conv_1d.dw_conv",
            size,
            audio.integer("kernel_size", least=2, most=8),
            bias=True,
        ),
        point("conv.dw_sep_conv_1d.pw_conv", size),
        point("conv.ext_pw_conv_1d", size),
    )
    layer = LayerSpec(
        (
            half_step("feed_forward_in"),
            Sublayer("mixer", attention, LayerNormSpec("layer_norm_att", size, _EPS)),
            Sublayer("conv", convolution, LayerNormSpec("conv.layer_norm", size, _EPS)),
            half_step("feed_forward_out"),
        ),
        final_norm=LayerNormSpec("layer_norm", size, _EPS),
    )
    outer = config.integer("hidden_size")
    num_blocks = audio.integer("num_blocks", most=_MOST_BLOCKS)

    def project(mode: str) -> tuple[tuple[LinearSpec, ProjectorActivation | None], ...]:
        up = linear(f"{_PREFIX}up_proj_for_{mode}", outer)
        return (up, "gelu"), (linear(f"{_PREFIX}down_proj_for_{mode}", outer, outer), None)

    return EncoderSpec(
        "audio",
        _read_inputs(audio, size, f"{prefix}"),
        (layer,) * num_blocks,
        f"{prefix}encoders.{{}}.",
        size,
        None,
        ProjectorSpec(project("speech"), gathers=True, beside=project("vision_speech")),
        max_num_tokens=-(-num_tokens(100 * MAX_SECONDS) // SEGMENT) * SEGMENT,
        prefixes=sound_prefixes(num_blocks),
    )


def _read_inputs(audio: ConfigJson, size: int, prefix: str) -> NemoInputSpec:
    bands, channels = audio.integer("input_size"), audio.integer("nemo_conv_channels")
    last = halved(halved(halved(bands)))
    first = LinearSpec(
        ((f"{prefix}embed.conv.0", channels),), 9, bias=True, layout="taps", groups=9
    )

    def separable(index: int) -> SeparableConv:
        mix = LinearSpec(
            ((f"{prefix}embed.conv.{index + 1}", channels),),
            channels,
            bias=True,
            stored=(channels, 1, 1),
        )
        return SeparableConv(f"{prefix}embed.conv.{index}", channels, mix)

    own = f"{prefix}encoder_embedding.global_"
    return NemoInputSpec(
        StandardSpec(f"{own}mean", f"{own}invstd", bands, 1.0),
        first,
        (separable(2), separable(5)),
        LinearSpec(
            ((f"{prefix}embed.out", size),),
            channels * last,
            bias=True,
            layout="taps",
            groups=last,
        ),
        bands,
        size,
    )
