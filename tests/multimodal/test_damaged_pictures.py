"""Damaged picture files in the helper process: an input of the encoder or a typed error each, and
the next good file is read as before."""

import io
import random

import numpy as np
import pytest
from PIL import Image

from octavo.errors import RequestError
from octavo.multimodal.pictures import PictureReader
from tests.frontend.test_chat_media import SETTINGS
from tests.media.damage import damage

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 60, 4), np.uint8)
RGB, RGBA = Image.fromarray(PIXELS[:, :, :3]), Image.fromarray(PIXELS)
FRAMES = {"save_all": True, "append_images": [RGB.rotate(90)] * 2}
FILES = [
    *((RGB, kind, {}) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")),
    *((RGB, kind, FRAMES) for kind in ("PNG", "WEBP", "GIF", "MPO")),
    (RGBA, "PNG", {}),
    (RGBA, "WEBP", {"lossless": True}),
    (RGB.quantize(16), "PNG", {"transparency": 3}),
    (RGB, "JPEG", {"progressive": True, "icc_profile": bytes(300)}),
    (RGB.convert("CMYK"), "JPEG", {}),
    (RGB, "TIFF", {"compression": "tiff_lzw"}),
    (RGB, "TIFF", {"compression": "jpeg"}),
    (RGB.convert("1"), "TIFF", {"compression": "group4"}),
]


@pytest.fixture(scope="module")
def read():
    reader = PictureReader("qwen2_vl", SETTINGS)
    yield lambda data: reader.read(data, "picture 1").result()
    reader.close()


@pytest.mark.parametrize("number", range(len(FILES)))
def test_damaged_files(read, number):
    image, kind, options = FILES[number]
    file = io.BytesIO()
    image.save(file, kind, **options)
    good, rng = file.getvalue(), random.Random(number)
    expected, errors = read(good), []
    for _ in range(40):
        try:
            found = read(damage(good, rng))
        except RequestError as error:
            errors.append(error)
            continue
        (part,) = found.parts
        assert np.isfinite(np.frombuffer(part.fields["pixel_values"].data, np.float32)).all()
    assert errors
    assert all(error.message.startswith("picture 1: ") for error in errors)
    assert all(" object at " not in error.message for error in errors)
    assert read(good) == expected
