"""Tiny models of pictures and texts with random weights, and transformers' answers of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from octavo import LLM, SamplingParams
from tests.models.harness import make_hf

SPECIAL = ("<s>", "</s>", "<image>", "<fake_token_around_image>", "<global-img>")
SPECIAL += tuple(f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4))
SPECIAL += ("[IMG]", "[IMG_BREAK]", "[IMG_END]", "<img>", "</img>", "<IMG_CONTEXT>", "<video>")
SPECIAL += ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
SPECIAL += ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
SPECIAL += ("<|image>", "<|image|>", "<image|>", "<|video|>")
SPECIAL += ("<|audio>", "<|audio|>", "<audio|>")
VOCAB = 256 + len(SPECIAL)
ID = {text: 256 + i for i, text in enumerate(SPECIAL)}

Arrays = dict[str, Any]


def _text(**fields: Any) -> dict[str, Any]:
    text: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": ID["<s>"]}
    return text | {"eos_token_id": None} | fields


@dataclass(frozen=True)
class Case:
    """A model, and how transformers reads the encoder's inputs of several pictures."""

    architecture: str
    config: dict[str, Any]
    preprocessor: dict[str, Any]
    join: Callable[[Sequence[Arrays]], Arrays]
    placeholder: str = "<image>"
    kinds: Callable[[torch.Tensor, int], Arrays] | None = None
    """Types of the tokens [1, tokens], for attention in both directions; the arguments are the
    tokens, and the number of those of the prompt."""
    sounds: dict[str, Any] | None = None
    """Settings of sounds."""


def _join_tiles(pictures: Sequence[Arrays]) -> Arrays:
    """Return the tiles of all pictures as if they were those of one."""
    tiles = np.concatenate([picture["pixel_values"] for picture in pictures])
    return {"pixel_values": torch.from_numpy(tiles)[None]}


def _join_pictures(pictures: Sequence[Arrays]) -> Arrays:
    return {"pixel_values": torch.from_numpy(np.stack([p["pixel_values"] for p in pictures]))}


def _join_crops(pictures: Sequence[Arrays]) -> Arrays:
    tiles = np.concatenate([picture["pixel_values"] for picture in pictures])
    return {"pixel_values": torch.from_numpy(tiles)}


def _join_anyres(pictures: Sequence[Arrays]) -> Arrays:
    """Return pictures with as many tiles as the one with most of them."""
    most = max(len(picture["pixel_values"]) for picture in pictures)
    shape = len(pictures), most, *pictures[0]["pixel_values"].shape[1:]
    pixels = np.zeros(shape, np.float32)
    for tiles, one in zip(pixels, pictures, strict=True):
        tiles[: len(one["pixel_values"])] = one["pixel_values"]
    sizes = np.stack([picture["image_sizes"] for picture in pictures])
    return {"pixel_values": torch.from_numpy(pixels), "image_sizes": torch.from_numpy(sizes)}


def _join_sizes(pictures: Sequence[Arrays]) -> Arrays:
    """Return pictures of several sizes in the upper left corners of equal ones."""
    sizes = np.stack([picture["image_sizes"] for picture in pictures])
    pixels = np.zeros((len(pictures), 3, *sizes.max(0)), np.float32)
    for i, (height, width) in enumerate(sizes):
        pixels[i, :, :height, :width] = pictures[i]["pixel_values"]
    return {"pixel_values": torch.from_numpy(pixels), "image_sizes": torch.from_numpy(sizes)}


