"""CLIP and SigLIP towers: LLaVA, PaliGemma, Gemma 3, Idefics 3, SmolVLM.

Radford et al., arXiv:2103.00020; Zhai et al., arXiv:2303.15343.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.encoder_input import PatchInputSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import LayerNormSpec, RMSNormSpec
from octavo.models.blocks.projector import ProjectorActivation, ProjectorSpec
from octavo.models.encoder import EncoderSpec, Sight
from octavo.models.towers.pixels import TileLayout
from octavo.models.towers.vit import (
    ViTLayer,
    read_heads,
    read_num_layers,
    read_size,
    read_vision,
)

TOWER_PREFIXES = tuple(
    ("vision_tower.", f"{outer}vision_tower.{inner}")
    for outer in ("", "model.")
    for inner in ("", "vision_model.")
    if outer or inner
)
"""Other beginnings of the names of towers."""
PROJECTOR_PREFIX = ("multi_modal_projector.", "model.multi_modal_projector.")

_SIGLIP: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
_SIGLIP |= {"num_attention_heads": 12, "image_size": 224, "patch_size": 16, "num_channels": 3}
_SIGLIP |= {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_IDEFICS = _SIGLIP | {"hidden_size": 1152, "patch_size": 32}
_CLIP = _SIGLIP | {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_LLAVA = _CLIP | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
_LLAVA |= {"num_attention_heads": 16, "image_size": 336, "patch_size": 14}
_PALIGEMMA = _SIGLIP | {"hidden_size": 1152, "intermediate_size": 4096, "num_hidden_layers": 27}
_PALIGEMMA |= {"num_attention_heads": 16, "patch_size": 14}


@dataclass(frozen=True, kw_only=True)
class _Tower:
    """Tower with the names of CLIP's or SigLIP's modules, which begin with `prefix`."""

    vision: ConfigJson
    num_layers: int
    layout: TileLayout
    output: ProjectorSpec
    max_tiles: int
    """Most tiles of a picture."""
    prefix: str = "vision_tower."
    normed: bool = True
    """True if a norm follows the last layer."""
    sight: Sight | None = None

    def read(self) -> EncoderSpec:
        """Return the tower."""
        vision, layout, prefix = self.vision, self.layout, self.prefix
        heads, eps = read_heads(vision), vision.number("layer_norm_eps")
        size, embeddings = heads.hidden_size, f"{prefix}embeddings."
        project = LinearSpec(
            ((f"{embeddings}patch_embedding", size),),
            layout.channels * layout.patch**2,
            bias=not layout.has_class,
            stored=(layout.channels, layout.patch, layout.patch),
        )
        table: tuple[tuple[str, tuple[int, ...]], ...]
        positions = layout.num_positions, size
        table = ((f"{embeddings}position_embedding.weight", positions),)
        norm = None
        if layout.has_class:
            table += ((f"{embeddings}class_embedding", (size,)),)
            norm = LayerNormSpec(f"{prefix}pre_layrnorm", size, eps)
        layer = ViTLayer().read(vision, heads, vision.integer("intermediate_size"), eps)
        last = LayerNormSpec(f"{prefix}post_layernorm", size, eps) if self.normed else None
        return EncoderSpec(
            "image",
            PatchInputSpec(project, layout, size, table, norm),
            (layer,) * self.num_layers,
            f"{prefix}encoder.layers.{{}}.",
            size,
            last,
            self.output,
            max_num_tokens=self.max_tiles * layout.num_tokens,
            prefixes=(*TOWER_PREFIXES, PROJECTOR_PREFIX),
            sight=self.sight,
        )


def _read_layout(vision: ConfigJson, *, group: int = 1) -> TileLayout:
    """Return the division of pictures of the tower's own size."""
    size, patch = read_size(vision, "image_size"), read_size(vision, "patch_size")
    if patch > size or (size // patch) % group:
        raise vision.error("image_size", f"it must have a multiple of {group} patches on each axis")
    return TileLayout(vision.integer("num_channels"), size, patch, group=group)


def read_idefics3(config: ConfigJson) -> EncoderSpec:
    """Read the tower of Idefics 3 or SmolVLM, with its connector (pixel shuffle, one layer).

    All tiles have the tower's own size, as the processors of these models make them. transformers
    computes the position of a patch from its fraction of the side; for sides such as 19 or 25,
    which no published model has, rounding exchanges some of its positions.
    """
    vision = read_vision(config, _IDEFICS)
    factor = config.integer("scale_factor", default=2)
    layout = _read_layout(vision, group=factor)
    module = "model.connector.modality_projection.proj"
    inputs = vision.integer("hidden_size") * factor**2
    linear = LinearSpec(((module, config.integer("hidden_size")),), inputs)
    return _Tower(
        vision=vision,
        num_layers=read_num_layers(config, vision, -1),
        layout=layout,
        output=ProjectorSpec(((linear, None),), gathers=True, group=factor**2),
        max_tiles=17,
        prefix="model.vision_model.",
    ).read()


_ACTIVATIONS: dict[str, ProjectorActivation] = {"gelu": "gelu", "silu": "silu"}
_ACTIVATIONS |= {"relu": "relu", "gelu_pytorch_tanh": "gelu_tanh"}


def two_layers(
    config: ConfigJson, inputs: int, *, bias: bool
) -> tuple[tuple[LinearSpec, ProjectorActivation | None], ...]:
    """Return the layers of LLaVA's projector, with an activation between them."""
    size = config.integer("hidden_size")
    bias = config.flag("multimodal_projector_bias", bias)
    first, second = (
        LinearSpec(((f"multi_modal_projector.linear_{i}", size),), width, bias)
        for i, width in ((1, inputs), (2, size))
    )
    activation = config.choice("projector_hidden_act", _ACTIVATIONS, "gelu")
    return (first, activation), (second, None)


def read_llava(config: ConfigJson) -> EncoderSpec:
    """Read the tower of LLaVA 1.5: CLIP, or SigLIP, up to a layer, and two linear layers."""
    kinds = {"clip_vision_model": _LLAVA, "siglip_vision_model": _SIGLIP}
    section = config.section("vision_config")
    kind = section.choice("model_type", {name: name for name in kinds}, "clip_vision_model")
    vision = read_vision(config, kinds[kind])
    select = {name: name for name in ("default", "full")}
    layout = _read_layout(vision)
    drops = config.choice("vision_feature_select_strategy", select, "default") == "default"
    if kind == "clip_vision_model":
        layout = replace(layout, has_class=True, drops_class=drops)
    elif drops:
        raise config.error("vision_feature_select_strategy", "SigLIP needs full")
    return _Tower(
        vision=vision,
        num_layers=read_num_layers(config, vision, -2),
        layout=layout,
        output=ProjectorSpec(
            two_layers(config, vision.integer("hidden_size"), bias=True), gathers=True
        ),
        max_tiles=1,
        normed=False,
    ).read()


def read_paligemma(config: ConfigJson) -> EncoderSpec:
    """Read the tower of PaliGemma 1 or 2, with its projection."""
    vision = read_vision(config, _PALIGEMMA)
    size = config.integer("projection_dim", default=config.integer("hidden_size"))
    inputs = vision.integer("hidden_size")
    linear = LinearSpec((("multi_modal_projector.linear", size),), inputs, bias=True)
    return _Tower(
        vision=vision,
        num_layers=read_num_layers(config, vision, -1),
        layout=_read_layout(vision),
        output=ProjectorSpec(((linear, None),), gathers=True),
        max_tiles=1,
        sight=Sight("prompt", widens=True),
    ).read()


def read_gemma3(config: ConfigJson) -> EncoderSpec:
    """Read the tower of Gemma 3: the means of squares of patches are normed and projected."""
    vision = read_vision(config, _SIGLIP)
    layout = _read_layout(vision)
    rows = config.integer("mm_tokens_per_image", default=256)
    group = layout.side // max(1, int(rows**0.5))
    if group < 1 or (layout.side // group) ** 2 != rows or layout.side % group:
        raise config.error("mm_tokens_per_image", "it must be the number of squares of patches")
    size, inputs = config.integer("hidden_size"), vision.integer("hidden_size")
    eps = vision.number("layer_norm_eps")
    module = "multi_modal_projector.mm_input_projection_weight"
    linear = LinearSpec(((module, size),), inputs, layout="conv1d", bare=True)
    norm = RMSNormSpec("multi_modal_projector.mm_soft_emb_norm", inputs, eps, 1.0)
    return _Tower(
        vision=vision,
        num_layers=read_num_layers(config, vision, -1),
        layout=replace(layout, group=group, averages=True),
        output=ProjectorSpec(((linear, None),), norm=norm, averages=group**2),
        max_tiles=5,
        sight=Sight("item", rows),
    ).read()
