"""transformers' own processors of pictures, for settings that Octavo's processors do not cover.

They run in the helper process only, which imports transformers and torch when it starts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError, RequestError
from octavo.multimodal.pixels import Image
from octavo.multimodal.processors.base import ImageProcessor, Place, Processor

NAME = "transformers"
"""Name of this processor in the registry."""
_NEEDED = ("transformers", "torch", "PIL")
_LAYOUTS = {"internvl": {"crop_to_patches": True}}
"""Options that transformers' processor of the model passes for each picture."""


class TransformersProcessor(ImageProcessor):
    """Processor whose pixels are those of a class of transformers.

    Octavo's processor of the family says how a picture is cut, and which tokens it has. The pixels
    must have the same shape.

    Args:
        own: Octavo's processor of the model's family.
        settings: `class_name` of transformers; `fields`, the model's settings for it; `own_kind`
            and `own_fields`, from which `own` was made.
    """

    defaults = {}  # noqa: RUF012

    def __init__(self, own: ImageProcessor, settings: ConfigJson) -> None:
        Processor.__init__(self, settings.replaced("placeholder", own.placeholder))
        self.own = own
        self.embed_token = own.embed_token
        self.around, self.prefix_end = own.around, own.prefix_end
        self.request_settings = own.request_settings
        self._class: str = settings.get("class_name")
        self._fields: Mapping[str, Any] = settings.get("fields")
        self._options = _LAYOUTS.get(settings.get("own_kind"), {})
        self._theirs: Any = None

    def changed(self, given: Mapping[str, Any]) -> Self:
        """Implement `Processor`: both processors get a request's settings."""
        own = self.own.changed(given)
        if own is self.own:
            return self
        settings = self.settings.replaced("own_fields", own.settings.fields)
        return type(self)(own, settings.replaced("fields", {**self._fields, **given}))

    def place_of_rows(self, num_rows: int) -> Place | None:
        """Implement `Processor`."""
        return self.own.place_of_rows(num_rows)

    def place_of_grid(self, grid: tuple[int, int, int]) -> Place | None:
        """Implement `ImageProcessor`."""
        return self.own.place_of_grid(grid)

    def place(self, height: int, width: int) -> Place:
        """Return the place of a picture with this size."""
        return self.own.place(height, width)

    def process(self, image: Image) -> dict[str, NDArray[Any]]:
        """Return the fields of the family's processor, with transformers' `pixel_values`.

        Raises:
            RequestError: transformers' arrays have another form.
            ModelError: the class cannot be made.
        """
        if self._theirs is None:
            self._theirs = _make(self._class, self._fields)
        fields = self.own.process(image)
        given = dict(self._theirs(image, return_tensors="np", **self._options))
        for name, ours in fields.items():
            if name not in given:
                if name == "pixel_values":
                    raise RequestError(f"transformers' {self._class} returns no {name}.")
                continue
            array = np.asarray(given[name])
            array = array[0] if array.ndim == ours.ndim + 1 and len(array) == 1 else array
            if "image_position_ids" in fields:
                array = array[: len(ours)]  # patches of zeros follow
            if array.shape != ours.shape:
                raise RequestError(
                    f"transformers' {self._class} makes {name} {list(array.shape)} of it, and the "
                    f"model's encoder reads {list(ours.shape)}."
                )
            if name == "pixel_values":
                fields[name] = np.ascontiguousarray(array, np.float32)
            elif not np.array_equal(array, ours):
                raise RequestError(
                    f"transformers' {self._class} makes {name} {array.tolist()} of it, and the "
                    f"prompt has places for {ours.tolist()}."
                )
        return fields


def check_installed(class_name: str, reason: str) -> None:
    """Check that transformers' processors can run here.

    Args:
        class_name: the class that a model needs.
        reason: why Octavo's own processor does not suffice.

    Raises:
        ModelError: a library is missing.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join("Pillow" if name == "PIL" else name for name in missing)
        raise ModelError(
            f"{reason}, so the model's pictures need transformers' {class_name}; {names} "
            f"{'is' if len(missing) == 1 else 'are'} not installed: pip install transformers torch "
            "pillow, or start with --language-model-only."
        )


def _make(class_name: str, fields: Mapping[str, Any]) -> Any:
    """Return transformers' processor; that for Pillow precedes that for torchvision.

    No code of the model is run.

    Raises:
        ModelError: transformers lacks the class, or refuses the settings.
    """
    import transformers

    stem = class_name.removesuffix("Fast")
    stem = stem.replace("FeatureExtractor", "ImageProcessor").removesuffix("Pil")
    errors = []
    for name in (f"{stem}Pil", stem, f"{stem}Fast"):
        try:
            return getattr(transformers, name).from_dict(dict(fields))
        except Exception as error:  # of unknown names, missing libraries and wrong settings
            errors.append(error)
    raise ModelError(
        f"the model's pictures need {class_name}, which transformers {transformers.__version__} "
        f"cannot make ({str(errors[0])[:300]}). Octavo runs no code of models; start with "
        "--language-model-only."
    )
