"""Encoder of sounds of Gemma 4 (E2B, E4B): a conformer with local attention.

Source: `Gemma4AudioModel` and `Gemma4MultimodalEmbedder` of transformers. Its architecture is that
of the Universal Speech Model (arXiv:2303.01037): Conformer (arXiv:2005.08100) with relative
positions (Transformer-XL, arXiv:1901.02860, section 3.3), in which a token sees only itself and a
few tokens before it.
"""

from __future__ import annotations

import math
from typing import Any

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.clipped import ClippedLinearSpec
from octavo.models.blocks.conv import ConvSpec
from octavo.models.blocks.disentangled import DisentangledSpec, Distances
from octavo.models.blocks.layer import LayerSpec, Sublayer
from octavo.models.blocks.light_conv import LightConvSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.mlp import MLPSpec
from octavo.models.blocks.norm import (
    HeadFactorsSpec,
    LayerNormSpec,
    RMSNormSpec,
    ScaledNormSpec,
)
from octavo.models.blocks.projector import ProjectorSpec
from octavo.models.blocks.subsample import SubsampleInputSpec
from octavo.models.encoder import EncoderSpec
from octavo.quantization.projected import Sinusoids

MAX_TOKENS = 750
"""Rows of the longest sound that processors allow, which has 30 s."""

_AUDIO: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8}
_AUDIO |= {"hidden_act": "silu", "subsampling_conv_channels": [128, 32], "conv_kernel_size": 5}
_AUDIO |= {"residual_weight": 0.5, "attention_chunk_size": 12, "attention_context_left": 13}
_AUDIO |= {"attention_context_right": 0, "attention_logit_cap": 50.0, "rms_norm_eps": 1e-6}
_AUDIO |= {"use_clipped_linears": True, "gradient_clipping": 1e10, "output_proj_dims": 1536}
_PREFIX = "audio_tower."
_PREFIXES = ((_PREFIX, f"model.{_PREFIX}"), ("embed_audio.", "model.embed_audio."))
_EPS = 1e-6
"""Term of the norms that do not read rms_norm_eps."""
_LEAST_CLIPPING = 1e9
"""Bound of hidden states that no model reaches."""


