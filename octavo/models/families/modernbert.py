"""ModernBERT: rotary positions, windows in most layers, norms before the blocks."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.blocks.pooler import DenseActivation, DenseSpec, Pooling
from octavo.models.families import base
from octavo.models.families.classifiers import classifier, dense, token_classifier
from octavo.models.families.llama import LlamaLike
from octavo.models.positions import read_rope
from octavo.models.spec import ModelSpec

_ACTIVATIONS: dict[str, DenseActivation] = {"gelu": "gelu", "relu": "relu", "silu": "silu"}
_POOLING: dict[str, Pooling] = {"cls": "cls", "mean": "mean"}
_THETAS = {
    "full_attention": ("global_rope_theta", 1.6e5),
    "sliding_attention": ("local_rope_theta", 1e4),
}
"""Old field of the base of each kind of layers, and its default."""


def read(config: ConfigJson) -> ModelSpec:
    """Read ModernBERT without a head."""
    layers, length = base.read_num_layers(config), config.integer("max_position_embeddings")
    every = config.integer("global_attn_every_n_layers", default=3)
    kinds = ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
    kinds = base.read_layer_types(config, "layer_types", tuple(_THETAS), kinds)
    # A token sees this number of positions on each side, and itself.
    window = config.integer("local_attention") // 2 + 1
    heads = base.Heads.of(config, config.integer("hidden_size"), base.read_num_heads(config))
    ropes = {
        kind: read_rope(
            config,
            head_size=heads.head_size,
            max_position=length,
            layer_type=kind,
            theta_field=field,
            theta=theta,
        )
        for kind, (field, theta) in _THETAS.items()
    }
    norm_bias, bias = config.flag("norm_bias", False), config.flag("attention_bias", False)
    spec = LlamaLike(
        qkv_modules=("attn.Wqkv",),
        o_module="attn.Wo",
        gate_up_modules=("mlp.Wi",),
        down_module="mlp.Wo",
        input_norm="attn_norm",
        feed_forward_norm="mlp_norm",
        final_norm="model.final_norm",
        embed_module="model.embeddings.tok_embeddings",
        norm="layer",
        norm_bias=norm_bias,
        eps=config.number("norm_eps"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        activation=base.read_activation(config, "hidden_activation", base.GATED),
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        ropes=tuple(ropes[kind] for kind in kinds),
        max_model_len=length,
        generates=False,
        ignored=(r"head\..*", r"decoder\..*"),
    ).read(config)
    norm = LayerNormSpec(
        "model.embeddings.norm", spec.hidden_size, config.number("norm_eps"), norm_bias
    )
    mixer, feed_forward = spec.layers[0].sublayers
    first = replace(spec.layers[0], sublayers=(replace(mixer, norm=None), feed_forward))
    return replace(spec, embed=replace(spec.embed, norm=norm), layers=(first, *spec.layers[1:]))


def _head(config: ConfigJson, spec: ModelSpec) -> DenseSpec:
    """Return the layer before the last one of all heads."""
    activation = config.choice("classifier_activation", _ACTIVATIONS)
    eps, bias = config.number("norm_eps"), config.flag("norm_bias", False)
    norm = LayerNormSpec("head.norm", spec.hidden_size, eps, bias)
    has_bias = config.flag("classifier_bias", False)
    return dense(spec, "head.dense", activation, bias=has_bias, norm=norm)


def _read_classifier(config: ConfigJson) -> ModelSpec:
    spec = read(config)
    pooling = config.choice("classifier_pooling", _POOLING)
    return classifier(config, spec, (_head(config, spec),), pooling=pooling)


def _read_token_classifier(config: ConfigJson) -> ModelSpec:
    spec = read(config)
    return token_classifier(config, spec, (_head(config, spec),))


ARCHITECTURES = {
    "ModernBertModel": read,
    "ModernBertForMaskedLM": read,
    "ModernBertForSequenceClassification": _read_classifier,
    "ModernBertForTokenClassification": _read_token_classifier,
}
