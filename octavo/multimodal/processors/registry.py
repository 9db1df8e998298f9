"""Choice of a model's processor of pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.checkpoints.base import Checkpoint
from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError
from octavo.multimodal.processors.base import ImageProcessor, ModelFiles
from octavo.multimodal.processors.clip import (
    ClipProcessor,
    PaliGemmaProcessor,
    SiglipProcessor,
)
from octavo.multimodal.processors.gemma3 import Gemma3Processor
from octavo.multimodal.processors.gemma4 import Gemma4Processor
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
_SUFFIXES = ("Fast", "ImageProcessor", "FeatureExtractor")


def read_processor(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the settings of a model's processor of pictures.

    Returns:
        Arguments of `make_processor`; None: the model reads no pictures, or has no processor here.

    Raises:
        ModelError: a file of the model is missing or wrong.
    """
    config = checkpoint.config
    kind = config.get("model_type")
    if kind != "llava" and kind not in _OF_MODELS:
        return None
    files = _read_files(checkpoint)
    preprocessor = files.preprocessor
    if kind == "llava":
        of_class = preprocessor.get("image_processor_type", "feature_extractor_type")
        name = str(of_class or "CLIP")
        for suffix in _SUFFIXES:
            name = name.removesuffix(suffix)
        if name not in _OF_LLAVA:
            raise preprocessor.error(
                "image_processor_type", "supported: " + ", ".join(f"{n}..." for n in _OF_LLAVA)
            )
        kind = _OF_LLAVA[name]
    else:
        kind = _OF_MODELS[kind]
    return kind, PROCESSORS[kind].read_settings(files)


def read_video_processor(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the settings of a model's processor of videos.

    Returns:
        Arguments of `make_video_processor`; None: the model reads no videos here.

    Raises:
        ModelError: a file of the model is missing or wrong.
    """
    kind = str(checkpoint.config.get("model_type"))
    if kind not in VIDEO_PROCESSORS:
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
        kind: a name in `PROCESSORS`.
        settings: of JSON's types, by name.

    Raises:
        ModelError: a setting has an impossible value.
    """
    return PROCESSORS[kind](ConfigJson(dict(settings), "preprocessor_config.json"))


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
