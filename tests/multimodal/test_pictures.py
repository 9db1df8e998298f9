"""Pictures read by the helper process: features, digests, and files that are damaged or huge."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from octavo.errors import RequestError, UnsupportedError
from octavo.messages import PlaceholderRange
from octavo.multimodal.pictures import PictureReader
from octavo.multimodal.processors.registry import make_processor

SETTINGS = {
    "size": {"shortest_edge": 3136, "longest_edge": 100_000},
    "resample": 3,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "placeholder": "<|image_pad|>",
    "embed_token": "<|image_pad|>",
}
PIXELS = np.random.default_rng(0).integers(0, 256, (90, 130, 3), np.uint8)


def save(kind="PNG", **options):
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, kind, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def reader():
    reader = PictureReader("qwen2_vl", SETTINGS, num_processes=1)
    yield reader
    reader.close()


def test_feature_is_the_processed_picture(reader):
    picture = reader.read(save(), "messages").result()
    expected = make_processor("qwen2_vl", SETTINGS).process(PIXELS)
    (part,) = picture.parts
    feature = part.feature(picture.modality, PlaceholderRange(3, 15), part.digest)
    assert feature.modality == "image"
    assert feature.grid == (1, 3, 5)
    assert feature.num_encoder_tokens == 60
    assert feature.num_rows == 15
    assert list(feature.data) == list(expected)
    for name, array in expected.items():
        tensor = feature.data[name]
        assert tensor.shape == array.shape
        found = np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)
        np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_helper_has_the_decoder_of_every_format(reader, kind):
    assert reader.read(save(kind), "messages").result().num_embeds == 15


def test_digest_is_of_the_content(reader):
    first = reader.read(save(), "messages").result()
    same = reader.read(save("BMP"), "messages").result()
    other = reader.read(save(), "messages", {"max_pixels": 5000}).result()
    assert first.parts[0].digest == same.parts[0].digest
    assert first.parts[0].digest != other.parts[0].digest
    assert other.num_embeds < first.num_embeds


def test_jpeg_with_several_pictures_and_rotation(reader):
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    one = Image.fromarray(PIXELS)
    one.save(file, "MPO", save_all=True, append_images=[one], exif=exif)
    assert reader.read(file.getvalue(), "messages").result().parts[0].place.grid == (1, 5, 3)


@pytest.mark.parametrize(
    ("data", "kind", "match"),
    [
        (save()[:-1000], RequestError, r"messages\[0\]: the PNG file is damaged"),
        (b"<svg/>", UnsupportedError, r"messages\[0\]: the file is an SVG"),
        (b"", RequestError, r"messages\[0\]: the file is no picture"),
    ],
)
def test_errors_name_the_place_of_the_picture(reader, data, kind, match):
    with pytest.raises(kind, match=match) as error:
        reader.read(data, "messages[0]").result()
    assert error.value.param == "messages[0]"


def test_decoders_write_nothing_to_the_log(capfd):
    damaged = bytearray(save("TIFF", compression="tiff_deflate"))
    damaged[100:2000] = bytes(1900)
    reader = PictureReader("qwen2_vl", SETTINGS, num_processes=1)
    with pytest.raises(RequestError, match="damaged"):
        reader.read(damaged, "messages").result()
    reader.close()
    assert capfd.readouterr().err == ""


def test_bomb_and_narrow_picture_harm_no_other(reader):
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n"
    for kind, body in ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(20_000_000)))):
        bomb += struct.pack(">I", len(body)) + kind + body
        bomb += struct.pack(">I", zlib.crc32(kind + body))
    assert len(bomb) < 30_000
    narrow = io.BytesIO()
    Image.new("RGB", (60_000, 1)).save(narrow, "PNG")
    futures = [reader.read(data, "messages") for data in (bomb, narrow.getvalue(), save())]
    with pytest.raises(RequestError, match="60000 x 60000 pixels; at most"):
        futures[0].result()
    with pytest.raises(RequestError, match="at most 200 times"):
        futures[1].result()
    assert futures[2].result().num_embeds == 15


def test_wrong_kwargs_are_refused_at_once(reader):
    with pytest.raises(RequestError, match="min_pixels"):
        reader.read(save(), "messages", {"min_pixels": -1})
