"""Rows of a model's encoders in place of the pictures and sounds in prompts (`enable_mm_embeds`).

A caller computes the rows elsewhere, such as with transformers' `get_image_features`. The forms are
vLLM's; a chat has tensors as files of `torch.save` or `numpy.save`, in base64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.frontend.prompt_embeds import is_torch, to_tensor
from octavo.media.content import NAMES, Modality
from octavo.media.tensor_file import decode_tensor
from octavo.messages import EMBEDS, EMBEDS_DTYPES, TensorData
from octavo.multimodal.items import Item, make_part_of_data
from octavo.multimodal.pixels import MAX_SIDE
from octavo.multimodal.processors.base import ImageProcessor, Place, Processor
from octavo.system.tensor import numpy_dtype

_MODALITIES = ("image", "audio")
_FORMS = {
    "image": " (offline: an image of Pillow, or an array uint8 [height, width, 3])",
    "audio": " (offline: (samples, sampling_rate), with samples as an array of floats [samples])",
}
GRID, SIZES = "image_grid_thw", "image_sizes"
_DIMS = 2
# Counted for a list, which may be long: counting its values would take as long as reading them.
_LIST_NBYTES = 2**20


def mm_embeds_off(modality: Modality) -> str:
    """Return the message of the error for rows that are not accepted."""
    return (
        f"{modality}_embeds, rows of floats of an encoder, are not accepted here; start the engine "
        "with --enable-mm-embeds (enable_mm_embeds=True), or send the "
        f"{NAMES[modality]} itself{_FORMS.get(modality, '')}."
    )


def is_embeds(source: Any, modality: Modality) -> bool:
    """Return True if a caller's item, or all items of a modality, are rows of an encoder.

    They are an array of floats with two or more dimensions, a torch tensor, or a dict with them.
    """
    if modality not in _MODALITIES:
        return False
    if isinstance(source, Mapping):
        return f"{modality}_embeds" in source
    if isinstance(source, np.ndarray):
        return bool(np.issubdtype(source.dtype, np.floating)) and source.ndim >= _DIMS
    return is_torch(source) and source.ndim >= _DIMS


def nbytes_of(source: Mapping[str, Any]) -> int:
    """Return about how many bytes the values of a part of a chat have, for the time to read it."""
    return sum(
        len(x) if isinstance(x, str) else int(getattr(x, "nbytes", _LIST_NBYTES))
        for x in source.values()
    )


def read_embeds(
    source: Any, processor: Processor, modality: Modality, max_items: int
) -> list[Item]:
    """Return the items whose rows a caller gives.

    The rows are [rows, size] for one item, or [items, rows, size]. A dict has them as
    `image_embeds` or `audio_embeds`, also as a list of items. For pictures it may also have one of:

    - `image_grid_thw`, integers [items, 3]: patches in time, height and width (Qwen-VL). The rows
      of all items may then be one array [rows, size].
    - `image_sizes`, integers [items, 2]: width and height of each picture. Models whose prompts
      depend on them, such as Pixtral and SmolVLM, need them.

    The number of the rows is checked here, their size and numbers by `EncoderSpec.check`.

    Args:
        source: the rows, or the dict.
        processor: the model's processor.
        modality: modality of the items.
        max_items: most items. Each takes time and memory, also if its rows are few bytes.

    Raises:
        RequestError: they have a wrong form, are too many, or do not fit the model.
    """
    name = f"{modality}_embeds"
    given = source if isinstance(source, Mapping) else {name: source}
    known = [name, GRID, SIZES] if modality == "image" else [name]
    for key in given:
        if key not in known:
            raise RequestError(f"{name}.{str(key)[:40]} is unknown; give {', '.join(known)}.")
    if given.get(name) is None:
        raise RequestError(f"{name} is missing in its dict; give an array [rows, size].")
    tensors = _tensors(given[name], name, max_items)
    places = _places(given, processor, max_items)
    if places is None:
        places = [_place_of_rows(len_of(tensor), processor, modality) for tensor in tensors]
    elif len(tensors) == 1 and len(places) > 1:
        tensors = _divide(tensors[0], places, name)
    if len(places) != len(tensors):
        raise RequestError(
            f"{name} has {len(tensors)} items, and {GRID} or {SIZES} has {len(places)}; give one "
            "for each."
        )
    items = []
    for tensor, place in zip(tensors, places, strict=True):
        if len_of(tensor) != place.num_embeds:
            raise RequestError(
                f"{name} has {len_of(tensor)} rows, and a picture with its {GRID} or {SIZES} has "
                f"{place.num_embeds} in this model; give the rows of this picture."
            )
        part = make_part_of_data(replace(place, num_encoder_tokens=0), {EMBEDS: tensor})
        items.append(Item(modality, (part,)))
    return items


def len_of(tensor: TensorData) -> int:
    """Return the number of rows."""
    return tensor.shape[0]


def _tensors(value: Any, name: str, max_items: int) -> list[TensorData]:
    """Return the rows [rows, size] of each item."""
    if isinstance(value, list | tuple):
        found: list[TensorData] = []
        for one in value:
            found += _tensors(one, name, max_items - len(found))
        return found
    tensor = _tensor(value, name)
    shape = tensor.shape
    if tensor.dtype not in EMBEDS_DTYPES:
        raise RequestError(
            f"{name} holds numbers of type {tensor.dtype}; it must be one of "
            f"{', '.join(EMBEDS_DTYPES)}."
        )
    if len(shape) not in (_DIMS, _DIMS + 1) or 0 in shape:
        raise RequestError(
            f"{name} has the shape {list(shape)[:8]}; it must be [rows, size] or [items, rows, "
            "size], without a zero."
        )
    if (shape[0] if len(shape) > _DIMS else 1) > max_items:
        raise RequestError(
            f"{name} has too many items. A part of a chat has one, and a prompt at most "
            "limit_mm_per_prompt; send fewer, or a part for each."
        )
    if len(shape) == _DIMS:
        return [tensor]
    step = len(tensor.data) // shape[0]
    return [
        TensorData(tensor.dtype, shape[1:], tensor.data[i * step : (i + 1) * step])
        for i in range(shape[0])
    ]


def _tensor(value: Any, name: str) -> TensorData:
    return decode_tensor(value, name) if isinstance(value, str) else to_tensor(value, name)


def _places(given: Mapping[str, Any], processor: Processor, max_items: int) -> list[Place] | None:
    """Return the places of pictures with grids or sizes; None: the caller gives neither."""
    grids, sizes = _integers(given, GRID, 3, max_items), _integers(given, SIZES, 2, max_items)
    if grids is None and sizes is None:
        return None
    if grids is not None and sizes is not None:
        raise RequestError(f"{GRID} and {SIZES} exclude each other; give one of them.")
    assert isinstance(processor, ImageProcessor)
    if sizes is not None:
        return [processor.place(height, width) for width, height in sizes]
    places = []
    for time, height, width in grids or ():
        place = processor.place_of_grid((time, height, width))
        if place is None:
            raise RequestError(f"{GRID} is not for this model; leave it out, or give {SIZES}.")
        places.append(place)
    return places


def _integers(
    given: Mapping[str, Any], name: str, count: int, max_items: int
) -> Sequence[Sequence[int]] | None:
    """Return integers [items, count], or those of one item [count]; None: there are none."""
    value = given.get(name)
    if value is None:
        return None
    try:
        array = _integer_array(value, name)
    except (ValueError, OverflowError):  # also a RequestError
        array = np.empty(0)
    rows = array[None] if array.ndim == 1 else array
    if (
        rows.ndim != _DIMS
        or rows.shape[1] != count
        or not np.issubdtype(rows.dtype, np.integer)
        or not 0 < len(rows) <= max_items
        or rows.min() < 1
        or rows.max() > MAX_SIDE
    ):
        raise RequestError(
            f"{name} must be positive integers up to {MAX_SIDE}: [items, {count}], or [{count}] "
            f"for one item (most items here: {max_items})."
        )
    found: list[list[int]] = rows.tolist()
    return found


def _integer_array(value: Any, name: str) -> NDArray[Any]:
    """Return the array in a tensor, a file in base64, or a list of integers.

    Raises:
        ValueError: it is something else, or the lists have several lengths.
        OverflowError: an integer has more than 64 bits.
    """
    if not isinstance(value, list | tuple):
        tensor = _tensor(value, name)
        return np.frombuffer(tensor.data, numpy_dtype(tensor.dtype)).reshape(tensor.shape)
    # An array of texts would have the length of the longest one for each.
    array = np.array(value, object)
    if not all(isinstance(x, Integral) and not isinstance(x, bool) for x in array.flat):
        raise ValueError
    return array.astype(np.int64)


def _place_of_rows(num_rows: int, processor: Processor, modality: Modality) -> Place:
    place = processor.place_of_rows(num_rows)
    if place is None:
        raise RequestError(
            f"{num_rows} rows alone do not say which {NAMES[modality]} they are; give a dict with "
            f"{modality}_embeds and {GRID} (Qwen-VL) or {SIZES}."
        )
    return place


def _divide(tensor: TensorData, places: Sequence[Place], name: str) -> list[TensorData]:
    """Return the rows of each item, from those of all one after the other."""
    total = sum(place.num_embeds for place in places)
    if len_of(tensor) != total:
        raise RequestError(
            f"{name} has {len_of(tensor)} rows, and the {len(places)} items have {total}; give the "
            "rows of all of them."
        )
    parts, begin, nbytes = [], 0, len(tensor.data) // total
    for place in places:
        end = begin + place.num_embeds
        data = tensor.data[begin * nbytes : end * nbytes]
        parts.append(TensorData(tensor.dtype, (place.num_embeds, *tensor.shape[1:]), data))
        begin = end
    return parts
