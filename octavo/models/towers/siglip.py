"""CLIP and SigLIP towers: LLaVA, PaliGemma, Gemma 3, Idefics 3, SmolVLM, Phi-4 multimodal.

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
from octavo.models.phi4mm import IMAGE_PREFIXES
from octavo.models.towers.anyres import AnyresLayout, Size
from octavo.models.towers.hd import MAX_TILES, HDLayout
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
_IDEFICS = _SIGLIP | {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_CLIP = _SIGLIP | {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_LLAVA = _CLIP | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
_LLAVA |= {"num_attention_heads": 16, "image_size": 336, "patch_size": 14}
_PALIGEMMA = _SIGLIP | {"hidden_size": 1152, "intermediate_size": 4096, "num_hidden_layers": 27}
_PALIGEMMA |= {"num_attention_heads": 16, "patch_size": 14}
_PHI4: dict[str, Any] = _PALIGEMMA | {"intermediate_size": 4304, "image_size": 448}
_PHI4 |= {"feature_layer": -2}
_NEXT = {"image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]}
_SIDES = range(384, 2305, 384)
_ONEVISION: dict[str, Any] = {"image_grid_pinpoints": [[y, x] for y in _SIDES for x in _SIDES]}
_ONEVISION |= {"vision_feature_layer": -1}
_MAX_SIDE = 2**14
_MAX_LIMIT = 1024


@dataclass(frozen=True, kw_only=True)
class _Tower:
    """Tower with the names of CLIP's or SigLIP's modules, which begin with `prefix`."""

    vision: ConfigJson
    num_layers: int
    layout: TileLayout | AnyresLayout | HDLayout
    output: ProjectorSpec
    max_tiles: int
    """Most tiles of a picture."""
    prefix: str = "vision_tower."
    normed: bool = True
    """True if a norm follows the last layer."""
    reads_videos: bool = False
    """True if it also reads frames of videos, which are pictures."""
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
            modalities=("video",) if self.reads_videos else (),
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
        reads_videos=True,
        prefix="model.vision_model.",
    ).read()


_ACTIVATIONS: dict[str, ProjectorActivation] = {"gelu": "gelu", "silu": "silu"}
_ACTIVATIONS |= {"relu": "relu", "gelu_pytorch_tanh": "gelu_tanh"}


_LINEARS = "multi_modal_projector.linear_1", "multi_modal_projector.linear_2"


def two_layers(
    config: ConfigJson, inputs: int, *, bias: bool, modules: tuple[str, str] = _LINEARS
) -> tuple[tuple[LinearSpec, ProjectorActivation | None], ...]:
    """Return the layers of LLaVA's projector, with an activation between them."""
    size = config.integer("hidden_size")
    bias = config.flag("multimodal_projector_bias", bias)
    first, second = (
        LinearSpec(((module, size),), width, bias)
        for module, width in zip(modules, (inputs, size), strict=True)
    )
    activation = config.choice("projector_hidden_act", _ACTIVATIONS, "gelu")
    return (first, activation), (second, None)


def _read_llava(config: ConfigJson, strategy: str = "default") -> _Tower:
    """Return CLIP, or SigLIP, up to a layer, and two linear layers.

    Args:
        config: config.json.
        strategy: vision_feature_select_strategy of a config without it.
    """
    kinds = {"clip_vision_model": _LLAVA, "siglip_vision_model": _SIGLIP}
    section = config.section("vision_config")
    kind = section.choice("model_type", {name: name for name in kinds}, "clip_vision_model")
    vision = read_vision(config, kinds[kind])
    select = {name: name for name in ("default", "full")}
    layout = _read_layout(vision)
    drops = config.choice("vision_feature_select_strategy", select, strategy) == "default"
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
    )


def read_llava(config: ConfigJson) -> EncoderSpec:
    """Read the tower of LLaVA 1.5."""
    return _read_llava(config).read()


