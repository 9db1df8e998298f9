"""Interfaces of processors of media, and what all of them share.

A processor is made of a plain dict of settings, so that the front end and the process that decodes
pictures can each make it. The front end asks it for the places of media in prompts; the process
that decodes a file asks it for the encoder's input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError, RequestError
from octavo.media.content import Modality
from octavo.multimodal.pixels import MAX_SIDE, Image, Levels

Piece = str | int
"""Part of an item's place in a prompt: a text, in which special tokens may be written, or a
number of tokens that rows of the encoder replace."""

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Place:
    """Place of one item in a prompt, or of a part of it."""

    pieces: tuple[Piece, ...]
    """Replacement of the placeholder that the chat template writes."""
    num_encoder_tokens: int
    """Patches or frames in the layers of the encoder; 0 if a caller gives the rows."""
    grid: tuple[int, int, int] | None = None
    """Sizes of the encoder's rows in time, height and width, for models with m-RoPE."""
    follows: int = 0
    """See `MultiModalFeatureSpec`."""
    time: int = 0
    """See `MultiModalFeatureSpec`."""

    @property
    def num_embeds(self) -> int:
        """Number of rows of the encoder."""
        return sum(piece for piece in self.pieces if isinstance(piece, int))


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model that describe its pictures."""

    config: ConfigJson
    """config.json."""
    preprocessor: ConfigJson
    """preprocessor_config.json, or the part `image_processor` of processor_config.json."""
    processor: ConfigJson
    """processor_config.json; empty without this file."""
    video: ConfigJson
    """video_preprocessor_config.json, or the part `video_processor` of processor_config.json; empty
    without both."""
    tokenizer: ConfigJson
    """tokenizer_config.json; empty without this file."""


class Processor:
    """Processor of media of one modality.

    Args:
        settings: of JSON's types, by name.

    Attributes:
        placeholder: text in a rendered chat that stands for one item.
        embed_token: special token whose embeddings the encoder's rows replace; that of the
            placeholder replaces it if the tokenizer lacks it.

    Raises:
        ModelError: a setting has an impossible value.
    """

    around: tuple[str, str] | None = None
    """Tokens before and after a placeholder that an item's own text replaces."""
    prefix_end: str | None = None
    """End of the prompts of models in which pictures, the beginning of a text, and the text follow
    each other (PaliGemma); None: prompts have any form. See `arrange_prefix`."""
    beside: Modality | None = None
    """Modality whose items change the rows of this one's items in the same prompt; see
    `Part.beside`. None: no modality does."""
    request_settings: tuple[str, ...] = ()
    """Settings that a request may change (`mm_processor_kwargs`)."""

    def __init__(self, settings: ConfigJson) -> None:
        self.settings = settings
        self.placeholder: str = settings.get("placeholder")
        self.embed_token: str = settings.get("embed_token")

    def place_of_rows(self, num_rows: int) -> Place | None:
        """Return the place of an item whose rows a caller gives.

        Returns:
            The place; None: it depends on more than the number of rows.
        """
        return None

    def changed(self, given: Mapping[str, Any]) -> Self:
        """Return the processor for a request's `mm_processor_kwargs`.

        Raises:
            RequestError: a name is unknown, or a value is impossible.
        """
        for name in given:
            if name not in self.request_settings:
                allowed = ", ".join(self.request_settings) or "none"
                raise RequestError(
                    f"mm_processor_kwargs.{name} is not allowed for this model; allowed: "
                    f"{allowed}.",
                    "mm_processor_kwargs",
                )
        if not given:
            return self
        fields = {**self.settings.fields, **given}
        try:
            return type(self)(ConfigJson(fields, "mm_processor_kwargs"))
        except ModelError as error:
            raise RequestError(str(error), "mm_processor_kwargs") from None


class ImageProcessor(Processor, ABC):
    """Processor of pictures; see `read_settings` for its settings."""

    defaults: ClassVar[Mapping[str, Any]]
    """Settings of preprocessor_config.json that a model may leave out; others are ignored."""

    def __init__(self, settings: ConfigJson) -> None:
        super().__init__(settings)
        mean = std = None
        if settings.flag("do_normalize", True):
            mean, std = settings.numbers("image_mean", 3), settings.numbers("image_std", 3)
        factor = None
        if settings.flag("do_rescale", True):
            factor = settings.positive("rescale_factor", 1 / 255)
        self.levels = Levels(factor, mean, std)
        self.resample = settings.integer("resample", least=0, most=5)
        self.do_resize = settings.flag("do_resize", True)

    @classmethod
    def read_settings(cls, files: ModelFiles) -> dict[str, Any]:
        """Return the settings of a model, from its files.

        Raises:
            ModelError: a file lacks a value, or has an impossible one.
        """
        names = {*cls.defaults, *_COMMON}
        given = {k: v for k, v in files.preprocessor.fields.items() if k in names}
        return {**cls.defaults, **{k: v for k, v in given.items() if v is not None}}

    @abstractmethod
    def place(self, height: int, width: int) -> Place:
        """Return the place of a picture with this size.

        Raises:
            RequestError: the model reads no picture with this size.
        """

    def place_of_grid(self, grid: tuple[int, int, int]) -> Place | None:
        """Return the place of a picture whose rows a caller gives with `image_grid_thw`.

        Args:
            grid: numbers of its patches in time, height and width.

        Returns:
            The place; None: the model's pictures have no such grids.

        Raises:
            RequestError: no picture has this grid.
        """
        return None

    @abstractmethod
    def process(self, image: Image) -> dict[str, NDArray[Any]]:
        """Return the input of the encoder for one picture, with transformers' names.

        Raises:
            RequestError: the model reads no picture with this size.
        """


_COMMON = ("do_resize", "do_rescale", "rescale_factor", "do_normalize")


def read_size(settings: ConfigJson, name: str, *keys: str) -> tuple[int, ...]:
    """Return the values of some keys of a size, such as {"height": 224, "width": 224}.

    One number, as in old files, is the value of each key.

    Raises:
        ModelError: a key is missing, or its value is no side of a picture.
    """
    value = settings.get(name)
    if isinstance(value, int):
        return (settings.integer(name, most=MAX_SIDE),) * len(keys)
    section = settings.section(name)
    return tuple(section.integer(key, most=MAX_SIDE) for key in keys)


def read_square(settings: ConfigJson, name: str) -> int:
    """Return the side of a size that is a square.

    Raises:
        ModelError: the size has another form.
    """
    height, width = read_size(settings, name, "height", "width")
    if height != width:
        raise settings.error(name, "it must be a square")
    return height


def read_token(tokenizer: ConfigJson, modality: str, default: str, token_id: int) -> str:
    """Return the token that stands for an item of a modality.

    Args:
        tokenizer: tokenizer_config.json.
        modality: image or audio, as in the names of fields.
        default: the token if the file does not say it.
        token_id: its id in config.json.
    """
    name = f"{modality}_token"
    more, known = tokenizer.get("extra_special_tokens"), tokenizer.get("added_tokens_decoder")
    found = tokenizer.get(name) or (more.get(name) if isinstance(more, dict) else None)
    if found is None and isinstance(known, dict):
        found = known.get(str(token_id))
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else default


def integers(*values: int) -> NDArray[np.int64]:
    """Return numbers as an array: int64 [values]."""
    return np.array(values, np.int64)