def hd_arrays(pictures: Sequence[Arrays], vision: dict[str, Any]) -> Arrays:
    """Return pictures with as many tiles as the one with most of them, and masks of patches.

    `seen_patches` is no argument of the model.
    """
    most = max(len(picture["image_pixel_values"]) for picture in pictures)
    size = vision["image_size"]
    side = size // vision["patch_size"]
    pixels, masks = [], []
    for picture in pictures:
        tiles = torch.from_numpy(picture["image_pixel_values"])
        rows, columns = (int(n) // size for n in picture["image_sizes"])
        mask = torch.zeros(rows * side, columns * side)
        mask[: picture["seen_patches"][0], : picture["seen_patches"][1]] = 1
        mask = mask.view(rows, side, columns, side).transpose(1, 2).reshape(-1, side, side)
        mask = torch.cat([torch.ones(1, side, side), mask])
        rest = most - len(tiles)
        pixels.append(torch.cat([tiles, tiles.new_zeros(rest, *tiles.shape[1:])]))
        masks.append(torch.cat([mask, torch.ones(rest, side, side)]))
    return {
        "image_pixel_values": torch.stack(pixels),
        "image_attention_mask": torch.stack(masks),
        "image_sizes": torch.from_numpy(np.stack([p["image_sizes"] for p in pictures])),
        "seen_patches": torch.from_numpy(np.stack([p["seen_patches"] for p in pictures])),
    }


def _join_barred(pictures: Sequence[Arrays], vision: dict[str, Any] | None = None) -> Arrays:
    joined = hd_arrays(pictures, SIGLIP if vision is None else vision)
    del joined["seen_patches"]
    return joined


def _join_patches(pictures: Sequence[Arrays]) -> Arrays:
    patches = np.concatenate([picture["pixel_values"] for picture in pictures])
    grids = np.stack([picture["image_grid_thw"] for picture in pictures])
    return {"pixel_values": torch.from_numpy(patches), "image_grid_thw": torch.from_numpy(grids)}


def _join_positioned(pictures: Sequence[Arrays]) -> Arrays:
    """Return patches of pictures, followed by padding as transformers has it."""
    most = max(len(picture["pixel_values"]) for picture in pictures)
    joined: Arrays = {}
    for name, filling in (("pixel_values", 0), ("image_position_ids", -1)):
        parts = [picture[name] for picture in pictures]
        parts = [np.pad(p, ((0, most - len(p)), (0, 0)), constant_values=filling) for p in parts]
        joined[name] = torch.from_numpy(np.stack(parts))
    return joined


def _kinds_of_rows(name: str, embed: str) -> Callable[[torch.Tensor, int], Arrays]:
    """Return the types of tokens that see the picture that they stand for."""
    return lambda tokens, _: {name: (tokens == ID[embed]).int()}


def _kinds_of_prefix(tokens: torch.Tensor, num_prompt: int) -> Arrays:
    """Return the types of tokens of a prompt that see all of it."""
    return {"token_type_ids": (torch.arange(tokens.shape[1]) >= num_prompt).int()[None]}


SIGLIP = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
SIGLIP |= {"num_attention_heads": 3, "image_size": 16, "patch_size": 4}

CLIP = SIGLIP | {"num_hidden_layers": 3, "model_type": "clip_vision_model"}
QWEN = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
QWEN |= {"temporal_patch_size": 2, "in_channels": 3}
QWEN2 = QWEN | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
QWEN2_5 = QWEN | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
QWEN2_5 |= {"window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 1}
QWEN3 = QWEN | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
QWEN3 |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
QWEN_IDS = {"image_token_id": ID["<|image_pad|>"], "video_token_id": ID["<|video_pad|>"]}
QWEN_IDS |= {"vision_start_token_id": ID["<|vision_start|>"]}
QWEN_IDS |= {"vision_end_token_id": ID["<|vision_end|>"]}
QWEN_PICTURES = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4}
QWEN_PICTURES |= {"min_pixels": 64, "max_pixels": 2048, "merge_size": 2}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
PHI4_SOUNDS = {"hidden_size": 16, "intermediate_size": 24, "num_blocks": 2}
PHI4_SOUNDS |= {"num_attention_heads": 2, "input_size": 16, "nemo_conv_channels": 6}
PHI4_SOUNDS |= {"ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16}
PHI4_SOUNDS |= {"bias_max_distance": 20, "audio_token_id": 97}
GEMMA = {"head_dim": 8, "sliding_window": 9, "num_hidden_layers": 3, "query_pre_attn_scalar": 8}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GEMMA_TOWER = SIGLIP | {"image_size": 32}
PALIGEMMA_PICTURES = {"image_processor_type": "SiglipImageProcessor"}
PALIGEMMA_PICTURES |= {"size": {"height": 32, "width": 32}}
GEMMA4_TOWER = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
GEMMA4_TOWER |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
GEMMA4_TOWER |= {"patch_size": 2, "pooling_kernel_size": 2, "position_embedding_size": 64}
GEMMA4 = {"head_dim": 8, "global_head_dim": 16, "sliding_window": 9}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
GEMMA4_IDS = {"image_token_id": ID["<|image|>"], "boi_token_id": ID["<|image>"]}
GEMMA4_IDS |= {"eoi_token_id": ID["<image|>"], "audio_config": None}
GEMMA4_IDS |= {"video_token_id": ID["<|video|>"], "audio_token_id": VOCAB}
GEMMA4_PICTURES = {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 2}
GEMMA4_PICTURES |= {"pooling_kernel_size": 2, "max_soft_tokens": 70}
UNIFIED_TOWER = {"patch_size": 2, "pooling_kernel_size": 3, "mm_posemb_size": 80}
UNIFIED_TOWER |= {"mm_embed_dim": 24, "output_proj_dims": 24}

CASES = {
    "gemma4": Case(
        "Gemma4ForConditionalGeneration",
        {
            "vision_config": GEMMA4_TOWER | {"standardize": True},
            "text_config": _text(
                model_type="gemma4_text",
                use_bidirectional_attention="vision",
                hidden_size_per_layer_input=0,
                **GEMMA4,
            ),
            **GEMMA4_IDS,
        },
        GEMMA4_PICTURES,
        _join_positioned,
        "<|image|>",
        _kinds_of_rows("mm_token_type_ids", "<|image|>"),
    ),
    "gemma3": Case(
        "Gemma3ForConditionalGeneration",
        {
            "vision_config": GEMMA_TOWER,
            "text_config": _text(model_type="gemma3_text", **GEMMA),
            "mm_tokens_per_image": 16,
            "image_token_id": ID["<image_soft_token>"],
            "boi_token_index": ID["<start_of_image>"],
            "eoi_token_index": ID["<end_of_image>"],
        },
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 32, "width": 32},
            "do_pan_and_scan": True,  # one of three pictures has crops
            "pan_and_scan_min_crop_size": 8,
            "pan_and_scan_max_num_crops": 2,
            "pan_and_scan_min_ratio_to_activate": 2.0,
        },
        _join_crops,
        "<start_of_image>",
        _kinds_of_rows("token_type_ids", "<image_soft_token>"),
    ),
    "paligemma": Case(
        "PaliGemmaForConditionalGeneration",
        {
            "vision_config": GEMMA_TOWER | {"model_type": "siglip_vision_model"},
            "text_config": _text(model_type="gemma2", **GEMMA),
            "projection_dim": 32,
            "image_token_id": ID["<image>"],
        },
        PALIGEMMA_PICTURES,
        _join_pictures,
        kinds=_kinds_of_prefix,
    ),
    "smolvlm": Case(
        "SmolVLMForConditionalGeneration",
        {
            "vision_config": SIGLIP,
            "text_config": _text(model_type="llama"),
            "scale_factor": 2,
            "image_token_id": ID["<image>"],
        },
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 48},
            "max_image_size": {"longest_edge": 16},
        },
        _join_tiles,
    ),
    "llava": Case(
        "LlavaForConditionalGeneration",
        {
            "vision_config": CLIP,
            "text_config": _text(model_type="llama"),
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "image_token_id": ID["<image>"],
            "image_seq_length": 16,
        },
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 16},
            "crop_size": {"height": 16, "width": 16},
        },
        _join_pictures,
    ),
    "qwen2_vl": Case(
        "Qwen2VLForConditionalGeneration",
        {"vision_config": QWEN2, "text_config": _text(rope_parameters=SECTIONS), **QWEN_IDS},
        QWEN_PICTURES,
        _join_patches,
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "qwen2_5_vl": Case(
        "Qwen2_5_VLForConditionalGeneration",
        {"vision_config": QWEN2_5, "text_config": _text(rope_parameters=SECTIONS), **QWEN_IDS},
        QWEN_PICTURES,
        _join_patches,
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "qwen3_vl": Case(
        "Qwen3VLForConditionalGeneration",
        {
            "vision_config": QWEN3,
            "text_config": _text(
                rope_parameters=SECTIONS | {"mrope_section": [3, 3, 2]},
                head_dim=16,
                num_hidden_layers=3,
            ),
            **QWEN_IDS,
        },
        QWEN_PICTURES,
        _join_patches,
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
}
CLIP_TILES = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32], [48, 16]]}
CASES["llava_next"] = Case(
    "LlavaNextForConditionalGeneration",
    CASES["llava"].config | CLIP_TILES,
    CASES["llava"].preprocessor | CLIP_TILES,
    _join_anyres,
)
SIGLIP_TILES = {"image_grid_pinpoints": [[16 * y, 16 * x] for y in (1, 2, 3) for x in (1, 2, 3)]}
MORE_CASES = {
    "llava_onevision": Case(
        "LlavaOnevisionForConditionalGeneration",
        {
            "vision_config": SIGLIP
            | {"model_type": "siglip_vision_model", "vision_use_head": False},
            "text_config": _text(model_type="qwen2"),
            "vision_aspect_ratio": "anyres_max_2",
            "image_token_id": ID["<image>"],
            "video_token_id": ID["<video>"],
            "tie_word_embeddings": True,
            **SIGLIP_TILES,
        },
        {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        | SIGLIP_TILES,
        _join_anyres,
    ),
    "qwen3_vl_moe": Case(
        "Qwen3VLMoeForConditionalGeneration",
        {
            "vision_config": QWEN3,
            "text_config": _text(
                rope_parameters=SECTIONS | {"mrope_section": [3, 3, 2]},
                head_dim=16,
                num_experts=6,
                num_experts_per_tok=2,
                moe_intermediate_size=24,
                mlp_only_layers=[1],
            ),
            **QWEN_IDS,
        },
        QWEN_PICTURES,
        _join_patches,
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "gemma4_e": Case(
        "Gemma4ForConditionalGeneration",
        {
            "vision_config": GEMMA4_TOWER | {"use_clipped_linears": True},
            "text_config": _text(
                model_type="gemma4_text",
                hidden_size_per_layer_input=8,
                vocab_size_per_layer_input=VOCAB,
                num_kv_shared_layers=2,
                **GEMMA4,
            ),
            **GEMMA4_IDS,
        },
        GEMMA4_PICTURES,
        _join_positioned,
        "<|image|>",
    ),
    "gemma4_unified": Case(
        "Gemma4UnifiedForConditionalGeneration",
        {
            "vision_config": UNIFIED_TOWER,
            "text_config": _text(model_type="gemma4_unified_text", **GEMMA4),
            **GEMMA4_IDS,
            "audio_config": {"audio_embed_dim": 640},
            "audio_token_id": ID["<|audio|>"],
        },
        GEMMA4_PICTURES
        | {"image_processor_type": "Gemma4UnifiedImageProcessor", "pooling_kernel_size": 3},
        _join_positioned,
        "<|image|>",
        _kinds_of_rows("mm_token_type_ids", "<|image|>"),
        {"feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor"},
    ),
    "paligemma1": Case(
        "PaliGemmaForConditionalGeneration",
        {
            "vision_config": GEMMA_TOWER | {"model_type": "siglip_vision_model"},
            "text_config": _text(model_type="gemma", head_dim=8),
            "projection_dim": 32,
            "image_token_id": ID["<image>"],
        },
        PALIGEMMA_PICTURES,
        _join_pictures,
        kinds=_kinds_of_prefix,
    ),
    "qwen3_5": Case(
        "Qwen3_5ForConditionalGeneration",
        {
            "vision_config": {k: v for k, v in QWEN3.items() if k != "deepstack_visual_indexes"},
            "text_config": _text(
                rope_parameters=SECTIONS
                | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
                head_dim=16,
                num_hidden_layers=4,
                layer_types=["linear_attention", "full_attention"] * 2,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
            ),
            **QWEN_IDS,
        },
        QWEN_PICTURES,
        _join_patches,
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "idefics3": Case(
        "Idefics3ForConditionalGeneration",
        CASES["smolvlm"].config,
        CASES["smolvlm"].preprocessor | {"image_processor_type": "Idefics3ImageProcessor"},
        _join_tiles,
    ),
    "mistral3": Case(
        "Mistral3ForConditionalGeneration",
        {
            "vision_config": SIGLIP | {"model_type": "pixtral", "head_dim": 8},
            "text_config": _text(model_type="mistral", head_dim=8),
            "spatial_merge_size": 2,
            "image_token_index": ID["[IMG]"],
            "tie_word_embeddings": False,
        },
        {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 40},
            "patch_size": 4,
        },
        _join_sizes,
        "[IMG]",
    ),
    "internvl": Case(
        "InternVLForConditionalGeneration",
        {
            "vision_config": SIGLIP | {"model_type": "internvl_vision", "attention_bias": True},
            "text_config": _text(model_type="qwen2"),
            "downsample_ratio": 0.5,
            "image_seq_length": 4,
            "image_token_id": ID["<IMG_CONTEXT>"],
        },
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
            "size": {"height": 16, "width": 16},
            "max_patches": 4,
        },
        _join_crops,
        "<IMG_CONTEXT>",
    ),
}
MORE_CASES["phi4"] = Case(
    "Phi4MultimodalForCausalLM",
    {
        "vision_config": SIGLIP
        | {"num_hidden_layers": 3, "crop_size": 16, "image_token_id": ID["<image>"]},
        "audio_config": PHI4_SOUNDS | {"audio_token_id": ID["</s>"]},
        **_text(partial_rotary_factor=0.75, original_max_position_embeddings=512),
    },
    {
        "image_processor_type": "Phi4MultimodalImageProcessor",
        "size": {"height": 16, "width": 16},
        "dynamic_hd": 6,
        "feature_size": PHI4_SOUNDS["input_size"],
    },
    _join_barred,
)
_MISTRAL3 = MORE_CASES["mistral3"]
MORE_CASES["pixtral"] = replace(
    _MISTRAL3,
    architecture="LlavaForConditionalGeneration",
    config={k: v for k, v in _MISTRAL3.config.items() if k != "spatial_merge_size"}
    | {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
)
_QWEN3_5 = MORE_CASES["qwen3_5"]
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_EXPERTS |= {"shared_expert_intermediate_size": 24}
_EXPERTS |= {k: v for k, v in _QWEN3_5.config["text_config"].items() if k != "intermediate_size"}
MORE_CASES["qwen3_5_moe"] = replace(
    _QWEN3_5,
    architecture="Qwen3_5MoeForConditionalGeneration",
    config=_QWEN3_5.config | {"text_config": _EXPERTS},
)
"""Models whose decoders read rows as those of other cases do."""

TEXTS: tuple[dict[str, Any], dict[str, Any]] = (
    {"hidden_size": 64, "num_key_value_heads": 1, "num_hidden_layers": 1},
    {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 4, "intermediate_size": 40},
)
TOWERS: tuple[dict[str, Any], dict[str, Any]] = (
    {"hidden_size": 40, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 24},
    {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 4, "patch_size": 2}
    | {"image_size": 16},
)
QWENS: tuple[dict[str, Any], dict[str, Any]] = (
    {"hidden_size": 32, "num_heads": 1, "depth": 2, "patch_size": 3, "intermediate_size": 41},
    {"hidden_size": 24, "num_heads": 3, "depth": 4, "patch_size": 6, "intermediate_size": 20},
)
"""Sizes of decoders and towers that differ from those of the cases, and from each other."""


def _of_tower(name: str, i: int, **changes: Any) -> Case:
    """Return another shape of a model with tiles or pictures of one size.

    Args:
        name: its case.
        i: 0 or 1, which shape.
        changes: other fields of config.json; of text_config, vision_config and the preprocessor's
            if they are dicts of these names.
    """
    case, side = (CASES | MORE_CASES)[name], TOWERS[i]["image_size"]
    text = case.config["text_config"] | TEXTS[i] | changes.pop("text", {})
    vision = case.config["vision_config"] | TOWERS[i] | changes.pop("vision", {})
    preprocessor = case.preprocessor | changes.pop("pictures", {})
    if "image_grid_pinpoints" in case.config:
        points = [[side, 2 * side], [2 * side, side], [2 * side, 2 * side], [3 * side, side]]
        changes["image_grid_pinpoints"] = preprocessor["image_grid_pinpoints"] = points
    config = case.config | {"text_config": text, "vision_config": vision} | changes
    return replace(case, config=config, preprocessor=preprocessor)


def _of_phi4(i: int, **vision: Any) -> Case:
    """Return another shape of Phi-4 multimodal, whose text part has no section of its own."""
    case, side = MORE_CASES["phi4"], TOWERS[i]["image_size"]
    vision = {"num_hidden_layers": 2, "crop_size": side} | vision
    vision = case.config["vision_config"] | TOWERS[i] | vision
    return replace(
        case,
        config=case.config | TEXTS[i] | {"vision_config": vision},
        preprocessor=case.preprocessor | {"size": {"height": side, "width": side}},
        join=partial(_join_barred, vision=vision),
    )


def _of_qwen(name: str, i: int, sections: Sequence[int], **changes: Any) -> Case:
    """Return another shape of a Qwen-VL; arguments are as for `_of_tower`."""
    case, tower = (CASES | MORE_CASES)[name], dict(QWENS[i])
    text = case.config["text_config"] | TEXTS[i] | changes.pop("text", {})
    if name == "qwen2_vl":
        tower |= {"embed_dim": tower.pop("hidden_size"), "hidden_size": text["hidden_size"]}
        tower["mlp_ratio"] = 3
    else:
        tower["out_hidden_size"] = text["hidden_size"]
    rotary = text["rope_parameters"] | {"mrope_section": list(sections)}
    vision = case.config["vision_config"] | tower | changes.pop("vision", {})
    text |= {"rope_parameters": rotary}
    size = {"patch_size": vision["patch_size"]}
    config = case.config | {"text_config": text, "vision_config": vision} | changes
    return replace(case, config=config, preprocessor=case.preprocessor | size)


def _square(side: int) -> dict[str, Any]:
    return {"size": {"height": side, "width": side}}


def _shapes() -> dict[str, Case]:
    """Return two further shapes of each model."""
    found: dict[str, Case] = {}

    def add(name: str, *cases: Case) -> None:
        found.update({f"{name} wide": cases[0], f"{name} deep": cases[1]})

    tiles = {"size": {"longest_edge": 72}, "max_image_size": {"longest_edge": 24}}
    for name in ("smolvlm", "idefics3"):
        wide = _of_tower(name, 0, scale_factor=3, pictures=tiles)
        add(name, wide, _of_tower(name, 1, scale_factor=4))
    cut = {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}
    for name in ("llava", "llava_next"):
        wide = _of_tower(
            name, 0, image_seq_length=36, pictures=cut, vision={"num_hidden_layers": 2}
        )
        add(
            name,
            wide,
            _of_tower(
                name, 1, image_seq_length=16, vision_feature_layer=-3, vision={"patch_size": 4}
            ),
        )
    wide = _of_tower("llava_onevision", 0, pictures=_square(24), vision_aspect_ratio="anyres_max_1")
    add("llava_onevision", wide, _of_tower("llava_onevision", 1, vision_feature_layer=-2))
    wide = _of_tower("internvl", 0, pictures=_square(24), image_seq_length=9)
    wide.config["vision_config"]["image_size"] = [24, 24]
    deep = _of_tower("internvl", 1, image_seq_length=16)
    deep.config["vision_config"] |= {"image_size": [16, 16], "patch_size": [2, 2]}
    add("internvl", wide, deep)
    gemmas = (
        {"head_dim": 16, "num_hidden_layers": 2, "sliding_window": 5, "query_pre_attn_scalar": 12}
        | {"layer_types": ["full_attention", "sliding_attention"]},
        {"head_dim": 12, "layer_types": ["sliding_attention", "full_attention"] * 2},
    )
    add(
        "gemma3",
        _of_tower("gemma3", 0, text=gemmas[0], mm_tokens_per_image=9, pictures=_square(24)),
        _of_tower("gemma3", 1, text=gemmas[1], mm_tokens_per_image=4, pictures=_square(16)),
    )
    add(
        "paligemma",
        _of_tower("paligemma", 0, text=gemmas[0], projection_dim=64, pictures=_square(24)),
        _of_tower("paligemma", 1, text=gemmas[1], projection_dim=48, pictures=_square(16)),
    )
    heads = {"head_dim": 16}, {"head_dim": 4}
    for name in ("mistral3", "pixtral"):
        small = {"patch_size": 3, "size": {"longest_edge": 36}}
        large = {"patch_size": 6, "size": {"longest_edge": 48}}
        text = {"head_dim": 16}, {"head_dim": 12}
        wide = _of_tower(
            name,
            0,
            text=text[0],
            pictures=small,
            vision=heads[0] | {"hidden_size": 32, "patch_size": 3},
        )
        deep = _of_tower(name, 1, text=text[1], pictures=large, vision=heads[1] | {"patch_size": 6})
        add(name, wide, deep)
    types = ["sliding_attention", "full_attention"]
    vision = (
        {"hidden_size": 72, "head_dim": 20, "num_attention_heads": 4, "num_key_value_heads": 4}
        | {"num_hidden_layers": 1, "pooling_kernel_size": 3, "patch_size": 2},
        {"hidden_size": 39, "intermediate_size": 41, "num_attention_heads": 3, "patch_size": 3}
        | {"num_key_value_heads": 1, "num_hidden_layers": 3},
    )
    shared = {"num_kv_shared_layers": 0}, {"num_kv_shared_layers": 3}
    for name in ("gemma4", "gemma4_e"):
        text = (
            {"num_hidden_layers": 2, "layer_types": types, "sliding_window": 5},
            {"num_hidden_layers": 6, "layer_types": types * 3, "global_head_dim": 24},
        )
        if name == "gemma4_e":
            text = text[0] | shared[0], text[1] | shared[1] | {"hidden_size_per_layer_input": 12}
        pictures = {"pooling_kernel_size": 3}, {"patch_size": 3}
        shapes = zip(text, vision, pictures, strict=True)
        add(
            name,
            *(
                _of_tower(name, i, text=one, vision=two, pictures=three)
                for i, (one, two, three) in enumerate(shapes)
            ),
        )
    add("phi4", _of_phi4(0), _of_phi4(1, num_hidden_layers=5))
    add("qwen2_vl", _of_qwen("qwen2_vl", 0, (3, 3, 2)), _of_qwen("qwen2_vl", 1, (1, 1, 2)))
    windows = (
        {"window_size": 12, "fullatt_block_indexes": [0]},
        {"window_size": 24, "fullatt_block_indexes": [1, 3]},
    )
    add(
        "qwen2_5_vl",
        _of_qwen("qwen2_5_vl", 0, (2, 3, 3), vision=windows[0]),
        _of_qwen("qwen2_5_vl", 1, (1, 2, 1), vision=windows[1]),
    )
    stacks = (
        {"num_position_embeddings": 49, "deepstack_visual_indexes": [1]},
        {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2, 3]},
    )
    few = {"mlp_only_layers": [], "num_experts": 5}, {"mlp_only_layers": [0, 2], "num_experts": 8}
    for name in ("qwen3_vl", "qwen3_vl_moe"):
        more = few if name == "qwen3_vl_moe" else ({}, {})
        add(
            name,
            _of_qwen(name, 0, (6, 5, 5), text={"head_dim": 32} | more[0], vision=stacks[0]),
            _of_qwen(name, 1, (2, 1, 1), text={"head_dim": 8} | more[1], vision=stacks[1]),
        )
    deep = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    deep |= {"linear_num_value_heads": 6, "linear_value_head_dim": 16}
    linear = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    linear |= {"head_dim": 32, "linear_num_key_heads": 1, "linear_num_value_heads": 3}
    positions = [{"num_position_embeddings": n} for n in (49, 36)]
    for name in ("qwen3_5", "qwen3_5_moe"):
        add(
            name,
            _of_qwen(name, 0, (3, 3, 2), text=linear, vision=positions[0]),
            _of_qwen(name, 1, (2, 1, 1), text=deep, vision=positions[1]),
        )
    return found


SHAPES = _shapes()
"""Other shapes of the models: name + " wide" and name + " deep"."""


def save_model(name: str, folder: Path) -> Any:
    """Save a model with its files; return transformers' model."""
    case = (CASES | MORE_CASES | SHAPES)[name]
    model = make_hf(case.architecture, **case.config)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(case.preprocessor))
    if case.sounds is not None:
        whole = {"feature_extractor": case.sounds}
        (folder / "processor_config.json").write_text(json.dumps(whole))
    if case.preprocessor.get("image_processor_type") == "Qwen2VLImageProcessor":
        limits = {"size": {"shortest_edge": 64, "longest_edge": 4096}}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(limits))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)} | ID
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "image_token": "<image>", "audio_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return model


