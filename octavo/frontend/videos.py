"""Videos in prompts: arrays and lists of pictures, as the encoder reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from octavo.checkpoints.base import Checkpoint
from octavo.config import ModelConfig
from octavo.errors import RequestError, UnsupportedError
from octavo.frontend.pictures import pixels_of
from octavo.frontend.prompt_media import DATA, MediaReader
from octavo.media.content import with_media_io
from octavo.models.encoder import EncoderSpec
from octavo.multimodal.items import Item
from octavo.multimodal.processors.registry import make_video_processor, read_video_processor
from octavo.multimodal.processors.video import ARRAY_FPS, MAX_FRAMES, VideoProcessor
from octavo.multimodal.videos import VideoReader, make_item
from octavo.text.tokenizer import Tokenizer

_FORM = (
    "give an array uint8 [frames, height, width, 3], a list of images of Pillow, or a tuple of one "
    'of them and {"fps": number}'
)
_CHOICES = ("num_frames", "fps")
_DIMS = 4
"""Dimensions of an array of frames."""
_MAX_FPS = 1000.0


class Videos(MediaReader[VideoProcessor]):
    """Reader of the videos in the prompts of one model.

    A video is an array of frames, a list of pictures, or a tuple of one of them and a dict with
    `fps`, its frames a second. All of its frames are read unless a request has `num_frames` or
    `fps`.

    Args:
        kind: name of the model's processor.
        processor: the processor.
        encoder: the encoder of its frames.
        limit: most videos of a prompt.
    """

    modality = "video"

    def __init__(
        self, kind: str, processor: VideoProcessor, encoder: EncoderSpec, limit: int
    ) -> None:
        super().__init__(processor, encoder, limit)
        self.kind = kind

    @classmethod
    def of_model(
        cls,
        checkpoint: Checkpoint,
        settings: ModelConfig,
        encoder: EncoderSpec,
        tokenizer: Tokenizer,
    ) -> Videos | None:
        """Return the reader of a model's videos.

        Returns:
            The reader; None: there is no processor for them here, or no token for a video.

        Raises:
            ModelError: a file of the model is missing or wrong.
            RequestError: a setting of `mm_processor_kwargs` is wrong.
        """
        found = read_video_processor(checkpoint)
        if found is None:
            return None
        kind, values = found
        texts = [values["placeholder"], values.pop("other_placeholder", values["placeholder"])]
        placeholder = next((x for x in texts if len(tokenizer.encode(x, False)) == 1), None)
        if placeholder is None:
            return None
        values["placeholder"] = placeholder
        own = msgspec.json.decode(msgspec.json.encode(values))  # lists, not tuples
        processor = make_video_processor(kind, own)
        given = with_media_io(settings.mm_processor_kwargs, settings.media_io_kwargs) or {}
        known = {name: x for name, x in given.items() if name in processor.request_settings}
        return cls(kind, processor.changed(known), encoder, settings.limit("video"))

    def open_files(self) -> VideoReader:
        """Implement `MediaReader`."""
        return VideoReader(self.kind, self.processor.settings.fields)

    def items_of(self, data: object) -> Sequence[object]:
        """Implement `MediaReader`."""
        if isinstance(data, np.ndarray):
            return list(data) if data.ndim == _DIMS + 1 else [data]
        if isinstance(data, list) and not (data and _is_picture(data[0])):
            return data
        return [data]

    def process(self, processor: VideoProcessor, source: Any) -> Item:
        """Implement `MediaReader`."""
        given, fps = source, ARRAY_FPS
        if isinstance(source, tuple):
            if len(source) != 2 or not isinstance(source[1], Mapping):
                raise RequestError(f"it is a tuple of {len(source)} values; {_FORM}.")
            given, fps = source[0], source[1].get("fps", ARRAY_FPS)
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= _MAX_FPS:
            raise RequestError(f"its fps is {fps!r}; give a number from 0 to {_MAX_FPS:g}.")
        is_array = isinstance(given, np.ndarray) and given.ndim == _DIMS
        if not is_array and not (isinstance(given, list) and given):
            kind = type(given).__name__
            shape = f" {given.dtype} {list(given.shape)}" if isinstance(given, np.ndarray) else ""
            raise RequestError(f"it is a {kind}{shape}; {_FORM}.")
        total = len(given)
        old, new = self.processor.settings, processor.settings
        indices = list(range(total))
        if any(old.get(name) != new.get(name) for name in _CHOICES):
            indices = processor.choose(total, float(fps))
        if not 0 < len(indices) <= MAX_FRAMES:
            raise RequestError(
                f"it has {len(indices)} frames; give from 1 to {MAX_FRAMES}, or set num_frames in "
                "mm_processor_kwargs."
            )
        try:
            images = [pixels_of(given[i]) for i in indices]
            height, width = images[0].shape[:2]
            if any(image.shape != images[0].shape for image in images):
                raise RequestError("its frames have several sizes; give frames of one size.")
            frames = processor.frames(indices, total, float(fps), (height, width))
            for place in processor.places(frames):
                self.check_size(place.num_encoder_tokens)  # before the pixels are scaled
            return make_item(processor, frames, processor.process(frames, images))
        except ImportError:
            raise UnsupportedError(
                "videos need Pillow, which is not installed: pip install 'octavo[video]'.", DATA
            ) from None


def _is_picture(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == _DIMS - 1
    return type(value).__module__.partition(".")[0] == "PIL"
