"""Pictures in prompts: images of Pillow and arrays, as the encoder reads them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Checkpoint
from octavo.config import ModelConfig
from octavo.errors import ModelError, RequestError, UnsupportedError
from octavo.frontend.prompt_media import DATA, MediaReader
from octavo.models.encoder import EncoderSpec
from octavo.multimodal.items import Item, make_part
from octavo.multimodal.pictures import PictureReader
from octavo.multimodal.processors.base import ImageProcessor
from octavo.multimodal.processors.fallback import TransformersProcessor
from octavo.multimodal.processors.registry import make_processor, read_processor
from octavo.multimodal.processors.video import VIDEO_PROCESSORS

logger = logging.getLogger(__name__)


class Pictures(MediaReader[ImageProcessor]):
    """Reader of the pictures in the prompts of one model.

    Args:
        kind: name of the model's processor.
        processor: the processor.
        encoder: the encoder of its pictures.
        limit: most pictures of a prompt.
    """

    modality = "image"

    def __init__(
        self, kind: str, processor: ImageProcessor, encoder: EncoderSpec, limit: int
    ) -> None:
        super().__init__(processor, encoder, limit)
        self.kind = kind
        self._helper: PictureReader | None = None
        if isinstance(processor, TransformersProcessor):
            self._helper = self.open_files()
            weakref.finalize(self, self._helper.close)
            self._check(processor, self._helper)

    @classmethod
    def of_model(
        cls, checkpoint: Checkpoint, settings: ModelConfig, encoder: EncoderSpec
    ) -> Pictures | None:
        """Return the reader of a model's pictures; None: there is no processor for them here.

        Raises:
            ModelError: a file of the model is missing or wrong.
            RequestError: a setting of `mm_processor_kwargs` is wrong.
        """
        found = read_processor(checkpoint)
        if found is None:
            return None
        kind, values = found
        own = msgspec.json.decode(msgspec.json.encode(values))  # lists, not tuples
        processor, given = make_processor(kind, own), settings.mm_processor_kwargs
        if (videos := VIDEO_PROCESSORS.get(str(checkpoint.config.get("model_type")))) is not None:
            only = set(videos.request_settings) - set(processor.request_settings)
            given = {name: value for name, value in given.items() if name not in only}
        processor = processor.changed(given)
        return cls(kind, processor, encoder, settings.limit("image"))

    @staticmethod
    def _check(processor: TransformersProcessor, helper: PictureReader) -> None:
        """Read a picture with transformers' processor, and log its name.

        Raises:
            ModelError: transformers lacks the class, or its arrays are not those of the model.
        """
        settings = processor.settings
        blank = np.zeros((224, 224, 3), np.uint8)
        try:
            helper.read_pixels(processor, blank, DATA).result()
        except RequestError as error:
            raise ModelError(
                f"{settings.get('reason')}, and the model's pictures cannot be read with it: "
                f"{error.message} Start with --language-model-only."
            ) from None
        logger.info(
            "The model's pictures are read by transformers' %s, since %s. This is slower than "
            "Octavo's own processors, and the model reads no videos.",
            settings.get("class_name"),
            settings.get("reason"),
        )

    def open_files(self) -> PictureReader:
        """Implement `MediaReader`."""
        return PictureReader(self.kind, self.processor.settings.fields)

    def items_of(self, data: object) -> Sequence[object]:
        """Implement `MediaReader`."""
        return list(data) if isinstance(data, list | tuple) else [data]

    def process(self, processor: ImageProcessor, source: Any) -> Item:
        """Implement `MediaReader`."""
        try:
            pixels = pixels_of(source)
            place = processor.place(*pixels.shape[:2])
            self.check_size(place.num_encoder_tokens)  # before the pixels are scaled
            if self._helper is not None:
                return self._helper.read_pixels(processor, pixels, DATA).result()
            return Item("image", (make_part(place, processor.process(pixels)),))
        except ImportError:
            raise UnsupportedError(
                "pictures need Pillow, which is not installed: pip install 'octavo[vision]'.", DATA
            ) from None


def pixels_of(image: object) -> NDArray[np.uint8]:
    """Return the pixels of Pillow's image or of an array: uint8 [height, width, 3]."""
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
            raise RequestError(
                f"it is an array {image.dtype} {list(image.shape)}; give uint8 [height, width, 3]."
            )
        return image
    kind = type(image)
    if kind.__module__.partition(".")[0] == "PIL":
        from octavo.media.images import to_rgb  # the caller has imported Pillow

        picture: Any = image
        pixels = to_rgb(picture)
        if not pixels.size:
            raise RequestError("it has no pixels.")
        return pixels
    if image is None:
        raise RequestError("it is missing; send the picture, or the uuid of one sent before.")
    raise RequestError(
        f"it is a {kind.__name__}; give an image of Pillow, or an array uint8 [height, width, 3]."
    )
