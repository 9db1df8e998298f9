"""T5, T5 1.1 (Flan-T5), mT5 and UMT5: encoder-decoders of texts with relative positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from octavo.checkpoints.config_json import MOST_LAYERS, ConfigJson
from octavo.models.blocks.attention import AttentionSpec, RelativeBias
from octavo.models.blocks.cross_attention import CrossAttentionSpec
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.blocks.encoder_input import TextInputSpec
from octavo.models.blocks.head import HeadSpec
from octavo.models.blocks.layer import LayerSpec, Sublayer
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.mlp import Activation, MLPSpec
from octavo.models.blocks.norm import RMSNormSpec
from octavo.models.encoder import EncoderSpec
from octavo.models.families import base
from octavo.models.spec import ModelSpec

_PLAIN: dict[str, Activation] = {"relu": "relu", "gelu": "gelu", "silu": "silu"}
_PLAIN |= {"gelu_new": "gelu_tanh"}
_GATED: dict[str, Activation] = {"gated-gelu": "gelu_tanh", "gated-silu": "silu"}


def _read(config: ConfigJson, *, scaled: bool = True, shared_bias: bool = True) -> ModelSpec:
    """Read T5 (Raffel et al., arXiv:1910.10683); 1.1 has a gated MLP and an LM head of its own.

    Args:
        config: config.json.
        scaled: True if the logits of a tied LM head have a factor (all but mT5).
        shared_bias: True if all layers have the bias of the first one (all but UMT5,
            arXiv:2304.09151).
    """
    config.refuse("is_encoder_decoder", True, "only encoder-decoders are supported")
    hidden, eps = config.integer("d_model"), config.number("layer_norm_epsilon")
    number = base.read_num_heads(config, "num_heads")
    heads = base.Heads.of(config, hidden, number, head_size=config.integer("d_kv"))
    kind = base.read_activation(config, "feed_forward_proj", _PLAIN | _GATED)
    gated = config.get("feed_forward_proj") in _GATED
    inner = config.integer("d_ff")
    buckets = config.integer("relative_attention_num_buckets", least=4)
    longest = config.integer("relative_attention_max_distance", least=buckets)
    length = config.integer("n_positions", least=1)
    size = heads.num_heads * heads.head_size

    def norm(module: str) -> RMSNormSpec:
        return RMSNormSpec(module, hidden, eps)

    def attention(stack: str, i: int, *, causal: bool) -> Sublayer:
        prefix = "layer.0.SelfAttention"
        table = f"{stack}.block.{0 if shared_bias else i}.{prefix}.relative_attention_bias"
        block = AttentionSpec(
            heads.qkv_proj(*(f"{prefix}.{part}" for part in "qkv"), bias=False),
            heads.o_proj(f"{prefix}.o", bias=False),
            heads.num_heads,
            heads.num_heads,
            heads.head_size,
            1.0,
            None,
            causal=causal,
            bias=RelativeBias(table, buckets, heads.num_heads, longest, causal),
        )
        return Sublayer("mixer", block, norm("layer.0.layer_norm"))

    def feed_forward(layer: int) -> Sublayer:
        prefix = f"layer.{layer}.DenseReluDense"
        ups = ("wi_0", "wi_1") if gated else ("wi",)
        block = MLPSpec(
            LinearSpec(tuple((f"{prefix}.{up}", inner) for up in ups), hidden),
            LinearSpec(((f"{prefix}.wo", hidden),), inner),
            kind,
            gated,
        )
        return Sublayer("feed_forward", block, norm(f"layer.{layer}.layer_norm"))

    prefix = "layer.1.EncDecAttention"
    cross = CrossAttentionSpec(
        LinearSpec(((f"{prefix}.q", size),), hidden),
        LinearSpec(((f"{prefix}.k", size), (f"{prefix}.v", size)), hidden),
        heads.o_proj(f"{prefix}.o", bias=False),
        heads.num_heads,
        heads.num_heads,
        heads.head_size,
        1.0,
    )

    @cache
    def encoder_layer(i: int) -> LayerSpec:
        return LayerSpec((attention("encoder", i, causal=False), feed_forward(1)))

    @cache
    def decoder_layer(i: int) -> LayerSpec:
        return LayerSpec(
            (
                attention("decoder", i, causal=True),
                Sublayer("cross_attention", cross, norm("layer.1.layer_norm")),
                feed_forward(2),
            )
        )

    def layers(make: Callable[[int], LayerSpec], number: int) -> list[LayerSpec]:
        return [make(0 if shared_bias else i) for i in range(number)]

    embed = EmbedSpec("shared", config.integer("vocab_size"), hidden, hidden)
    # transformers 5 writes tie_word_embeddings=true always, and this field for T5 1.1.
    tied = config.flag("tie_word_embeddings", True) and config.flag("scale_decoder_outputs", True)
    config = config.replaced("tie_word_embeddings", tied)
    num_layers = config.integer("num_layers", most=MOST_LAYERS)
    num_decoder_layers = config.optional_integer("num_decoder_layers", least=1) or num_layers
    spec = base.model_spec(
        config,
        embed=embed,
        layers=layers(decoder_layer, num_decoder_layers),
        head=HeadSpec(
            norm("decoder.final_layer_norm"),
            base.read_lm_head(config, embed, tied=tied),
            scale=hidden**-0.5 if tied and scaled else None,
        ),
        max_model_len=length,
        layer_names="decoder.block.{}.",
        bare_prefix="",
        ignored=(r"(en|de)coder\.embed_tokens\.weight", r".*EncDecAttention\.relative.*"),
    )
    encoder = EncoderSpec(
        modality="text",
        inputs=TextInputSpec(embed, shares_table=True),
        layers=tuple(layers(encoder_layer, num_layers)),
        layer_names="encoder.block.{}.",
        hidden_size=hidden,
        norm=norm("encoder.final_layer_norm"),
        output=None,
        max_num_tokens=length,
    )
    return replace(spec, encoders=(encoder,))


ARCHITECTURES = {
    "T5ForConditionalGeneration": _read,
    "MT5ForConditionalGeneration": partial(_read, scaled=False),
    "UMT5ForConditionalGeneration": partial(_read, shared_bias=False),
}
