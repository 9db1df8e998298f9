"""Parts that vision transformers share (Dosovitskiy et al., arXiv:2010.11929)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.attention import AttentionSpec, StepRope
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.mlp import Activation, MLPSpec
from octavo.models.blocks.norm import LayerNormSpec, LayerScaleSpec, NormSpec, RMSNormSpec
from octavo.models.families import base
from octavo.models.families.base import Heads, plain_mlp, read_activation

ACTIVATIONS: dict[str, Activation] = base.PLAIN | {"quick_gelu": "quick_gelu"}


@dataclass(frozen=True, kw_only=True)
class ViTLayer:
    """Names and kinds of the parts of a layer. The defaults are those of CLIP and SigLIP."""

    qkv_modules: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o_module: str = "self_attn.out_proj"
    mlp_modules: tuple[str, ...] = ("mlp.fc1", "mlp.fc2")
    """Modules of the projections up and down; with three, gate, up and down."""
    norm_modules: tuple[str, str] = ("layer_norm1", "layer_norm2")
    norm: Literal["layer", "rms"] = "layer"
    qkv_bias: bool = True
    bias: bool = True
    """True if the other projections have a bias."""
    rotates: bool = False
    """True if the items have rotary positions."""
    scales: tuple[str, str] | None = None
    """Tensors with factors of the results of attention and MLP."""

    def read(self, vision: ConfigJson, heads: Heads, inner_size: int, eps: float) -> LayerSpec:
        """Return the layer; hidden_act of vision_config is its activation."""
        attention = AttentionSpec(
            heads.qkv_proj(*self.qkv_modules, bias=self.qkv_bias),
            heads.o_proj(self.o_module, bias=self.bias),
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_size,
            heads.scale,
            StepRope() if self.rotates else None,
            causal=False,
        )
        size, (*ups, down) = heads.hidden_size, self.mlp_modules
        if len(ups) == 1:
            activation = read_activation(vision, "hidden_act", ACTIVATIONS)
            mlp = plain_mlp(ups[0], down, size, inner_size, activation, bias=self.bias)
        else:
            mlp = MLPSpec(
                LinearSpec(tuple((module, inner_size) for module in ups), size, self.bias),
                LinearSpec(((down, size),), inner_size, self.bias),
                read_activation(vision, "hidden_act", base.GATED),
                gated=True,
            )
        first, second = (make_norm(self.norm, module, size, eps) for module in self.norm_modules)
        layer = LayerSpec.of(attention, mlp, first, second)
        if self.scales is None:
            return layer
        scaled = [
            replace(sublayer, out_norm=LayerScaleSpec(tensor, size))
            for sublayer, tensor in zip(layer.sublayers, self.scales, strict=True)
        ]
        return replace(layer, sublayers=tuple(scaled))


def make_norm(kind: Literal["layer", "rms"], module: str, size: int, eps: float) -> NormSpec:
    """Return a norm by its kind."""
    make = LayerNormSpec if kind == "layer" else RMSNormSpec
    return make(module, size, eps)


def read_vision(config: ConfigJson, defaults: dict[str, Any]) -> ConfigJson:
    """Return vision_config, with the values that transformers assumes for absent fields."""
    return config.section("vision_config").filled(defaults)


def read_heads(vision: ConfigJson, *names: str) -> Heads:
    """Return the heads of a tower from its vision_config.

    Args:
        vision: vision_config.
        names: fields with the number of heads, before num_attention_heads.
    """
    size = vision.integer("hidden_size")
    return Heads.of(vision, size, base.read_num_heads(vision, *names))


def read_size(vision: ConfigJson, name: str) -> int:
    """Return the height and width in a field, which is one number, or two equal ones."""
    value = vision.get(name)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        vision = vision.replaced(name, value[0])
    return vision.integer(name)


def read_theta(vision: ConfigJson) -> float:
    """Return the base of rotary positions."""
    if vision.has("rope_parameters"):
        rope = vision.section("rope_parameters")
        rope.refuse("rope_type", "axial", "only rotary positions of two axes are supported")
        return rope.positive("rope_theta", 1e4)
    return vision.positive("rope_theta", 1e4)


def read_num_layers(config: ConfigJson, vision: ConfigJson, default: int, *names: str) -> int:
    """Return the number of layers up to the one that vision_feature_layer names.

    Args:
        config: config.json. Layer 0 is the input of the first one; negative numbers count from the
            end, and -1 is the result of the last one.
        vision: vision_config.
        default: vision_feature_layer of a config without it.
        names: fields with the number of layers, before num_hidden_layers.
    """
    layers = base.read_num_layers(vision, *names)
    chosen = config.get("vision_feature_layer")
    chosen = default if chosen is None else chosen
    if not isinstance(chosen, int) or not -layers <= chosen <= layers:
        raise config.error("vision_feature_layer", f"only one of the {layers} layers is supported")
    count = chosen if chosen >= 0 else layers + 1 + chosen
    if count == 0:
        raise config.error("vision_feature_layer", "the input of the layers is not supported")
    return count
