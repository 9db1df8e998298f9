"""Towers of InternVL (Chen et al., arXiv:2312.14238)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.encoder_input import PatchInputSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.blocks.projector import ProjectorSpec
from octavo.models.encoder import EncoderSpec
from octavo.models.towers.pixels import TileLayout
from octavo.models.towers.siglip import PROJECTOR_PREFIX, TOWER_PREFIXES, two_layers
from octavo.models.towers.vit import (
    ViTLayer,
    read_heads,
    read_num_layers,
    read_size,
    read_vision,
)

MAX_TILES = 13
"""Most tiles of a picture: 12 and the whole picture."""
_INTERNVL: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "image_size": 448}
_INTERNVL |= {"num_hidden_layers": 24, "num_attention_heads": 16, "num_channels": 3}
_INTERNVL |= {"patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6}
_DEFAULT_FACTOR = 0.5


@dataclass(frozen=True)
class _Names:
    """Names of modules and tensors in one of the two formats of checkpoints."""

    tower: str
    patches: str
    positions: str
    cls: str
    layers: str
    norm: str
    """Norm of the projector."""
    linears: tuple[str, str]
    """Layers of the projector."""
    layer: ViTLayer
    prefixes: tuple[tuple[str, str], ...] = ()


_IN_TRANSFORMERS = _Names(
    "vision_tower.",
    "embeddings.patch_embeddings.projection",
    "embeddings.position_embeddings",
    "embeddings.cls_token",
    "encoder.layer.{}.",
    "multi_modal_projector.layer_norm",
    ("multi_modal_projector.linear_1", "multi_modal_projector.linear_2"),
    ViTLayer(
        qkv_modules=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        o_module="attention.projection_layer",
        norm_modules=("layernorm_before", "layernorm_after"),
        scales=("lambda_1", "lambda_2"),
    ),
    (*TOWER_PREFIXES, PROJECTOR_PREFIX),
)
_PUBLISHED = _Names(
    "vision_model.",
    "embeddings.patch_embedding",
    "embeddings.position_embedding",
    "embeddings.class_embedding",
    "encoder.layers.{}.",
    "mlp1.0",
    ("mlp1.1", "mlp1.3"),
    ViTLayer(
        qkv_modules=("attn.qkv",),
        o_module="attn.proj",
        norm_modules=("norm1", "norm2"),
        scales=("ls1", "ls2"),
    ),
)


def read_internvl(config: ConfigJson) -> EncoderSpec:
    """Read the tower of InternVL in transformers' format."""
    vision = read_vision(config, _INTERNVL)
    vision.refuse("use_qk_norm", False, "norms of queries and keys are not supported")
    vision.refuse("use_mean_pooling", True, "a norm after the last layer is not supported")
    vision.refuse("use_absolute_position_embeddings", True, "positions are required")
    config.refuse("vision_feature_select_strategy", "default", "only default is supported")
    return _read(config, vision, vision.flag("attention_bias", False), _IN_TRANSFORMERS)


def read_internvl_chat(config: ConfigJson) -> EncoderSpec:
    """Read the tower of InternVL as OpenGVLab publishes it, with custom code."""
    vision = read_vision(config, _INTERNVL)
    vision.refuse("qk_normalization", False, "norms of queries and keys are not supported")
    config.refuse("ps_version", "v2", "only v2 is supported")
    config.refuse("select_layer", -1, "only the last layer is supported")
    size = config.integer("force_image_size", default=read_size(vision, "image_size"))
    if size != read_size(vision, "image_size"):
        raise config.error("force_image_size", "it must be image_size of vision_config")
    return _read(config, vision, vision.flag("qkv_bias", True), _PUBLISHED)


def _read(config: ConfigJson, vision: ConfigJson, qkv_bias: bool, names: _Names) -> EncoderSpec:
    """Return the tower with its projector (pixel shuffle, norm, two layers)."""
    vision.refuse("norm_type", "layer_norm", "only layer norms are supported")
    factor = config.number("downsample_ratio", default=_DEFAULT_FACTOR)
    group = round(1 / factor) if 0 < factor <= 1 else 0
    size, patch = read_size(vision, "image_size"), read_size(vision, "patch_size")
    if not group or 1 / group != factor or size % patch or (size // patch) % group:
        raise config.error("downsample_ratio", "it must be 1 / n, and n must divide the patches")
    channels = vision.integer("num_channels")
    layout = TileLayout(
        channels, size, patch, has_class=True, has_bias=True, drops_class=True, group=group
    )
    heads, eps = read_heads(vision), vision.number("layer_norm_eps")
    width = heads.hidden_size
    module = f"{names.tower}{names.patches}"
    project = LinearSpec(((module, width),), channels * patch**2, stored=(channels, patch, patch))
    table = (
        (f"{names.tower}{names.positions}", (1, layout.num_positions, width)),
        (f"{names.tower}{names.cls}", (1, 1, width)),
        (f"{module}.bias", (width,)),
    )
    variant = replace(names.layer, qkv_bias=qkv_bias)
    layer = variant.read(vision, heads, vision.integer("intermediate_size"), eps)
    inputs = width * group**2
    output = ProjectorSpec(
        two_layers(config, inputs, bias=True, modules=names.linears),
        norm=LayerNormSpec(names.norm, inputs, 1e-5),
        gathers=True,
        group=group**2,
    )
    return EncoderSpec(
        "image",
        PatchInputSpec(project, layout, width, table),
        (layer,) * read_num_layers(config, vision, -1),
        f"{names.tower}{names.layers}",
        width,
        None,
        output,
        max_num_tokens=MAX_TILES * layout.num_tokens,
        prefixes=names.prefixes,
        modalities=("video",),
    )
