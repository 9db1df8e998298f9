"""SigLIP towers (Zhai et al., arXiv:2303.15343): Idefics 3, SmolVLM."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.encoder_input import PatchInputSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import LayerNormSpec
from octavo.models.blocks.projector import ProjectorSpec
from octavo.models.encoder import EncoderSpec
from octavo.models.families.base import read_activation, read_num_layers
from octavo.models.towers.pixels import PixelLayout
from octavo.models.towers.vit import ACTIVATIONS, ViTLayer, read_heads

MAX_TILES = 64
"""Most tiles of a picture that a run must have room for."""


def _siglip(
    vision: ConfigJson, layout: PixelLayout, prefix: str, output: ProjectorSpec
) -> EncoderSpec:
    """Return a tower with the names of SigLIP's modules, which begin with `prefix`."""
    heads, eps = read_heads(vision), vision.number("layer_norm_eps", default=1e-6)
    size, embeddings = heads.hidden_size, f"{prefix}embeddings."
    layer = ViTLayer().read(
        heads,
        vision.integer("intermediate_size"),
        read_activation(vision, "hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
        eps,
    )
    kernel = layout.channels, layout.patch, layout.patch
    project = LinearSpec(
        ((f"{embeddings}patch_embedding", size),),
        layout.channels * layout.patch**2,
        bias=True,
        stored=kernel,
    )
    table = ((f"{embeddings}position_embedding.weight", layout.side**2),)
    return EncoderSpec(
        "image",
        PatchInputSpec(project, layout, size, table),
        (layer,) * read_num_layers(vision),
        f"{prefix}encoder.layers.{{}}.",
        size,
        LayerNormSpec(f"{prefix}post_layernorm", size, eps),
        output,
        max_num_tokens=MAX_TILES * layout.side**2,
    )


def read_idefics3(config: ConfigJson) -> EncoderSpec:
    """Read the tower of Idefics 3 or SmolVLM, with its connector (pixel shuffle, one layer).

    All tiles have the tower's own size, as the processors of these models make them. transformers
    computes the position of a patch from its fraction of the side; for sides such as 19 or 25,
    which no published model has, rounding exchanges some of its positions.
    """
    vision, factor = config.section("vision_config"), config.integer("scale_factor", default=2)
    layout = read_layout(vision, group=factor)
    inputs = vision.integer("hidden_size") * factor**2
    module = "model.connector.modality_projection.proj"
    linear = LinearSpec(((module, config.integer("hidden_size")),), inputs)
    output = ProjectorSpec(((linear, None),), gathers=factor > 1, group=factor**2)
    return _siglip(vision, layout, "model.vision_model.", output)


def read_layout(
    vision: ConfigJson,
    *,
    has_class: bool = False,
    group: int = 1,
    averages: bool = False,
) -> PixelLayout:
    """Return the division of pictures of the tower's own size; see `PixelLayout`."""
    size, patch = vision.integer("image_size"), vision.integer("patch_size")
    if patch > size or (size // patch) % group:
        raise vision.error("image_size", f"it must have a multiple of {group} patches on each axis")
    channels = vision.integer("num_channels", default=3)
    return PixelLayout(channels, size, patch, has_class, group, averages)
