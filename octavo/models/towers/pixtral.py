"""Tower of Pixtral and Mistral 3: pictures of any size (Agrawal et al., arXiv:2410.07073)."""

from __future__ import annotations

from typing import Any

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.encoder_input import PatchInputSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import RMSNormSpec
from octavo.models.blocks.projector import ProjectorSpec
from octavo.models.encoder import EncoderSpec
from octavo.models.towers.pixels import PixelLayout
from octavo.models.towers.siglip import PROJECTOR_PREFIX, TOWER_PREFIXES, two_layers
from octavo.models.towers.vit import (
    ViTLayer,
    read_heads,
    read_num_layers,
    read_size,
    read_theta,
    read_vision,
)

MAX_PATCHES = 16384
"""Most patches of a picture: with patches of 14 pixels 1792 x 1792 pixels."""
_EPS = 1e-5
_PIXTRAL: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "image_size": 1540}
_PIXTRAL |= {"num_hidden_layers": 24, "num_attention_heads": 16, "num_channels": 3}
_PIXTRAL |= {"patch_size": 14, "hidden_act": "gelu"}
_LAYER = ViTLayer(
    qkv_modules=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    o_module="attention.o_proj",
    mlp_modules=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
    norm_modules=("attention_norm", "ffn_norm"),
    norm="rms",
    qkv_bias=False,
    bias=False,
    rotates=True,
)


def _read(
    config: ConfigJson, vision: ConfigJson, merge: int, default: int, output: ProjectorSpec
) -> EncoderSpec:
    """Return the tower up to the layer vision_feature_layer, or its default."""
    heads, channels = read_heads(vision), vision.integer("num_channels")
    size, patch = heads.hidden_size, read_size(vision, "patch_size")
    if heads.head_size % 4:
        raise vision.error("num_attention_heads", "the size of a head must be a multiple of 4")
    layout = PixelLayout(channels, patch, merge, heads.head_size, read_theta(vision))
    kernel = channels, patch, patch
    project = LinearSpec((("vision_tower.patch_conv", size),), channels * patch**2, stored=kernel)
    inner = vision.integer("intermediate_size")
    norm = RMSNormSpec("vision_tower.ln_pre", size, _EPS)
    return EncoderSpec(
        "image",
        PatchInputSpec(project, layout, size, norm=norm),
        (_LAYER.read(vision, heads, inner, _EPS),) * read_num_layers(config, vision, default),
        "vision_tower.transformer.layers.{}.",
        size,
        None,
        output,
        max_num_tokens=MAX_PATCHES,
        prefixes=(*TOWER_PREFIXES, PROJECTOR_PREFIX),
    )


def read_mistral3(config: ConfigJson) -> EncoderSpec:
    """Read the tower of Mistral 3, which merges squares of patches before the projector."""
    vision = read_vision(config, _PIXTRAL)
    size, merge = vision.integer("hidden_size"), config.integer("spatial_merge_size", default=2)
    prefix = "multi_modal_projector."
    merging = LinearSpec(
        ((f"{prefix}patch_merger.merging_layer", size),),
        size * merge**2,
        layout="taps",
        groups=merge**2,
    )
    output = ProjectorSpec(
        ((merging, None), *two_layers(config, size, bias=False)),
        token_norm=RMSNormSpec(f"{prefix}norm", size, config.number("rms_norm_eps")),
        gathers=True,
        group=merge**2,
    )
    return _read(config, vision, merge, -1, output)


def read_pixtral(config: ConfigJson) -> EncoderSpec:
    """Read the tower of Pixtral in LLaVA's form."""
    vision = read_vision(config, _PIXTRAL | {"image_size": 1024, "patch_size": 16})
    layers = two_layers(config, vision.integer("hidden_size"), bias=True)
    return _read(config, vision, 1, -2, ProjectorSpec(layers, gathers=True))
