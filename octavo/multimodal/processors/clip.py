"""Pictures scaled to one size: CLIP and SigLIP, for LLaVA and PaliGemma.

Source: `CLIPImageProcessorPil`, `LlavaImageProcessorPil`, `SiglipImageProcessorPil`,
`LlavaProcessor` and `PaliGemmaProcessor` of transformers.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from octavo.checkpoints.config_json import ConfigJson
from octavo.multimodal.pixels import Image, center_crop, pad_to_square, resize
from octavo.multimodal.processors.base import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    ImageProcessor,
    ModelFiles,
    Place,
    read_size,
)

# Rows that encoders have before those of the patches.
_CLASS_ROWS = {"clip_vision_model": 1, "siglip_vision_model": 0}


class ClipProcessor(ImageProcessor):
    """Pictures whose shorter side is scaled, and whose middle is cut out: LLaVA 1.5."""

    defaults = {  # noqa: RUF012
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
        "resample": 3,
        "do_center_crop": True,
        "do_pad": False,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    }

    def __init__(self, settings: ConfigJson) -> None:
        super().__init__(settings)
        self._patch_size = settings.integer("patch_size", most=1024)
        self._class_rows = settings.integer("class_rows", least=0)
        self._dropped_rows = settings.integer("dropped_rows", least=0, most=1)
        self._color: tuple[int, ...] | None = None
        if settings.flag("do_pad", False):
            self._color = tuple(int(x * 255) for x in settings.numbers("image_mean", 3))
        self._crop: tuple[int, ...] | None = None
        if settings.flag("do_center_crop", True):
            self._crop = read_size(settings, "crop_size", "height", "width")
        self._short, self._resized = 0, self._crop
        if self.do_resize and "shortest_edge" in settings.section("size").fields:
            (self._short,) = read_size(settings, "size", "shortest_edge")
        elif self.do_resize:
            self._resized = read_size(settings, "size", "height", "width")
        size = self._crop or (None if self._short else self._resized)
        if size is None:
            raise settings.error("do_center_crop", "it must be true: pictures need one size")
        self._size = size

    @classmethod
    def read_settings(cls, files: ModelFiles) -> dict[str, Any]:
        """Return the settings; the rows of a picture are read from config.json."""
        config = files.config
        vision = config.section("vision_config")
        tower = vision.choice("model_type", {name: name for name in _CLASS_ROWS})
        strategies = {"default": "default", "full": "full"}
        strategy = config.choice("vision_feature_select_strategy", strategies, "default")
        settings = super().read_settings(files)
        # Only LLaVA's class pads to squares; CLIP's ignores the field.
        name = files.preprocessor.get("image_processor_type", "feature_extractor_type")
        if "do_pad" in settings and not str(name).startswith("Llava"):
            settings["do_pad"] = False
        if isinstance(settings["size"], int) and settings["do_center_crop"]:
            settings["size"] = {"shortest_edge": settings["size"]}
        return {
            **settings,
            "patch_size": vision.integer("patch_size", default=14),
            "class_rows": _CLASS_ROWS[tower],
            "dropped_rows": int(strategy == "default"),
            "placeholder": "<image>",
            "embed_token": "<image>",
        }

    def place_of_rows(self, num_rows: int) -> Place | None:
        """Implement `Processor`."""
        return Place((num_rows,), 0)

    def place(self, height: int, width: int) -> Place:
        """Return the place of a picture, which is the same for every size."""
        rows = (self._size[0] // self._patch_size) * (self._size[1] // self._patch_size)
        rows += self._class_rows
        return Place((rows - self._dropped_rows,), rows)

    def process(self, image: Image) -> dict[str, NDArray[Any]]:
        """Return `pixel_values`: float32 [3, height, width]."""
        if self._color is not None:
            image = pad_to_square(image, self._color)
        if self.do_resize:
            height, width = self._resized_to(*image.shape[:2])
            image = resize(image, height, width, self.resample)
        if self._crop is not None:
            image = center_crop(image, *self._crop)
        return {"pixel_values": self.levels.of(image)}

    def _resized_to(self, height: int, width: int) -> tuple[int, ...]:
        if not self._short:
            assert self._resized is not None
            return self._resized
        if width <= height:
            return int(self._short * height / width), self._short
        return self._short, int(self._short * width / height)


class SiglipProcessor(ClipProcessor):
    """Pictures that are scaled to one size without their aspect ratio: LLaVA with SigLIP."""

    defaults = {  # noqa: RUF012
        "size": {"height": 224, "width": 224},
        "resample": 3,
        "do_center_crop": False,
        "image_mean": HALF,
        "image_std": HALF,
    }


class PaliGemmaProcessor(SiglipProcessor):
    """Processor of PaliGemma 1 and 2."""

    prefix_end = "\n"

    @classmethod
    def read_settings(cls, files: ModelFiles) -> dict[str, Any]:
        """Return the settings; the rows of a picture are its patches."""
        patch = files.config.section("vision_config").integer("patch_size", default=14)
        return {
            **super(ClipProcessor, cls).read_settings(files),
            "patch_size": patch,
            "class_rows": 0,
            "dropped_rows": 0,
            "placeholder": "<image>",
            "embed_token": "<image>",
        }
