"""Choice of a model's processor of pictures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from octavo.checkpoints.base import Checkpoint
from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError
from octavo.multimodal.processors import fallback
from octavo.multimodal.processors.base import ImageProcessor, ModelFiles
from octavo.multimodal.processors.clip import (
    ClipProcessor,
    PaliGemmaProcessor,
    SiglipProcessor,
)
from octavo.multimodal.processors.fallback import TransformersProcessor
from octavo.multimodal.processors.gemma3 import Gemma3Processor
from octavo.multimodal.processors.gemma4 import Gemma4Processor, Gemma4UnifiedProcessor
from octavo.multimodal.processors.idefics3 import Idefics3Processor
from octavo.multimodal.processors.internvl import InternVLChatProcessor, InternVLProcessor
from octavo.multimodal.processors.llava_next import LlavaNextProcessor, OneVisionProcessor
from octavo.multimodal.processors.pixtral import PixtralProcessor
from octavo.multimodal.processors.qwen2_vl import Qwen2VLProcessor
from octavo.multimodal.processors.video import VIDEO_PROCESSORS, VideoProcessor

PROCESSORS: Mapping[str, type[ImageProcessor]] = {
    "clip": ClipProcessor,
    "siglip": SiglipProcessor,
    "gemma3": Gemma3Processor,
    "gemma4": Gemma4Processor,
    "gemma4_unified": Gemma4UnifiedProcessor,
    "idefics3": Idefics3Processor,
    "internvl": InternVLProcessor,
    "internvl_chat": InternVLChatProcessor,
    "llava_next": LlavaNextProcessor,
    "llava_onevision": OneVisionProcessor,
    "paligemma": PaliGemmaProcessor,
    "pixtral": PixtralProcessor,
    "qwen2_vl": Qwen2VLProcessor,
}
"""Processors by their names."""

_OF_MODELS = {
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "gemma4_unified": "gemma4_unified",
    "idefics3": "idefics3",
    "internvl": "internvl",
    "internvl_chat": "internvl_chat",
    "llava_next": "llava_next",
    "llava_onevision": "llava_onevision",
    "mistral3": "pixtral",
    "paligemma": "paligemma",
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_vl",
    "qwen3_vl": "qwen2_vl",
    "qwen3_vl_moe": "qwen2_vl",
    "qwen3_5": "qwen2_vl",
    "qwen3_5_moe": "qwen2_vl",
    "smolvlm": "idefics3",
}
"""model_type -> processor."""
_OF_LLAVA = {"CLIP": "clip", "Llava": "clip", "Siglip": "siglip", "Pixtral": "pixtral"}
"""Kind of image_processor_type -> processor, for LLaVA with several encoders."""
_SUFFIXES = ("Fast", "Pil", "ImageProcessor", "FeatureExtractor")
_CLASSES = {
    "gemma3": ("Gemma3",),
    "gemma4": ("Gemma4",),
    "gemma4_unified": ("Gemma4Unified",),
    "idefics3": ("Idefics3", "SmolVLM"),
    "internvl": ("GotOcr2", "InternVL"),
    "llava_next": ("LlavaNext", "CLIP"),  # CLIP's class makes no tiles, which the model needs
    "llava_onevision": ("LlavaOnevision",),
    "paligemma": ("Siglip", "PaliGemma"),
    "pixtral": ("Pixtral", "Mistral3"),
    "qwen2_vl": ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL"),
}
"""Processor -> kinds of image_processor_type whose pixels it makes."""
_ONE_SIZE = ("clip", "siglip", "paligemma")
"""Processors of encoders that read pictures of one size."""
_SIZES = ({"shortest_edge"}, {"height", "width"})


def read_processor(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the settings of a model's processor of pictures.

    Octavo's own processor precedes that of transformers (`fallback.NAME`), which is for settings
    and classes that Octavo's does not cover.

    Returns:
        Arguments of `make_processor`; None: the model reads no pictures, or has no processor here.

    Raises:
        ModelError: a file of the model is missing or wrong, or needs transformers, which is not
            installed.
    """
    config = checkpoint.config
    kind = config.get("model_type")
    if kind != "llava" and kind not in _OF_MODELS:
        return None
    files = _read_files(checkpoint)
    given = files.preprocessor.get("image_processor_type", "feature_extractor_type")
    stem = str(given or "")
    for suffix in _SUFFIXES:
        stem = stem.removesuffix(suffix)
    if kind == "llava":
        tower = config.section("vision_config").get("model_type")
        default = {"pixtral": "pixtral", "siglip_vision_model": "siglip"}.get(tower, "clip")
        kind = _OF_LLAVA.get(stem or "CLIP", default)
        classes = tuple(_OF_LLAVA)
    else:
        kind = _OF_MODELS[kind]
        classes = _CLASSES.get(kind, (stem,))
    reason = None
    if stem and stem not in classes:
        reason = f"{files.preprocessor.where} names {given}"
    elif kind in _ONE_SIZE:
        reason = _why_uncovered(files.preprocessor)
    if reason is None:
        return kind, PROCESSORS[kind].read_settings(files)
    name = str(given or ("SiglipImageProcessor" if kind == "paligemma" else "CLIPImageProcessor"))
    fallback.check_installed(name, reason)
    return fallback.NAME, _settings_of_fallback(kind, name, reason, files)