def read_gemma4_audio(config: ConfigJson) -> EncoderSpec:
    """Read the encoder of sounds of Gemma 4.

    Raises:
        ModelError: a field has an unsupported value.
    """
    audio = config.section("audio_config").filled(_AUDIO)
    audio.refuse("hidden_act", "silu", "only silu is supported")
    audio.refuse("attention_context_right", 0, "tokens after a token are not supported")
    if audio.positive("gradient_clipping") < _LEAST_CLIPPING:
        raise audio.error("gradient_clipping", f"it must be at least {_LEAST_CLIPPING:g}")
    window = audio.integer("attention_context_left", least=2) - 1
    if (audio.integer("attention_chunk_size") + window) // 2 != window:
        raise audio.error(
            "attention_chunk_size", f"it must be {window} or {window + 1}, as many as a token sees"
        )
    size, heads = audio.integer("hidden_size", least=4), audio.integer("num_attention_heads")
    if size % heads or size % 2:
        raise audio.error("hidden_size", "it must be even, and a multiple of the number of heads")
    head, eps, outer = size // heads, audio.number("rms_norm_eps"), config.integer("hidden_size")
    clipped = audio.flag("use_clipped_linears", True)

    def linear(inputs: int, *modules: tuple[str, int]) -> LinearSpec:
        if clipped:
            return ClippedLinearSpec(modules, inputs)
        return LinearSpec(tuple((f"{name}.linear", n) for name, n in modules), inputs)

    def half_step(name: str) -> Sublayer:
        block = MLPSpec(
            linear(size, (f"{name}.ffw_layer_1", 4 * size)),
            linear(4 * size, (f"{name}.ffw_layer_2", size)),
            "silu",
            gated=False,
        )
        before, after = (
            RMSNormSpec(f"{name}.{it}_layer_norm", size, _EPS) for it in ("pre", "post")
        )
        factor = audio.positive("residual_weight")
        return Sublayer(name, block, before, ScaledNormSpec(after, factor))

    # Logits have base 2. The keys' factor, softplus(1) / ln(2), does not hold for vectors of
    # distances.
    key_factor = math.log(1 + math.e) / math.log(2)
    attention = AttentionSpec(
        linear(size, *((f"self_attn.{name}_proj", size) for name in "qkv")),
        linear(size, ("self_attn.post", size)),
        heads,
        heads,
        head,
        head**-0.5 / math.log(2) * key_factor,
        None,
        sliding_window=window,
        soft_cap=audio.positive("attention_logit_cap"),
        q_norm=HeadFactorsSpec("self_attn.per_dim_scale", head),
        in_encoder=True,
        disentangled=DisentangledSpec(
            Sinusoids(window, size, 1 / key_factor),
            None,
            Distances(window),
            LinearSpec((("self_attn.relative_k_proj", size),), size),
            None,
            head,
        ),
    )
    convolution = LightConvSpec(
        linear(size, ("lconv1d.linear_start", 2 * size)),
        ConvSpec(
            "lconv1d.depthwise_conv1d",
            size,
            audio.integer("conv_kernel_size", least=2, most=8),
            bias=False,
        ),
        RMSNormSpec("lconv1d.conv_norm", size, eps),
        linear(size, ("lconv1d.linear_end", size)),
    )
    layer = LayerSpec(
        (
            half_step("feed_forward1"),
            Sublayer(
                "mixer",
                attention,
                RMSNormSpec("norm_pre_attn", size, _EPS),
                RMSNormSpec("norm_post_attn", size, _EPS),
            ),
            Sublayer("lconv1d", convolution, RMSNormSpec("lconv1d.pre_layer_norm", size, eps)),
            half_step("feed_forward2"),
        ),
        final_norm=RMSNormSpec("norm_out", size, _EPS),
    )
    inner = audio.integer("output_proj_dims")
    return EncoderSpec(
        "audio",
        _read_inputs(audio, size, eps),
        (layer,) * audio.integer("num_hidden_layers"),
        f"{_PREFIX}layers.{{}}.",
        size,
        None,
        ProjectorSpec(
            ((LinearSpec((("embed_audio.embedding_projection", outer),), inner), None),),
            token_linear=LinearSpec(((f"{_PREFIX}output_proj", inner),), size, bias=True),
            norm=RMSNormSpec(None, inner, eps),
        ),
        max_num_tokens=MAX_TOKENS,
        prefixes=_PREFIXES,
    )


def _read_inputs(audio: ConfigJson, size: int, eps: float) -> SubsampleInputSpec:
    channels = audio.get("subsampling_conv_channels")
    valid = isinstance(channels, list | tuple) and len(channels) == 2
    if not valid or any(type(n) is not int or n < 1 for n in channels) or channels[0] % 4:
        raise audio.error(
            "subsampling_conv_channels", "it must be two numbers, the first a multiple of 4"
        )
    first, second = channels
    prefix = f"{_PREFIX}subsample_conv_projection."

    def conv(number: int, inputs: int, outputs: int) -> tuple[LinearSpec, LayerNormSpec]:
        name = f"{prefix}layer{number}."
        linear = LinearSpec(((f"{name}conv", outputs),), 9 * inputs, layout="taps", groups=9)
        return linear, LayerNormSpec(f"{name}norm", outputs, eps, bias=False)

    (conv1, norm1), (conv2, norm2) = conv(0, 1, first), conv(1, first, second)
    # The projection reads a quarter of the bands, and transformers has as many bands as channels.
    inputs = first // 4 * second
    project = LinearSpec(((f"{prefix}input_proj_linear", size),), inputs)
    return SubsampleInputSpec((conv1, conv2), (norm1, norm2), project, bands=first)
