"""Layers of vision transformers (Dosovitskiy et al., arXiv:2010.11929)."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.attention import AttentionSpec, StepRope
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.mlp import Activation
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.families import base
from octavo.models.families.base import Heads, plain_mlp

ACTIVATIONS = base.PLAIN


@dataclass(frozen=True, kw_only=True)
class ViTLayer:
    """Names and kinds of the parts of a layer. The defaults are those of CLIP and SigLIP."""

    qkv_modules: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o_module: str = "self_attn.out_proj"
    up_module: str = "mlp.fc1"
    down_module: str = "mlp.fc2"
    norm_modules: tuple[str, str] = ("layer_norm1", "layer_norm2")
    qkv_bias: bool = True
    positions: StepRope | None = None

    def read(self, heads: Heads, inner_size: int, activation: Activation, eps: float) -> LayerSpec:
        """Return the layer."""
        attention = AttentionSpec(
            heads.qkv_proj(*self.qkv_modules, bias=self.qkv_bias),
            heads.o_proj(self.o_module, bias=True),
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_size,
            heads.scale,
            self.positions,
            causal=False,
        )
        size = heads.hidden_size
        mlp = plain_mlp(self.up_module, self.down_module, size, inner_size, activation, bias=True)
        first, second = (LayerNormSpec(module, size, eps) for module in self.norm_modules)
        return LayerSpec.of(attention, mlp, first, second)


def read_heads(vision: ConfigJson, *names: str) -> Heads:
    """Return the heads of a tower from its vision_config."""
    size = vision.integer("hidden_size")
    return Heads.of(vision, size, base.read_num_heads(vision, *names))