def _why_uncovered(preprocessor: ConfigJson) -> str | None:
    """Return which setting of pictures of one size Octavo does not cover; None: none."""
    size = preprocessor.get("size")
    if isinstance(size, dict):
        names = {name for name, side in size.items() if side is not None}
        if names not in _SIZES:
            return f"{preprocessor.where} has the size {size}"
    if preprocessor.get("do_pad") and preprocessor.get("pad_size"):
        return f"{preprocessor.where} has the pad_size {preprocessor.get('pad_size')}"
    return None


def _settings_of_fallback(
    kind: str, class_name: str, reason: str, files: ModelFiles
) -> dict[str, Any]:
    """Return the settings of `TransformersProcessor`."""
    fields = files.preprocessor.fields
    if kind in _ONE_SIZE:  # the encoder says which
        kind = "paligemma" if kind == "paligemma" else "siglip"
        side = files.config.section("vision_config").integer("image_size", default=224)
        size = {"size": {"height": side, "width": side}}
        files = dataclasses.replace(files, preprocessor=ConfigJson(size, files.config.where))
    own = PROCESSORS[kind].read_settings(files)
    if kind == "pixtral":
        fields = {**fields, "patch_size": own["patch_size"] * own["spatial_merge_size"]}
    return {
        "class_name": class_name,
        "reason": reason,
        "fields": fields,
        "own_kind": kind,
        "own_fields": own,
    }


def read_video_processor(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the settings of a model's processor of videos.

    Returns:
        Arguments of `make_video_processor`; None: the model reads no videos here, also if its
        pictures need transformers' processor.

    Raises:
        ModelError: a file of the model is missing or wrong.
    """
    kind = str(checkpoint.config.get("model_type"))
    if kind not in VIDEO_PROCESSORS:
        return None
    pictures = read_processor(checkpoint)
    if pictures is not None and pictures[0] == fallback.NAME:
        return None
    return kind, VIDEO_PROCESSORS[kind].read_settings(_read_files(checkpoint))


def make_video_processor(kind: str, settings: Mapping[str, Any]) -> VideoProcessor:
    """Return a processor of videos.

    Args:
        kind: a name in `VIDEO_PROCESSORS`.
        settings: of JSON's types, by name.

    Raises:
        ModelError: a setting has an impossible value.
    """
    return VIDEO_PROCESSORS[kind](ConfigJson(dict(settings), "preprocessor_config.json"))


def _read_files(checkpoint: Checkpoint) -> ModelFiles:
    """Return the files that describe a model's pictures and videos.

    Raises:
        ModelError: a file is missing or wrong.
    """
    processor = _read(checkpoint, "processor_config.json")
    preprocessor = _read(checkpoint, "preprocessor_config.json")
    if not preprocessor.fields:  # transformers 5 writes one file for all
        preprocessor = processor.section("image_processor")
    if not preprocessor.fields and checkpoint.config.get("model_type") != "internvl_chat":
        raise ModelError(
            f"{checkpoint.path} has no preprocessor_config.json, which describes the pictures of "
            "the model; download it, or start with --language-model-only."
        )
    video = _read(checkpoint, "video_preprocessor_config.json")
    if not video.fields:
        video = processor.section("video_processor")
    return ModelFiles(checkpoint.config, preprocessor, processor, video)


def make_processor(kind: str, settings: Mapping[str, Any]) -> ImageProcessor:
    """Return a processor.

    Args:
        kind: a name in `PROCESSORS`, or `fallback.NAME`.
        settings: of JSON's types, by name.

    Raises:
        ModelError: a setting has an impossible value.
    """
    given = ConfigJson(dict(settings), "preprocessor_config.json")
    if kind == fallback.NAME:
        own = make_processor(given.get("own_kind"), given.get("own_fields"))
        return TransformersProcessor(own, given)
    return PROCESSORS[kind](given)


def _read(checkpoint: Checkpoint, name: str) -> ConfigJson:
    """Return a file; empty if the model has none."""
    text = checkpoint.read_text(name)
    where = str(checkpoint.path / name)
    try:
        data = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is damaged ({error}); download it again.") from None
    if not isinstance(data, dict):
        raise ModelError(f"{where} is damaged (it is not an object); download it again.")
    return ConfigJson(data, where)