_PUBLISHED = (
    (r"^(model\.)?language_model\.(?!model\.|lm_head)", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.", ""),
    (r"^vision_tower\.embeddings\.cls_token", "vision_model.embeddings.class_embedding"),
    (
        r"^vision_tower\.embeddings\.position_embeddings",
        "vision_model.embeddings.position_embedding",
    ),
    (
        r"^vision_tower\.embeddings\.patch_embeddings\.projection",
        "vision_model.embeddings.patch_embedding",
    ),
    (r"^vision_tower\.encoder\.layer\.", "vision_model.encoder.layers."),
    (r"\.attention\.projection_layer\.", ".attn.proj."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.lambda_", ".ls"),
    (r"^multi_modal_projector\.layer_norm", "mlp1.0"),
    (r"^multi_modal_projector\.linear_1", "mlp1.1"),
    (r"^multi_modal_projector\.linear_2", "mlp1.3"),
)
"""Names of weights of InternVL in transformers -> those that OpenGVLab publishes."""


def publish_internvl(folder: Path) -> None:
    """Turn a saved InternVL into the format that OpenGVLab publishes."""
    file = folder / "model.safetensors"
    state, found = load_file(file), {}
    for name, tensor in state.items():
        for pattern, new in _PUBLISHED:
            name = re.sub(pattern, new, name)
        found[name] = tensor
    for name in [name for name in found if ".attention.q_proj." in name]:
        parts = [found.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        found[name.replace(".attention.q_proj.", ".attn.qkv.")] = torch.cat(parts)
    save_file(found, file)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    vision, text = config["vision_config"], config["text_config"]
    text["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
    size, patch = (value[0] for value in (vision["image_size"], vision["patch_size"]))
    vision = {k: v for k, v in vision.items() if k != "model_type"}
    vision |= {"image_size": size, "patch_size": patch, "qkv_bias": vision["attention_bias"]}
    vision |= {"model_type": "intern_vit_6b", "qk_normalization": False}
    config = {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat"}
    config |= {"auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"}}
    config |= {"vision_config": vision, "llm_config": text, "force_image_size": size}
    config |= {"downsample_ratio": 0.5, "ps_version": "v2", "select_layer": -1}
    config |= {"max_dynamic_patch": 4, "use_thumbnail": True, "dynamic_image_size": True}
    file.write_text(json.dumps(config))
    (folder / "preprocessor_config.json").unlink()


def picture(height: int, width: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return random pixels."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def make_llm(folder: Path, **options: Any) -> LLM:
    """Return an engine that computes with transformers' numbers."""
    settings = {"dtype": "float32", "max_model_len": 400, "max_num_seqs": 8, "block_size": 16}
    settings |= {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 200}
    return LLM(str(folder), **(settings | options))


def assert_greedy(
    answer: tuple[Sequence[int], Sequence[int], Sequence[Any]], logprobs: torch.Tensor
) -> None:
    """Check an answer against transformers.

    Args:
        answer: the tokens of the prompt, those of the output, and the logprobs of each of these.
        logprobs: transformers' logprobs after each token of both, [tokens, vocabulary].
    """
    ids, tokens, rows = answer
    expected = logprobs[len(ids) - 1 : -1, :256]  # without tokens of items
    assert expected.argmax(-1).tolist() == list(tokens)
    found = [row[token].logprob for row, token in zip(rows, tokens, strict=True)]
    best = expected.max(-1).values
    torch.testing.assert_close(torch.tensor(found), best, atol=2e-4, rtol=1e-4)


def hf_logprobs(
    model: Any, name: str, llm: LLM, ids: Sequence[int], pictures: Sequence[Any], answer: int = 0
) -> torch.Tensor:
    """Return transformers' log-probabilities after each token: [tokens, vocab].

    `answer` is the number of tokens after the prompt, for models that see all of a prompt.
    """
    case = (CASES | MORE_CASES | SHAPES)[name]
    processor = llm.llm_engine.input_processor._media.readers["image"].processor
    arrays: Arrays = {}
    if pictures:
        arrays = case.join([processor.process(image) for image in pictures])
    tokens = torch.tensor([list(ids)])
    if pictures and case.kinds is not None:
        arrays |= case.kinds(tokens, len(ids) - answer)
    if name == "gemma4_unified" and "mm_token_type_ids" in arrays:
        arrays["attention_mask"] = unified_masks(model, tokens, arrays["mm_token_type_ids"])
    if "image_grid_thw" in arrays:
        kinds = (tokens == ID["<|image_pad|>"]).int()
        arrays["mm_token_type_ids"] = kinds
    with torch.inference_mode():
        logits = model(input_ids=tokens, **arrays).logits[0]
    return logits.float().log_softmax(-1)


def unified_masks(model: Any, tokens: torch.Tensor, kinds: torch.Tensor) -> Arrays:
    """Return the masks of Gemma 4 12B for tokens [1, tokens] of these types.

    Its `forward` would let the tokens of a picture see each other in all layers, and beyond
    windows. Only the method that transformers has for caches of a fixed size is right, as in its
    other models of Gemma 4, in vLLM and in Google's own code.
    """
    embeds = model.get_input_embeddings()(tokens % 256)
    return model.create_masks_for_generate(
        model.config,
        embeds,
        attention_mask=None,
        cache=None,
        position_ids=torch.arange(tokens.shape[1])[None],
        mm_token_type_ids=kinds,
    )


def params(tokens: int = 8, **fields: Any) -> SamplingParams:
    """Return parameters of a greedy answer with logprobs, without tokens of pictures."""
    bias = dict.fromkeys(ID.values(), -100.0)
    return SamplingParams(
        temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True, logit_bias=bias, **fields
    )
