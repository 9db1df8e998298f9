"""Towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5.

Wang et al., arXiv:2409.12191; Bai et al., arXiv:2502.13923.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.encoder_input import PatchInputSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import LayerNormSpec, NormSpec
from octavo.models.blocks.projector import ProjectorSpec
from octavo.models.encoder import EncoderSpec
from octavo.models.families import base
from octavo.models.towers.pixels import GridLayout
from octavo.models.towers.vit import (
    ViTLayer,
    make_norm,
    read_heads,
    read_size,
    read_theta,
    read_vision,
)

MAX_PATCHES = 16384
"""Most patches of a picture: with patches of 14 pixels 1792 x 1792 pixels."""
_PREFIX = "visual."
_PREFIXES = ((_PREFIX, "model.visual."),)
_EPS = 1e-6

_COMMON: dict[str, Any] = {"num_heads": 16, "in_channels": 3, "spatial_merge_size": 2}
_COMMON |= {"temporal_patch_size": 2}
_QWEN2 = _COMMON | {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "hidden_act": "quick_gelu"}
_QWEN2 |= {"patch_size": 14}
_QWEN2_5 = _COMMON | {"depth": 32, "hidden_size": 3584, "hidden_act": "silu", "patch_size": 14}
_QWEN2_5 |= {"intermediate_size": 3420, "window_size": 112}
_QWEN2_5 |= {"fullatt_block_indexes": [7, 15, 23, 31]}
_QWEN3 = _COMMON | {"depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh"}
_QWEN3 |= {"intermediate_size": 4304, "patch_size": 16, "num_position_embeddings": 2304}
_QWEN3 |= {"deepstack_visual_indexes": [8, 16, 24]}

_LAYER = ViTLayer(
    qkv_modules=("attn.qkv",), o_module="attn.proj", norm_modules=("norm1", "norm2"), rotates=True
)


def _read_layers(vision: ConfigJson, name: str, depth: int) -> tuple[int, ...]:
    """Return the indices of layers in a field."""
    found = vision.get(name) or []
    if not isinstance(found, list) or any(
        not isinstance(i, int) or not 0 <= i < depth for i in found
    ):
        raise vision.error(name, f"it must list layers from 0 to {depth - 1}")
    return tuple(found)


def _merger(
    module: str,
    names: tuple[str, str],
    size: int,
    group: int,
    outputs: int,
    *,
    token_norm: NormSpec | None = None,
    norm: NormSpec | None = None,
    gathers: bool = False,
) -> ProjectorSpec:
    """Return the two layers that map a square of patches to a row."""
    inputs = size * group
    first = LinearSpec(((f"{module}.{names[0]}", inputs),), inputs, bias=True)
    second = LinearSpec(((f"{module}.{names[1]}", outputs),), inputs, bias=True)
    return ProjectorSpec(
        ((first, "gelu"), (second, None)), token_norm, norm, gathers=gathers, group=group
    )


def _read(
    vision: ConfigJson,
    layer: ViTLayer,
    inner_size: int,
    output: ProjectorSpec,
    *,
    bias: bool = False,
    window: int | None = None,
    side: int | None = None,
    segments: tuple[int, ...] = (),
    taps: tuple[tuple[int, ProjectorSpec], ...] = (),
) -> EncoderSpec:
    """Return a tower.

    Args:
        vision: vision_config; hidden_size is the size of the tower.
        layer: its layers.
        inner_size: size of the MLPs.
        output: the merger.
        bias: True if the projection of patches has a bias.
        window: see `GridLayout`.
        side: see `GridLayout`.
        segments: see `EncoderSpec`.
        taps: see `EncoderSpec`.
    """
    heads, patch = read_heads(vision, "num_heads"), read_size(vision, "patch_size")
    size, channels = heads.hidden_size, vision.integer("in_channels")
    if heads.head_size % 4:
        raise vision.error("num_heads", "the size of a head must be a multiple of 4")
    kernel = channels, vision.integer("temporal_patch_size"), patch, patch
    numbers, merge = math.prod(kernel), vision.integer("spatial_merge_size")
    layout = GridLayout(
        numbers, merge, heads.head_size, read_theta(vision), window=window, side=side
    )
    module = f"{_PREFIX}patch_embed.proj"
    project = LinearSpec(((module, size),), numbers, bias, stored=kernel)
    table = () if side is None else ((f"{_PREFIX}pos_embed.weight", (side**2, size)),)
    return EncoderSpec(
        "image",
        PatchInputSpec(project, layout, size, table),
        (layer.read(vision, heads, inner_size, _EPS),) * base.read_num_layers(vision, "depth"),
        f"{_PREFIX}blocks.{{}}.",
        size,
        None,
        output,
        max_num_tokens=MAX_PATCHES,
        segments=segments,
        taps=taps,
        prefixes=_PREFIXES,
        modalities=("video",),
    )


def read_qwen2(config: ConfigJson) -> EncoderSpec:
    """Read the tower of Qwen2-VL."""
    vision = read_vision(config, _QWEN2)
    size = vision.integer("embed_dim")
    inner, group = size * vision.integer("mlp_ratio"), vision.integer("spatial_merge_size") ** 2
    norm = LayerNormSpec(f"{_PREFIX}merger.ln_q", size, _EPS)
    names, outputs = ("mlp.0", "mlp.2"), vision.integer("hidden_size", default=3584)
    output = _merger(f"{_PREFIX}merger", names, size, group, outputs, token_norm=norm)
    return _read(vision.replaced("hidden_size", size), _LAYER, inner, output)


def read_qwen2_5(config: ConfigJson) -> EncoderSpec:
    """Read the tower of Qwen2.5-VL: most layers see windows, all have RMS norms."""
    vision = read_vision(config, _QWEN2_5)
    merge, patch = vision.integer("spatial_merge_size"), read_size(vision, "patch_size")
    depth = base.read_num_layers(vision, "depth")
    window = vision.integer("window_size") // merge // patch
    if not window:
        raise vision.error("window_size", f"a window must have at least {merge * patch} pixels")
    whole = _read_layers(vision, "fullatt_block_indexes", depth)
    size = vision.integer("hidden_size")
    outputs = vision.integer("out_hidden_size", default=3584)
    output = _merger(
        f"{_PREFIX}merger",
        ("mlp.0", "mlp.2"),
        size,
        merge**2,
        outputs,
        token_norm=make_norm("rms", f"{_PREFIX}merger.ln_q", size, _EPS),
        gathers=True,
    )
    mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    return _read(
        vision,
        replace(_LAYER, mlp_modules=mlp, norm="rms"),
        vision.integer("intermediate_size"),
        output,
        window=window,
        segments=tuple(0 if i in whole else 1 for i in range(depth)),
    )


def _read_qwen3(vision: ConfigJson, taps: tuple[int, ...]) -> EncoderSpec:
    """Return a tower with interpolated positions, and mergers after the layers `taps`."""
    group, size = vision.integer("spatial_merge_size") ** 2, vision.integer("hidden_size")
    outputs = vision.integer("out_hidden_size", default=3584)
    names = "linear_fc1", "linear_fc2"
    token_norm = LayerNormSpec(f"{_PREFIX}merger.norm", size, _EPS)
    output = _merger(f"{_PREFIX}merger", names, size, group, outputs, token_norm=token_norm)
    mergers = []
    for i, layer in enumerate(taps):
        module = f"{_PREFIX}deepstack_merger_list.{i}"
        norm = LayerNormSpec(f"{module}.norm", size * group, _EPS)
        mergers.append((layer, _merger(module, names, size, group, outputs, norm=norm)))
    positions = vision.integer("num_position_embeddings")
    side = math.isqrt(positions)
    if side**2 != positions:
        raise vision.error("num_position_embeddings", "it must be a square")
    return _read(
        vision,
        replace(_LAYER, mlp_modules=("mlp.linear_fc1", "mlp.linear_fc2")),
        vision.integer("intermediate_size"),
        output,
        bias=True,
        side=side,
        taps=tuple(mergers),
    )


def read_qwen3(config: ConfigJson) -> EncoderSpec:
    """Read the tower of Qwen3-VL, whose further columns are added in the decoder's layers."""
    vision = read_vision(config, _QWEN3)
    depth = base.read_num_layers(vision, "depth")
    return _read_qwen3(vision, _read_layers(vision, "deepstack_visual_indexes", depth))


def read_qwen3_5(config: ConfigJson) -> EncoderSpec:
    """Read the tower of Qwen3.5."""
    return _read_qwen3(read_vision(config, _QWEN3), ())
