"""Tower of Gemma 4 (E2B, E4B, 26B-A4B, 31B): patches of pictures of any aspect ratio.

Source: `Gemma4VisionModel` and `Gemma4MultimodalEmbedder` of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.attention import AttentionSpec, StepRope
from octavo.models.blocks.clipped import ClippedLinearSpec
from octavo.models.blocks.encoder_input import Arrays, EncoderItem, PatchInputSpec
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.mlp import MLPSpec
from octavo.models.blocks.norm import RMSNormSpec, StandardSpec
from octavo.models.blocks.projector import ProjectorSpec
from octavo.models.encoder import EncoderSpec, Sight
from octavo.models.families.base import GATED, read_activation, read_num_layers
from octavo.models.towers.pixels import Floats, group_tokens, rates, refuse_shape
from octavo.models.towers.vit import read_theta, read_vision

MOST_ROWS = 1120
"""Largest number of rows of a picture that processors allow."""

_VISION: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16}
_VISION |= {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64}
_VISION |= {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6}
_VISION |= {"pooling_kernel_size": 3, "patch_size": 16, "position_embedding_size": 10240}
_VISION |= {"rope_theta": 100.0}
_PREFIX = "vision_tower."
_PREFIXES = ((_PREFIX, f"model.{_PREFIX}"), ("embed_vision.", "model.embed_vision."))


@dataclass(frozen=True)
class PositionedLayout:
    """Patches of a picture row by row, with their places.

    The item's arrays are `pixel_values`, float32 [T, numbers of a patch] from 0 to 1, and
    `image_position_ids`, int64 [T, 2]: column and row of each patch.
    """

    numbers: int
    """Numbers of a patch."""
    group: int
    """Height and width of the squares of patches that become one row."""
    num_positions: int
    """Number of learned positions of an axis; those of columns are the first in the table."""
    head_size: int
    theta: float
    """Base of the rotary positions."""
    factor: float
    """Factor of the means of squares."""

    def sizes(self, data: Arrays) -> tuple[int, int]:
        """Implement `PatchLayout`."""
        tokens = check_places(data, self.numbers, self.num_positions, self.group)
        return tokens, tokens // self.group**2

    def read(self, data: Arrays) -> EncoderItem:
        """Implement `PatchLayout`."""
        width, height = (int(n) + 1 for n in data["image_position_ids"][-1])
        patches = data["pixel_values"].astype(np.float32, copy=False)
        return self._item(2 * (patches - np.float32(0.5)), height, width)

    def largest(self, num_tokens: int) -> EncoderItem:
        """Implement `PatchLayout`."""
        columns = num_tokens // self.group // self.group * self.group
        patches = np.zeros((columns * self.group, self.numbers), np.float32)
        item = self._item(patches, self.group, columns)
        item.arrays["places"] %= self.num_positions  # its line is longer than those of pictures
        return item

    def _item(self, patches: Floats, height: int, width: int) -> EncoderItem:
        places = places_of(height, width)
        squares = group_tokens(height, width, self.group).reshape(-1, self.group**2)
        half = self.head_size // 2
        speeds = rates(self.theta, np.arange(0, half, 2, dtype=np.float32) / np.float32(half))
        angles = (places[:, :, None].astype(np.float32) * speeds).astype(np.float64)
        rotary = np.concatenate([np.cos(angles), np.sin(angles)], 2).astype(np.float32)
        arrays: dict[str, NDArray[Any]] = {
            "places": (places + np.array([0, self.num_positions])).astype(np.int32),
            "shares": np.full(squares.shape, self.factor / self.group**2, np.float32),
        }
        return EncoderItem(
            len(squares),
            (np.array([len(patches)]),),
            numbers={"patches": patches},
            arrays=arrays,
            indices={"averaged_tokens": squares.astype(np.int32)},
            rotary=rotary,
        )


def check_places(data: Arrays, numbers: int, num_positions: int, group: int = 1) -> int:
    """Return the number of patches of an item of `pixel_values` and `image_position_ids`.

    Args:
        data: the arrays, as `PositionedLayout` describes them.
        numbers: numbers of a patch.
        num_positions: most patches of a column or a row.
        group: height and width of the squares that the patches form.

    Raises:
        RequestError: the arrays have another form.
    """
    patches, places = data["pixel_values"], data["image_position_ids"]
    tokens = len(patches) if patches.ndim == 2 else 0
    valid = places.shape == (tokens, 2) and places.dtype == np.int64 and tokens > 0
    if valid:
        width, height = (int(n) + 1 for n in places[-1])
        valid = (
            min(width, height) > 0
            and max(width, height) <= num_positions
            and width % group == height % group == 0
            and width * height == tokens
            and bool((places == places_of(height, width)).all())
        )
    if not valid or patches.shape[1] != numbers:
        squares = f", in squares of {group} x {group}" if group > 1 else ""
        raise refuse_shape(
            patches, "pixel_values", f"patches of {numbers} numbers row by row{squares}"
        )
    return tokens


def read_sight(config: ConfigJson) -> Sight | None:
    """Return the rule for the tokens of a picture, which only the large models have.

    It is that of `create_masks_for_generate` of transformers: layers without a window are causal.
    """
    if config.get("use_bidirectional_attention") != "vision":
        return None
    return Sight("item", MOST_ROWS, layers="sliding")


def places_of(height: int, width: int) -> NDArray[np.int64]:
    """Return the column and the row of each patch, row by row: int64 [height * width, 2]."""
    rows, columns = np.divmod(np.arange(height * width), width)
    return np.stack([columns, rows], 1)


def read_gemma4(config: ConfigJson) -> EncoderSpec:
    """Read the tower of Gemma 4."""
    vision = read_vision(config, _VISION)
    size, head = vision.integer("hidden_size"), vision.integer("head_dim")
    heads, kv_heads = (vision.integer(f"num_{n}_heads") for n in ("attention", "key_value"))
    if heads % kv_heads:
        raise vision.error("num_key_value_heads", "it must divide num_attention_heads")
    if head % 4:
        raise vision.error("head_dim", "it must be a multiple of 4")
    vision.refuse("attention_bias", False, "biases of attention are not supported")
    group = vision.integer("pooling_kernel_size", least=2)
    inner, eps = vision.integer("intermediate_size"), vision.number("rms_norm_eps")
    numbers, positions = (
        3 * vision.integer("patch_size") ** 2,
        vision.integer("position_embedding_size"),
    )
    clipped = vision.flag("use_clipped_linears", False)

    def linear(inputs: int, *modules: tuple[str, int]) -> LinearSpec:
        if clipped:
            return ClippedLinearSpec(modules, inputs)
        return LinearSpec(tuple((f"{name}.linear", n) for name, n in modules), inputs)

    qkv = (("q", heads), ("k", kv_heads), ("v", kv_heads))
    attention = AttentionSpec(
        linear(size, *((f"self_attn.{name}_proj", n * head) for name, n in qkv)),
        linear(heads * head, ("self_attn.o_proj", size)),
        heads,
        kv_heads,
        head,
        1.0,
        StepRope(parts=2),
        q_norm=RMSNormSpec("self_attn.q_norm", head, eps),
        k_norm=RMSNormSpec("self_attn.k_norm", head, eps),
        v_norm=RMSNormSpec(None, head, eps),
        causal=False,
    )
    mlp = MLPSpec(
        linear(size, ("mlp.gate_proj", inner), ("mlp.up_proj", inner)),
        linear(inner, ("mlp.down_proj", size)),
        read_activation(vision, "hidden_activation", GATED),
        gated=True,
    )
    before, between, *after = (
        RMSNormSpec(f"{norm}_layernorm", size, eps)
        for norm in ("input", "pre_feedforward", "post_attention", "post_feedforward")
    )
    layer = LayerSpec.of(attention, mlp, before, between, after[0], after[1])
    factor = size**0.5
    standard = None
    if vision.flag("standardize", False):
        standard = StandardSpec(f"{_PREFIX}std_bias", f"{_PREFIX}std_scale", size, factor)
    outer = config.integer("hidden_size")
    output = ProjectorSpec(
        ((LinearSpec((("embed_vision.embedding_projection", outer),), size), None),),
        token_norm=standard,
        norm=RMSNormSpec(None, size, eps),
        averages=group**2,
    )
    embedder = f"{_PREFIX}patch_embedder."
    layout = PositionedLayout(numbers, group, positions, head, read_theta(vision), factor)
    return EncoderSpec(
        "image",
        PatchInputSpec(
            LinearSpec(((f"{embedder}input_proj", size),), numbers),
            layout,
            size,
            ((f"{embedder}position_embedding_table", (2, positions, size)),),
        ),
        (layer,) * read_num_layers(vision),
        f"{_PREFIX}encoder.layers.{{}}.",
        size,
        None,
        output,
        max_num_tokens=MOST_ROWS * group**2,
        prefixes=_PREFIXES,
        modalities=("video",),
        sight=read_sight(config),
    )
