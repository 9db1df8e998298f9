"""Decoding of picture files: formats, rotation, transparency, depth, damage and limits."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from octavo.errors import RequestError, UnsupportedError
from octavo.media.images import MAX_PIXELS, decode_image

RGB = np.random.default_rng(0).integers(0, 256, (13, 21, 3), np.uint8)


def save(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_header(width, height):
    """Return a PNG of a few bytes that claims a size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n"
    for kind, body in ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(1000)))):
        data += struct.pack(">I", len(body)) + kind + body
        data += struct.pack(">I", zlib.crc32(kind + body))
    return data


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF"])
def test_lossless_formats_give_the_pixels(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    np.testing.assert_array_equal(decode_image(save(Image.fromarray(RGB), kind, **options)), RGB)


def test_jpeg_and_gif():
    smooth = np.add.outer(np.arange(40), np.arange(60))[:, :, None].repeat(3, 2).astype(np.uint8)
    found = decode_image(save(Image.fromarray(smooth), "JPEG", quality=95))
    assert np.abs(found.astype(int) - smooth).max() < 8
    palette = Image.fromarray(RGB).quantize(256)
    np.testing.assert_array_equal(
        decode_image(save(palette, "GIF")), np.asarray(palette.convert("RGB"))
    )


def test_result_is_writable_and_contiguous():
    found = decode_image(save(Image.fromarray(RGB), "PNG"))
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation(orientation):
    turned = {
        1: RGB,
        2: RGB[:, ::-1],
        3: RGB[::-1, ::-1],
        4: RGB[::-1],
        5: RGB.transpose(1, 0, 2),
        6: RGB[::-1].transpose(1, 0, 2),
        7: RGB[::-1, ::-1].transpose(1, 0, 2),
        8: RGB[:, ::-1].transpose(1, 0, 2),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    np.testing.assert_array_equal(
        decode_image(save(Image.fromarray(RGB), "PNG", exif=exif)), turned
    )


def test_transparent_pixels_are_drawn_over_white():
    alpha = np.zeros((13, 21, 1), np.uint8)
    alpha[:, 10:] = 255
    expected = RGB.copy()
    expected[:, :10] = 255
    found = decode_image(save(Image.fromarray(np.concatenate([RGB, alpha], 2)), "PNG"))
    np.testing.assert_array_equal(found, expected)
    gray = decode_image(save(Image.fromarray(np.stack([RGB[:, :, 0], alpha[:, :, 0]], 2)), "PNG"))
    assert (gray[:, :10] == 255).all()
    np.testing.assert_array_equal(gray[:, 10:, 1], RGB[:, 10:, 0])


def test_transparent_color_of_a_palette():
    palette = Image.fromarray(RGB).quantize(16)
    found = decode_image(save(palette, "PNG", transparency=3))
    at = np.asarray(palette) == 3
    assert at.any()
    assert (found[at] == 255).all()
    np.testing.assert_array_equal(found[~at], np.asarray(palette.convert("RGB"))[~at])


def test_cmyk():
    found = decode_image(save(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF"))
    assert (found == (255, 0, 0)).all()


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_keep_their_high_byte(kind):
    wide = np.array([[0, 255, 256, 0x8000, 0xFFFF]], np.uint16)
    found = decode_image(save(Image.fromarray(wide), kind))
    np.testing.assert_array_equal(found[0, :, 1], wide[0] >> 8)


@pytest.mark.parametrize("mode", ["1", "L"])
def test_gray(mode):
    image = Image.fromarray(RGB).convert(mode)
    expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(decode_image(save(image, "PNG")), expected)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_first_frame_of_an_animation(kind):
    red, blue = (Image.new("RGB", (9, 7), color) for color in ("red", "blue"))
    options = {"lossless": True} if kind == "WEBP" else {}
    found = decode_image(save(red, kind, save_all=True, append_images=[blue], **options))
    assert found.shape == (7, 9, 3)
    assert (found == (255, 0, 0)).all()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_truncated_file(kind):
    whole = save(Image.fromarray(RGB), kind)
    for length in (len(whole) // 2, 20):
        with pytest.raises(RequestError, match=f"the {kind} file is damaged") as error:
            decode_image(whole[:length])
        assert " object at " not in error.value.message


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_damaged_files_give_pixels_or_typed_errors(kind):
    random = np.random.default_rng(1)
    whole = save(Image.fromarray(RGB), kind)
    for _ in range(60):
        data = bytearray(whole)
        for at in random.integers(8, len(data), 3):
            data[at] = random.integers(256)
        try:
            found = decode_image(bytes(data))
        except RequestError:
            continue
        assert found.ndim == 3


def test_polyglot_is_the_picture_that_its_first_bytes_name():
    data = save(Image.fromarray(RGB), "PNG") + b"PK\x03\x04<html><script>"
    np.testing.assert_array_equal(decode_image(data), RGB)


def test_bomb_is_refused_by_its_header():
    with pytest.raises(RequestError, match=rf"60000 x 60000 pixels; at most {MAX_PIXELS} pixels"):
        decode_image(png_header(60_000, 60_000))
    with pytest.raises(RequestError, match="65536 in a row"):
        decode_image(png_header(70_000, 1))


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"\xef\xbb\xbf<?xml version='1.0'?><svg/>", "SVG"),
        (b"%PDF-1.7", "PDF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "PostScript"),
        (b"\0\0\0\x1cftypavif", "AVIF"),
        (b"\0\0\0\x1cftypheic", "HEIC"),
        (b"\0\0\0\x1cftypisom", "MP4"),
        (b"\xff\x0a1234", "JPEG XL"),
        (b"8BPS\0\1", "Photoshop"),
        (b"RIFF\0\0\0\0WAVEfmt ", "RIFF"),
        (b"<!DOCTYPE html><html>", "a web page"),
    ],
)
def test_other_formats_are_refused_by_name(data, name):
    with pytest.raises(UnsupportedError, match=f"{name}.*send PNG, JPEG, WebP"):
        decode_image(data)


@pytest.mark.parametrize(
    ("mode", "name"), [("LAB", "Lab"), ("F", "floating-point"), ("I", "32 bits")]
)
def test_color_models_without_conversion(mode, name):
    image = Image.new(mode, (8, 8), 70_000 if mode == "I" else 0)
    with pytest.raises(UnsupportedError, match=name):
        decode_image(save(image, "TIFF"))


@pytest.mark.parametrize("data", [b"", b"hello", bytes(100)])
def test_no_picture(data):
    with pytest.raises(RequestError, match="is no picture"):
        decode_image(data)