def read_resolutions(config: ConfigJson, size: int) -> tuple[Size, ...]:
    """Return image_grid_pinpoints: pairs of height and width, multiples of the size of a tile."""
    name = "image_grid_pinpoints"
    pairs = config.get(name) or ()
    whole = [pair for pair in pairs if isinstance(pair, list | tuple) and len(pair) == 2]
    sides = [side for pair in whole for side in pair]
    if (
        not whole
        or len(whole) != len(pairs)
        or any(type(n) is not int or not 0 < n <= _MAX_SIDE or n % size for n in sides)
    ):
        raise config.error(name, f"it must list pairs of multiples of {size}, the size of a tile")
    return tuple((height, width) for height, width in whole)


def _with_tiles(tower: _Tower, config: ConfigJson, limit: int | None) -> EncoderSpec:
    """Return a tower that reads pictures of several tiles."""
    tiles = tower.layout
    assert isinstance(tiles, TileLayout)
    if tiles.has_class and not tiles.drops_class:
        raise config.error("vision_feature_select_strategy", "only default is supported")
    layout = AnyresLayout(tiles, read_resolutions(config, tiles.size), limit)
    output = replace(tower.output, gathers=False, newline="image_newline")
    spec = replace(tower, layout=layout, output=output, max_tiles=layout.max_tiles).read()
    return replace(
        spec,
        prefixes=(*spec.prefixes, ("image_newline", "model.image_newline")),
        max_num_rows=layout.max_rows,
    )


def read_llava_next(config: ConfigJson) -> EncoderSpec:
    """Read the tower of LLaVA-NeXT (LLaVA 1.6)."""
    return _with_tiles(_read_llava(config.filled(_NEXT)), config.filled(_NEXT), None)


def read_limit(config: ConfigJson) -> int:
    """Return vision_aspect_ratio, anyres_max_N: the most tiles before pictures are shrunk."""
    text = config.get("vision_aspect_ratio") or "anyres_max_9"
    number = str(text).removeprefix("anyres_max_")
    if not number.isascii() or not number.isdigit() or not 0 < int(number) <= _MAX_LIMIT:
        raise config.error(
            "vision_aspect_ratio", f"only anyres_max_1 to anyres_max_{_MAX_LIMIT} are supported"
        )
    return int(number)


def read_llava_onevision(config: ConfigJson) -> EncoderSpec:
    """Read the tower of LLaVA-OneVision: SigLIP, and pictures of many tiles are shrunk."""
    config = config.filled(_ONEVISION)
    tower = replace(_read_llava(config, "full"), reads_videos=True)
    return _with_tiles(tower, config, read_limit(config))


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


_PHI4_PREFIX = "model.embed_tokens_extend.image_embed."


def read_hd_layout(config: ConfigJson) -> HDLayout:
    """Return the division of pictures of Phi-4 multimodal."""
    vision = read_vision(config, _PHI4)
    size, patch = read_size(vision, "image_size"), read_size(vision, "patch_size")
    if size % (2 * patch):
        raise vision.error("image_size", "it must have an even number of patches on each axis")
    vision.refuse("crop_size", size, "it must be image_size")
    return HDLayout(vision.integer("num_channels"), size, patch)


def read_phi4(config: ConfigJson) -> EncoderSpec:
    """Read the tower of Phi-4 multimodal, with its projection of two layers."""
    vision = read_vision(config, _PHI4)
    inputs, size = vision.integer("hidden_size"), config.integer("hidden_size")
    up, down = (
        LinearSpec(((f"{_PHI4_PREFIX}img_projection_{name}", size),), width, bias=True)
        for name, width in (("up", inputs), ("down", size))
    )
    separators = (
        (f"{_PHI4_PREFIX}sub_img_feature_extensor", (1, 1, 1, inputs)),
        (f"{_PHI4_PREFIX}global_img_feature_extensor", (1, 1, inputs)),
    )
    chosen = config.replaced("vision_feature_layer", vision.get("feature_layer"))
    spec = _Tower(
        vision=vision,
        num_layers=read_num_layers(chosen, vision, -2),
        layout=read_hd_layout(config),
        output=ProjectorSpec(((up, "gelu"), (down, None)), averages=4, separators=separators),
        max_tiles=1 + MAX_TILES,
        prefix=f"{_PHI4_PREFIX}img_processor.",
        normed=False,
    ).read()
    return replace(spec, prefixes=IMAGE_PREFIXES)
