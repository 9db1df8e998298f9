"""Rows of every tower, equal to those of transformers in float32."""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution

from octavo.attention.cpu import CPUAttention
from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import RequestError
from octavo.kernels.native import NativeOps
from octavo.kernels.torch_tensors import as_torch
from octavo.messages import EncoderSlice, MultiModalFeatureSpec, PlaceholderRange, TensorData
from octavo.models import encoder as encoders
from octavo.models.decoder import DecoderModel
from octavo.models.encoder import EncoderSpec
from octavo.models.loader import load_model
from octavo.models.registry import complete_config
from octavo.models.spec import ModelSpec
from octavo.models.towers.registry import with_encoders
from octavo.worker.encoder_runner import EncoderRunner
from tests.models.harness import make_hf, spec_of
from tests.pictures import PHI4_SOUNDS, hd_arrays

TEXT: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48}
TEXT |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT |= {"max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MROPE = TEXT | {"head_dim": 8}
MROPE["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}

SMALL = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 3, "image_size": 24, "patch_size": 4}
WIDE = {"hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2}
WIDE |= {"num_attention_heads": 2, "image_size": 19, "patch_size": 2}
ODD = {"hidden_size": 39, "intermediate_size": 41, "num_hidden_layers": 2}
ODD |= {"num_attention_heads": 3, "image_size": 32, "patch_size": 5, "num_channels": 1}

QWEN = {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 40}
QWEN |= {"patch_size": 4, "out_hidden_size": 32}
QWEN_WIDE = QWEN | {"depth": 2, "hidden_size": 80, "num_heads": 1, "patch_size": 3}
QWEN_ODD = QWEN | {"hidden_size": 36, "num_heads": 3, "intermediate_size": 41}
QWEN_ODD |= {"spatial_merge_size": 1, "temporal_patch_size": 1, "in_channels": 1}

Arrays = dict[str, np.ndarray[Any, Any]]
Maker = Callable[[np.random.Generator, dict[str, Any]], list[Arrays]]


@dataclass(frozen=True)
class Case:
    """A model, and the arrays of some pictures."""

    architecture: str
    config: dict[str, Any]
    pictures: Maker
    features: Callable[[Any, Arrays], Tensor]


def normal(random: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return random.standard_normal(shape).astype(np.float32)


def tiles(*counts: int) -> Maker:
    """Return a maker of pictures with these numbers of tiles."""

    def make(random: np.random.Generator, vision: dict[str, Any]) -> list[Arrays]:
        size = vision["image_size"]
        size = size[0] if isinstance(size, list) else size
        shape = vision.get("num_channels", 3), size, size
        return [{"pixel_values": normal(random, n, *shape)} for n in counts]

    return make


def grids(*grids: tuple[int, int, int]) -> Maker:
    """Return a maker of patches in grids of frames, rows and columns of squares."""

    def make(random: np.random.Generator, vision: dict[str, Any]) -> list[Arrays]:
        merge = vision.get("spatial_merge_size", 2)
        numbers = vision.get("temporal_patch_size", 2) * vision.get("in_channels", 3)
        numbers *= vision["patch_size"] ** 2
        result = []
        for frames, rows, columns in grids:
            grid = np.array([frames, rows * merge, columns * merge])
            patches = normal(random, int(grid.prod()), numbers)
            result.append({"pixel_values": patches, "image_grid_thw": grid})
        return result

    return make


def sizes(*sizes: tuple[int, int]) -> Maker:
    """Return a maker of pictures with rows and columns of pairs of patches."""

    def make(random: np.random.Generator, vision: dict[str, Any]) -> list[Arrays]:
        side = 2 * vision["patch_size"]
        return [
            {
                "pixel_values": normal(random, 3, rows * side, columns * side),
                "image_sizes": np.array([rows * side, columns * side]),
            }
            for rows, columns in sizes
        ]

    return make


def sized_tiles(*sizes: tuple[int, int]) -> Maker:
    """Return a maker of pictures with these heights and widths, as a whole and in tiles."""

    def make(random: np.random.Generator, vision: dict[str, Any]) -> list[Arrays]:
        side, result = vision["image_size"], []
        config = next(
            case.config
            for case in CASES.values()
            if case.config["vision_config"] is vision and "image_grid_pinpoints" in case.config
        )
        for size in sizes:
            best = select_best_resolution(size, config["image_grid_pinpoints"])
            count = 1 + best[0] * best[1] // side**2
            shape = count, vision.get("num_channels", 3), side, side
            pixels = normal(random, *shape)
            result.append({"pixel_values": pixels, "image_sizes": np.array(size)})
        return result

    return make


def tile_features(model: Any, picture: Arrays) -> Tensor:
    pixels = torch.from_numpy(picture["pixel_values"])
    if type(model).__name__.startswith(("SmolVLM", "Idefics3")):
        pixels = pixels[None]
    options = {}
    if type(model).__name__.startswith(("Llava", "InternVL")):
        config = model.config
        options["vision_feature_layer"] = config.vision_feature_layer
        options["vision_feature_select_strategy"] = config.vision_feature_select_strategy
    found = model.model.get_image_features(pixels, **options).pooler_output
    return torch.cat(list(found))


def grid_features(model: Any, picture: Arrays) -> Tensor:
    pixels, grid = (torch.from_numpy(picture[k]) for k in ("pixel_values", "image_grid_thw"))
    found = model.model.visual(pixels, grid_thw=grid[None])
    more = getattr(found, "deepstack_features", None) or []
    return torch.cat([found.pooler_output, *more], 1)


def size_features(model: Any, picture: Arrays) -> Tensor:
    pixels, sizes = (torch.from_numpy(picture[k])[None] for k in ("pixel_values", "image_sizes"))
    options = {"vision_feature_layer": model.config.vision_feature_layer}
    if hasattr(model.config, "vision_feature_select_strategy"):
        options["vision_feature_select_strategy"] = model.config.vision_feature_select_strategy
    if hasattr(model.config, "vision_aspect_ratio"):
        options["vision_aspect_ratio"] = model.config.vision_aspect_ratio
    found = model.model.get_image_features(pixels, image_sizes=sizes, **options)
    return torch.cat(list(found.pooler_output))


def squares(*squares: tuple[int, int]) -> Maker:
    """Return a maker of patches with their places, in rows and columns of squares."""

    def make(random: np.random.Generator, vision: dict[str, Any]) -> list[Arrays]:
        group, side = vision["pooling_kernel_size"], vision["patch_size"]
        if "mm_embed_dim" in vision:  # a square is one patch
            group, side = 1, group * side
        numbers = 3 * side**2
        result = []
        for rows, columns in squares:
            at, width = np.arange(rows * columns * group**2), columns * group
            patches = random.random((len(at), numbers), np.float32)
            places = np.stack([at % width, at // width], 1)
            result.append({"pixel_values": patches, "image_position_ids": places})
        return result

    return make


def square_features(model: Any, picture: Arrays) -> Tensor:
    pixels, places = (torch.from_numpy(picture[k])[None] for k in picture)
    return torch.cat(list(model.model.get_image_features(pixels, places).pooler_output))


def barred_tiles(*sizes: tuple[int, int, int, int]) -> Maker:
    """Return a maker of pictures with rows and columns of tiles, and of patches before bars."""

    def make(random: np.random.Generator, vision: dict[str, Any]) -> list[Arrays]:
        side, result = vision["image_size"], []
        for rows, columns, *seen in sizes:
            shape = 1 + rows * columns, vision.get("num_channels", 3), side, side
            size = np.array([rows * side, columns * side])
            arrays = {"image_sizes": size, "seen_patches": np.array(seen)}
            result.append({"image_pixel_values": normal(random, *shape), **arrays})
        return result

    return make


def barred_features(model: Any, picture: Arrays) -> Tensor:
    embed = model.model.embed_tokens_extend.image_embed
    given = hd_arrays([picture], model.config.vision_config.to_dict())
    half = (given["seen_patches"][0] + 1) // 2
    base = embed.num_img_tokens
    count = int(half[0] * (half[1] + 1)) + 1 + base + int(base**0.5)
    ids = torch.full((1, count), model.config.vision_config.image_token_id)
    del given["seen_patches"]
    return embed(ids, torch.zeros(1, count, model.config.hidden_size), **given)[0]


CASES: dict[str, Case] = {}


def add(
    architecture: str,
    pictures: Maker,
    features: Callable[[Any, Arrays], Tensor],
    variants: dict[str, tuple[dict[str, Any], dict[str, Any]]],
    text: dict[str, Any] = TEXT,
    **config: Any,
) -> None:
    """Add variants of a model: their vision_configs and other fields."""
    ending = "" if architecture.endswith("CausalLM") else "ForConditionalGeneration"
    for name, (vision, fields) in variants.items():
        CASES[f"{architecture.lower()}{name}"] = Case(
            f"{architecture}{ending}",
            {"vision_config": vision} | ({"text_config": text} if text else {}) | config | fields,
            pictures,
            features,
        )


for architecture in ("SmolVLM", "Idefics3"):
    shuffles = {"": (SMALL, {}), "-wide": (WIDE, {"scale_factor": 3})}
    shuffles["-odd"] = (ODD, {"scale_factor": 1})
    add(architecture, tiles(1, 3, 2), tile_features, shuffles)
clip = {"model_type": "clip_vision_model"}
siglip = {"model_type": "siglip_vision_model", "vision_use_head": False}
add(
    "Llava",
    tiles(1, 1, 1),
    tile_features,
    {
        "": (SMALL | clip, {}),
        "-wide": (WIDE | clip, {"vision_feature_select_strategy": "full"}),
        "-odd": (ODD | clip, {"vision_feature_layer": -1, "multimodal_projector_bias": False}),
        "-siglip": (SMALL | siglip, {"vision_feature_select_strategy": "full"}),
    },
    TEXT | {"model_type": "llama"},
)
add(
    "LlavaNext",
    sized_tiles((10, 31), (24, 24), (70, 33), (100, 20)),
    size_features,
    {
        "": (SMALL | clip, {"image_grid_pinpoints": [[24, 48], [48, 24], [48, 48], [72, 24]]}),
        "-wide": (
            WIDE | clip | {"image_size": 12},
            {"image_grid_pinpoints": [[12, 12], [24, 36]], "vision_feature_layer": -1},
        ),
        "-siglip": (
            SMALL | siglip,
            {"image_grid_pinpoints": [[24, 72]], "vision_feature_select_strategy": "full"},
        ),
    },
    TEXT | {"model_type": "mistral"},
)
sides = [24, 48, 72, 96]
add(
    "LlavaOnevision",
    sized_tiles((10, 31), (24, 24), (93, 50), (200, 180), (60, 90)),
    size_features,
    {
        "": (
            SMALL | siglip,
            {"image_grid_pinpoints": [[y, x] for y in sides for x in sides]}
            | {"vision_aspect_ratio": "anyres_max_2"},
        ),
        "-wide": (
            WIDE | siglip | {"image_size": 11},
            {"image_grid_pinpoints": [[11, 11], [22, 33], [44, 22]], "vision_feature_layer": -2}
            | {"vision_aspect_ratio": "anyres_max_1"},
        ),
        "-odd": (
            ODD | siglip | {"image_size": 30},
            {"image_grid_pinpoints": [[30, 60]], "multimodal_projector_bias": False},
        ),
    },
    TEXT | {"model_type": "qwen2"},
)
gemma = TEXT | {"model_type": "gemma", "head_dim": 8}
pali = {"": (SMALL | siglip, {}), "-wide": (WIDE | siglip, {}), "-odd": (ODD | siglip, {})}
add("PaliGemma", tiles(1, 1, 1), tile_features, pali, gemma, projection_dim=32)
add(
    "Gemma3",
    tiles(1, 3, 2),
    tile_features,
    {
        "": (SMALL | siglip, {"mm_tokens_per_image": 9}),
        "-wide": (WIDE | siglip, {"mm_tokens_per_image": 9}),
        "-odd": (ODD | siglip, {"mm_tokens_per_image": 4}),
    },
    TEXT | {"model_type": "gemma3_text", "head_dim": 8},
)
gemma4 = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "head_dim": 8}
gemma4 |= {"num_attention_heads": 4, "num_key_value_heads": 2, "position_embedding_size": 32}
gemma4 |= {"patch_size": 2, "pooling_kernel_size": 2}
gemma4_wide = gemma4 | {"hidden_size": 72, "head_dim": 20, "num_key_value_heads": 4}
gemma4_wide |= {"pooling_kernel_size": 3, "use_clipped_linears": True, "num_hidden_layers": 1}
gemma4_odd = gemma4 | {"hidden_size": 39, "intermediate_size": 41, "num_attention_heads": 3}
gemma4_odd |= {"num_key_value_heads": 1, "patch_size": 3, "standardize": True}
gemma4_odd |= {"rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}}
add(
    "Gemma4",
    squares((2, 3), (1, 7), (5, 1)),
    square_features,
    {"": (gemma4, {}), "-wide": (gemma4_wide, {}), "-odd": (gemma4_odd, {})},
    TEXT | {"model_type": "gemma4_text", "head_dim": 8, "hidden_size_per_layer_input": 0},
)
unified = {"mm_embed_dim": 24, "mm_posemb_size": 8, "output_proj_dims": 24}
unified |= {"patch_size": 2, "pooling_kernel_size": 2}
unified_wide = unified | {"mm_embed_dim": 72, "output_proj_dims": 72, "pooling_kernel_size": 3}
unified_odd = unified | {"mm_embed_dim": 39, "output_proj_dims": 39, "patch_size": 3}
unified_odd |= {"mm_posemb_size": 7, "rms_norm_eps": 1e-2}
add(
    "Gemma4Unified",
    squares((2, 3), (1, 7), (5, 1)),
    square_features,
    {"": (unified, {}), "-wide": (unified_wide, {}), "-odd": (unified_odd, {})},
    TEXT | {"model_type": "gemma4_unified_text", "head_dim": 8},
)
intern = {"model_type": "internvl_vision"}
sides = {"image_size": [24, 24], "patch_size": [4, 4]}
add(
    "InternVL",
    tiles(1, 3, 2),
    tile_features,
    {
        "": (SMALL | intern | sides, {}),
        "-wide": (WIDE | intern | {"image_size": [16, 16], "attention_bias": True}, {}),
        "-odd": (ODD | intern | {"image_size": [15, 15]}, {"downsample_ratio": 1.0}),
    },
    TEXT | {"model_type": "qwen2"},
)
GRIDS = grids((1, 4, 5), (1, 1, 1), (3, 5, 3), (1, 9, 7))
add(
    "Qwen2VL",
    GRIDS,
    grid_features,
    {
        name: (vision | {"embed_dim": vision["hidden_size"], "mlp_ratio": 2, "hidden_size": 32}, {})
        for name, vision in (("", QWEN), ("-wide", QWEN_WIDE), ("-odd", QWEN_ODD))
    },
    MROPE,
)
add(
    "Qwen2_5_VL",
    GRIDS,
    grid_features,
    {
        "": (QWEN | {"window_size": 16, "fullatt_block_indexes": [1]}, {}),
        "-wide": (QWEN_WIDE | {"window_size": 24, "fullatt_block_indexes": [0]}, {}),
        "-odd": (QWEN_ODD | {"window_size": 12, "fullatt_block_indexes": [0, 2]}, {}),
    },
    MROPE,
)
QWEN3 = {
    "": (QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}, {}),
    "-wide": (QWEN_WIDE | {"num_position_embeddings": 49, "deepstack_visual_indexes": []}, {}),
    "-odd": (QWEN_ODD | {"num_position_embeddings": 36, "deepstack_visual_indexes": [1]}, {}),
}
add("Qwen3VL", GRIDS, grid_features, QWEN3, MROPE)
add("Qwen3VLMoe", GRIDS, grid_features, {"": QWEN3[""]}, MROPE | {"num_experts": 4})
add("Qwen3_5", GRIDS, grid_features, {"": QWEN3[""]}, MROPE)
pixtral = {"model_type": "pixtral"}
PIXTRAL = {
    "": (SMALL | pixtral, {}),
    "-wide": (WIDE | pixtral | {"patch_size": 3}, {"multimodal_projector_bias": True}),
    "-odd": (ODD | pixtral | {"hidden_size": 36, "num_channels": 3}, {"vision_feature_layer": -2}),
}
SIZES = sizes((2, 3), (1, 2), (5, 4))
mistral = TEXT | {"model_type": "mistral", "head_dim": 8}
add("Mistral3", SIZES, size_features, PIXTRAL, mistral, tie_word_embeddings=False)
add(
    "Llava",
    SIZES,
    size_features,
    {"-pixtral": (SMALL | pixtral, {"vision_feature_select_strategy": "full"})},
    TEXT | {"model_type": "mistral"},
)


phi4 = {"image_token_id": 98}
PHI4 = {
    "": (SMALL | phi4 | {"crop_size": 24}, {}),
    "-wide": (WIDE | phi4 | {"image_size": 16, "crop_size": 16, "feature_layer": -1}, {}),
    "-odd": (ODD | phi4 | {"num_channels": 3, "image_size": 20, "crop_size": 20}, {}),
}
PHI4["-odd"][0]["feature_layer"] = 1
add(
    "Phi4MultimodalForCausalLM",
    # Without bars, with bars of odd and even widths, and with a tile that is all bar.
    barred_tiles((1, 1, 4, 4), (2, 3, 5, 11), (1, 2, 1, 7), (3, 1, 4, 3)),
    barred_features,
    PHI4,
    {},
    audio_config=PHI4_SOUNDS,
    **TEXT,
)


def load_tower(folder: Path, dtype: str = "float32") -> DecoderModel:
    """Load a model with its tower."""
    checkpoint = open_checkpoint(folder)
    model = load_model(spec_with_tower(folder), checkpoint, dtype=dtype, ops=NativeOps())
    assert isinstance(model, DecoderModel)
    return model


def spec_with_tower(folder: Path) -> ModelSpec:
    spec = spec_of(folder)
    return with_encoders(spec, complete_config(spec.architecture, open_checkpoint(folder).config))


def feature(arrays: Arrays) -> MultiModalFeatureSpec:
    """Return the message of a picture."""
    data = {
        name: TensorData(str(array.dtype), array.shape, array.tobytes())
        for name, array in arrays.items()
    }
    return MultiModalFeatureSpec("image", "", PlaceholderRange(0, 0), data, 0)


@pytest.mark.parametrize("name", CASES)
def test_rows_equal_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "LAYER_TOKENS", 5)
    monkeypatch.setattr(encoders, "STORE_TOKENS", 12)
    case = CASES[name]
    hf_model = make_hf(case.architecture, factor=0.6, **case.config)
    hf_model.save_pretrained(tmp_path)
    model = load_tower(tmp_path)
    (encoder,) = model.encoders
    runner = EncoderRunner(encoder, NativeOps(), CPUAttention())
    pictures = case.pictures(np.random.default_rng(0), case.config["vision_config"])
    together = runner.run([feature(arrays) for arrays in pictures])
    for arrays, rows in zip(pictures, together, strict=True):
        with torch.inference_mode():
            expected = case.features(hf_model, arrays)
        atol = 3e-6 * float(expected.abs().max())
        torch.testing.assert_close(as_torch(rows), expected, atol=atol, rtol=0)
        (alone,) = runner.run([feature(arrays)])
        assert torch.equal(as_torch(alone), as_torch(rows))
        item = encoder.spec.inputs.read(arrays)
        count = encoder.spec.num_pieces(item.num_tokens, item.num_rows)
        for cuts in (range(1, count), range(2, count, 3)):
            found = run_in_slices(runner, feature(arrays), [0, *cuts, count], feature(pictures[0]))
            assert torch.equal(as_torch(found), as_torch(rows))
        assert encoder.spec.inputs.sizes(arrays) == (item.num_tokens, len(rows))
        check_refusals(encoder.spec, arrays, item.num_tokens, len(rows))


def run_in_slices(runner, item, cuts, other):
    """Return the rows of an item whose run is cut before the pieces `cuts`; between some slices
    the encoder computes another item."""
    for begin, end in itertools.pairwise(cuts):
        given = replace(item, data={}) if begin else item
        rows = runner.advance(EncoderSlice(given, begin, end))
        assert (rows is None) == (end < cuts[-1])
        if begin % 3:
            runner.run([other])
    return rows


def check_refusals(spec: EncoderSpec, arrays: Arrays, tokens: int, rows: int) -> None:
    """Check that an item is refused if it does not fit the encoder."""
    place = PlaceholderRange(0, rows)
    item = replace(feature(arrays), mm_position=place, num_encoder_tokens=tokens)
    spec.check(item)
    numbers = next(iter(arrays))
    narrow = feature(arrays | {numbers: arrays[numbers][..., :-1]})
    for changed, message in (
        (replace(item, num_encoder_tokens=tokens + 1), f"computes {tokens} and {rows}"),
        (replace(item, mm_position=PlaceholderRange(0, rows + 1)), "must describe the same"),
        (replace(item, grid=(1, 1, rows + 1)), "must describe the same"),
        (replace(item, data={}), "is missing"),
        (replace(item, data=narrow.data), "and the model reads"),
        (replace(item, data={k: replace(v, data=b"") for k, v in item.data.items()}), "damaged"),
    ):
        with pytest.raises(RequestError, match=message):
            spec.check(changed)
    with pytest.raises(RequestError, match=f"reads at most {tokens - 1}"):
        dataclasses.replace(spec, max_num_tokens=tokens - 1).check(item)
