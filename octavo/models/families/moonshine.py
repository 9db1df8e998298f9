"""Moonshine: an encoder of samples of sound and a decoder that writes what is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.cross_attention import CrossAttentionSpec
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.blocks.head import HeadSpec
from octavo.models.blocks.layer import LayerSpec, Sublayer
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.mlp import Activation, MLPSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.blocks.wave import TAPS, WaveInputSpec, lengths
from octavo.models.encoder import EncoderSpec
from octavo.models.families import base
from octavo.models.positions import read_rope
from octavo.models.spec import ModelSpec

MAX_SAMPLES = 30 * 16_000
"""Samples of the longest sound; the models learnt from sounds of up to 30 s."""
_EPS = 1e-5

Stack = Literal["encoder", "decoder"]


def _read(config: ConfigJson) -> ModelSpec:
    """Read Moonshine (Jeffries et al., arXiv:2410.15608)."""
    config.refuse("is_encoder_decoder", True, "only encoder-decoders are supported")
    hidden, length = config.integer("hidden_size"), config.integer("max_position_embeddings")
    embed = EmbedSpec("model.decoder.embed_tokens", config.integer("vocab_size"), hidden, hidden)
    spec = base.model_spec(
        config,
        embed=embed,
        layers=_layers(config, "decoder"),
        head=HeadSpec(
            _norm("model.decoder.norm", hidden),
            base.read_lm_head(config, embed, tied=True, module="proj_out"),
        ),
        head_module="proj_out",
        max_model_len=length,
        layer_names="model.decoder.layers.{}.",
        bare_prefix="model.",
        ignored=base.ROTARY_TABLES,
    )

    def conv(number: int, inputs: int, outputs: int, *, bias: bool = True) -> LinearSpec:
        module, taps = f"model.encoder.conv{number}", TAPS[number - 1]
        rows = ((module, outputs),)
        return LinearSpec(rows, taps * inputs, bias=bias, layout="taps", groups=taps)

    encoder = EncoderSpec(
        modality="audio",
        inputs=WaveInputSpec(
            conv(1, 1, hidden, bias=False),
            conv(2, hidden, 2 * hidden),
            conv(3, 2 * hidden, hidden),
            LayerNormSpec("model.encoder.groupnorm", hidden, _EPS),
            MAX_SAMPLES,
        ),
        layers=_layers(config, "encoder"),
        layer_names="model.encoder.layers.{}.",
        hidden_size=hidden,
        norm=_norm("model.encoder.layer_norm", hidden),
        output=None,
        max_num_tokens=lengths(MAX_SAMPLES)[-1],
    )
    return replace(spec, encoders=(encoder,))


def _norm(module: str, size: int) -> LayerNormSpec:
    return LayerNormSpec(module, size, _EPS, bias=False)


def _layers(config: ConfigJson, stack: Stack) -> tuple[LayerSpec, ...]:
    """Return the layers of the encoder or the decoder."""
    hidden, inner = config.integer("hidden_size"), config.integer("intermediate_size")
    number = base.read_num_heads(config, f"{stack}_num_attention_heads")
    kv_heads = f"{stack}_num_key_value_heads"
    if config.optional_integer(kv_heads, least=1) not in (None, number):
        raise config.error(kv_heads, "only as many heads of keys and values as of queries are")
    heads, bias = base.Heads.of(config, hidden, number), config.flag("attention_bias", False)
    rope = read_rope(
        config,
        head_size=heads.head_size,
        max_position=config.integer("max_position_embeddings"),
        partial=0.9,
        is_neox=False,
    )

    def linear(name: str, *parts: str) -> LinearSpec:
        rows = tuple((f"{name}.{part}_proj", hidden) for part in parts)
        return LinearSpec(rows, hidden, bias=bias and parts != ("o",))

    attention = AttentionSpec(
        linear("self_attn", "q", "k", "v"),
        linear("self_attn", "o"),
        number,
        number,
        heads.head_size,
        heads.scale,
        rope,
        causal=stack == "decoder",
    )
    mixer = Sublayer("mixer", attention, _norm("input_layernorm", hidden))
    activation = base.read_activation(config, f"{stack}_hidden_act", _ACTIVATIONS)
    second = _norm("post_attention_layernorm", hidden)
    if stack == "encoder":
        mlp = base.plain_mlp("mlp.fc1", "mlp.fc2", hidden, inner, activation, bias=True)
        blocks: tuple[Sublayer, ...] = (mixer, Sublayer("feed_forward", mlp, second))
    else:
        cross = CrossAttentionSpec(
            linear("encoder_attn", "q"),
            linear("encoder_attn", "k", "v"),
            linear("encoder_attn", "o"),
            number,
            number,
            heads.head_size,
            heads.scale,
        )
        # The gate follows the projection up.
        up = LinearSpec((("mlp.fc1", 2 * inner),), hidden, bias=True, layout="halves")
        down = LinearSpec((("mlp.fc2", hidden),), inner, bias=True)
        mlp = MLPSpec(up, down, activation, gated=True)
        last = Sublayer("feed_forward", mlp, _norm("final_layernorm", hidden))
        blocks = (mixer, Sublayer("cross_attention", cross, second), last)
    count = base.read_num_layers(config, f"{stack}_num_hidden_layers")
    return (LayerSpec(blocks, "sequential"),) * count


_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "silu": "silu"}

ARCHITECTURES = {"MoonshineForConditionalGeneration": _read}
