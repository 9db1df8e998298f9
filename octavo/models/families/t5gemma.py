"""T5Gemma: an encoder-decoder whose two stacks are those of Gemma 2."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.cross_attention import CrossAttentionSpec
from octavo.models.blocks.encoder_input import TextInputSpec
from octavo.models.blocks.layer import LayerSpec, Sublayer
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import RMSNormSpec
from octavo.models.encoder import EncoderSpec
from octavo.models.families.base import OUTER_FIELDS
from octavo.models.families.gemma2 import gemma2_like
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec


def _stack_like(config: ConfigJson, stack: str) -> LlamaLike:
    like = gemma2_like(config)
    windows = like.windows or ()
    if stack == "encoder":  # the window has as many tokens on each side, and the token itself
        windows = tuple(None if window is None else window + 1 for window in windows)
    return replace(
        like,
        windows=windows,
        input_norm="pre_self_attn_layernorm",
        mixer_out_norm="post_self_attn_layernorm",
        final_norm=f"model.{stack}.norm",
        embed_module=f"model.{stack}.embed_tokens",
        head_module="lm_head.out_proj",
        layer_names=f"model.{stack}.layers.{{}}.",
        generates=stack == "decoder",
    )


def _with_cross_attention(config: ConfigJson, layer: LayerSpec, encoder_size: int) -> LayerSpec:
    """Return a layer of the decoder with attention to the encoder's rows between its blocks.

    Args:
        config: the decoder's fields.
        layer: the layer without cross attention.
        encoder_size: size of the encoder's rows.
    """
    mixer, mlp = layer.sublayers
    own, bias = mixer.block, config.flag("attention_bias", False)
    assert isinstance(own, AttentionSpec)
    hidden, eps = own.o_proj.outputs, config.number("rms_norm_eps")
    heads, kv_heads = own.num_heads * own.head_size, own.num_kv_heads * own.head_size
    keys, values = (("cross_attn.k_proj", kv_heads), ("cross_attn.v_proj", kv_heads))
    cross = CrossAttentionSpec(
        LinearSpec((("cross_attn.q_proj", heads),), hidden, bias),
        LinearSpec((keys, values), encoder_size, bias),
        LinearSpec((("cross_attn.o_proj", hidden),), heads, bias),
        own.num_heads,
        own.num_kv_heads,
        own.head_size,
        own.scale,
        own.soft_cap,
    )
    before, after = (
        RMSNormSpec(f"{at}_cross_attn_layernorm", hidden, eps, 1.0) for at in ("pre", "post")
    )
    attention = Sublayer("cross_attention", cross, before, after)
    return replace(layer, sublayers=(mixer, attention, mlp))


def read(config: ConfigJson) -> ModelSpec:
    """Read T5Gemma (Zhang et al., arXiv:2504.06225)."""
    config.refuse("is_encoder_decoder", True, "only encoder-decoders are supported")
    own, other = (config.merged(stack, OUTER_FIELDS) for stack in ("decoder", "encoder"))
    decoder = _stack_like(own, "decoder").read(own)
    encoder = _stack_like(other, "encoder").read(other)
    made = {
        layer: _with_cross_attention(own, layer, encoder.hidden_size)
        for layer in set(decoder.layers)
    }
    return replace(
        decoder,
        layers=tuple(made[layer] for layer in decoder.layers),
        encoders=(
            EncoderSpec(
                modality="text",
                inputs=TextInputSpec(encoder.embed, shares_table=False),
                layers=encoder.layers,
                layer_names=encoder.layer_names,
                hidden_size=encoder.hidden_size,
                norm=encoder.head.norm,
                output=None,
                max_num_tokens=encoder.max_model_len,
            ),
        ),
    )


ARCHITECTURES = {"T5GemmaForConditionalGeneration": read}
