"""Pictures in prompts: from `multi_modal_data` to the items that encoders read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Checkpoint
from octavo.config import ModelConfig
from octavo.errors import RequestError, UnsupportedError
from octavo.messages import MultiModalFeatureSpec
from octavo.models.encoder import EncoderSpec
from octavo.multimodal.pictures import Picture, make_picture
from octavo.multimodal.processors.base import ImageProcessor
from octavo.multimodal.processors.registry import make_processor, read_processor
from octavo.multimodal.prompt import arrange_prefix, expand_prompt
from octavo.text.tokenizer import Tokenizer

DATA, KWARGS, UUIDS = "multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids"
"""Keys in a prompt's dict."""


class Pictures:
    """Reader of the pictures in the prompts of one model.

    Args:
        kind: name of the model's processor.
        processor: the processor.
        encoder: the encoder of its pictures.
        tokenizer: the model's tokenizer.
        limit: most pictures of a prompt.
    """

    def __init__(
        self,
        kind: str,
        processor: ImageProcessor,
        encoder: EncoderSpec,
        tokenizer: Tokenizer,
        limit: int,
    ) -> None:
        self.kind, self.processor, self.limit = kind, processor, limit
        self._encoder, self._tokenizer = encoder, tokenizer
        self._placeholder_id = self._token(processor.placeholder)
        self._embed_id = self._token(processor.embed_token)

    @classmethod
    def of_model(
        cls,
        checkpoint: Checkpoint,
        settings: ModelConfig,
        encoder: EncoderSpec,
        tokenizer: Tokenizer,
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
        processor = make_processor(kind, own).changed(settings.mm_processor_kwargs)
        return cls(kind, processor, encoder, tokenizer, settings.limit("image"))

    def expand(
        self, prompt: Mapping[str, Any], token_ids: Sequence[int], salt: str | None
    ) -> tuple[list[int], list[MultiModalFeatureSpec]]:
        """Replace the placeholders of a prompt by the tokens of its pictures.

        Args:
            prompt: a prompt's dict with `multi_modal_data`.
            token_ids: its tokens, with one placeholder for each picture.
            salt: scope of the prefix cache; other scopes do not share the encoder's results.

        Returns:
            The tokens, and the pictures in order of their places.

        Raises:
            RequestError: the pictures are wrong, or not as many as the placeholders.
            UnsupportedError: the data holds something other than pictures.
        """
        given = _pictures_of(prompt)
        if len(given) > self.limit:
            raise RequestError(
                f"The prompt has {len(given)} pictures; at most {self.limit} are allowed "
                "(limit_mm_per_prompt).",
                DATA,
            )
        _check_uuids(prompt.get(UUIDS), len(given))
        processor = self.processor.changed(_settings_of(prompt))
        pictures = [self._read(processor, image, i) for i, image in enumerate(given)]
        places = [picture.place for picture in pictures]
        if processor.prefix_end is not None and places:
            token_ids = arrange_prefix(
                token_ids,
                len(places),
                self._placeholder_id,
                self._tokenizer.bos_token_id,
                self._tokenizer.encode(processor.prefix_end, False),
            )
        ids, ranges = expand_prompt(
            token_ids, places, self._placeholder_id, self._embed_id, self._tokenizer
        )
        features = [
            picture.feature(place, _identifier(picture.digest, salt))
            for picture, place in zip(pictures, ranges, strict=True)
        ]
        if (sight := self._encoder.sight) is not None:
            features = [
                msgspec.structs.replace(f, ranges=sight.ranges(f.mm_position, len(ids)))
                for f in features
            ]
        for i, (feature, image) in enumerate(zip(features, given, strict=True)):
            try:
                self._encoder.check(feature)
            except RequestError as error:
                raise _of_picture(error, i, image) from None
        return ids, features

    def _read(self, processor: ImageProcessor, image: object, index: int) -> Picture:
        try:
            if not isinstance(image, Picture):
                pixels = _pixels_of(image)
                place = processor.place(*pixels.shape[:2])
                self._check_size(place.num_encoder_tokens)
                return make_picture(place, processor.process(pixels))
            self._check_size(image.place.num_encoder_tokens)
        except ImportError:
            raise UnsupportedError(
                f"{DATA}: pictures need Pillow, which is not installed: pip install "
                "'octavo[vision]'.",
                DATA,
            ) from None
        except RequestError as error:
            raise _of_picture(error, index, image) from None
        return image

    def _check_size(self, num_tokens: int) -> None:
        most = self._encoder.max_num_tokens
        if num_tokens > most:
            raise RequestError(
                f"it is cut into {num_tokens} patches, and the model's encoder reads at most "
                f"{most}. Make it smaller."
            )

    def _token(self, text: str) -> int:
        ids = self._tokenizer.encode(text, False)
        if len(ids) != 1:
            raise RequestError(f"{text!r}, the placeholder of pictures, is not one token.", DATA)
        return ids[0]


def _of_picture(error: RequestError, index: int, image: object) -> RequestError:
    """Return an error that names a picture by its index."""
    where = "" if isinstance(image, Picture) else f"{DATA}: "  # the first are of chats
    return type(error)(f"{where}picture {index + 1}: {error.message}", DATA)


def _pictures_of(prompt: Mapping[str, Any]) -> list[object]:
    """Return the pictures in a prompt's dict."""
    data = prompt[DATA]
    if not isinstance(data, Mapping):
        raise RequestError(
            f"{DATA} is a {type(data).__name__}; give a dict such as {{'image': picture}}.", DATA
        )
    others = [name for name, items in data.items() if name != "image" and items is not None]
    if others:
        raise UnsupportedError(f"{DATA}: {others[0]!r} is not supported; give 'image'.", DATA)
    images = data.get("image")
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]


def _settings_of(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = prompt.get(KWARGS) or {}
    if not isinstance(settings, Mapping):
        raise RequestError(f"{KWARGS} is a {type(settings).__name__}, not a dict.", KWARGS)
    return settings


def _check_uuids(uuids: object, count: int) -> None:
    """Check names that a client gives to its pictures.

    They choose nothing: the content of a picture is its identity.
    """
    if uuids is None:
        return
    names = uuids.get("image") if isinstance(uuids, Mapping) else uuids
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list | tuple) or len(names) != count:
        raise RequestError(
            f"{UUIDS} must have one text, or None, for each of the {count} pictures, as "
            "{'image': [...]}.",
            UUIDS,
        )


def _pixels_of(image: object) -> NDArray[np.uint8]:
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
        raise RequestError("it is missing; send the picture, also if it has a uuid.")
    raise RequestError(
        f"it is a {kind.__name__}; give an image of Pillow, or an array uint8 [height, width, 3]."
    )


def _identifier(digest: str, salt: str | None) -> str:
    """Return the identifier of a picture in a scope of the prefix cache."""
    if salt is None:
        return digest
    return hashlib.sha256(msgspec.msgpack.encode((digest, salt))).hexdigest()
