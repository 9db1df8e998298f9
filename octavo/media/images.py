"""Decoding of picture files to pixels, by Pillow.

Pillow is native code that reads users' files, so only a helper process imports this module. A
file is sniffed first, and Pillow may only use the decoder of the format that was found: it has many
others, and some of them start programs.
"""

from __future__ import annotations

import codecs
import importlib
import io
import struct
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from octavo.errors import RequestError, UnsupportedError

MAX_PIXELS = 2**26
"""Maximum number of pixels of a picture, which take 450 MB while they are decoded."""
MAX_SIDE = 2**16
"""Maximum width or height in pixels."""
FORMATS = "PNG, JPEG, WebP, GIF, BMP or TIFF"

# The decoders, and the text encodings of metadata, are imported now, since the helper process can
# open no file later.
Image.preinit()
for _name in ("Bmp", "Gif", "Jpeg", "Mpo", "Png", "Tiff", "WebP"):
    importlib.import_module(f"PIL.{_name}ImagePlugin")
for _name in ("ascii", "latin_1", "utf_8", "utf_16", "utf_16_be", "utf_16_le"):
    codecs.lookup(_name)

_FORMATS = (
    ("PNG", b"\x89PNG\r\n\x1a\n"),
    ("JPEG", b"\xff\xd8\xff"),
    ("GIF", b"GIF87a"),
    ("GIF", b"GIF89a"),
    ("BMP", b"BM"),
    ("TIFF", b"II*\0"),
    ("TIFF", b"MM\0*"),
)
_REFUSED = (
    ("PDF", b"%PDF"),
    ("PostScript", b"%!PS"),
    ("Photoshop", b"8BPS"),
    ("icon", b"\0\0\1\0"),
    ("JPEG 2000", b"\0\0\0\x0cjP"),
    ("JPEG 2000", b"\xff\x4f\xff\x51"),
    ("JPEG XL", b"\xff\x0a"),
    ("JPEG XL", b"\0\0\0\x0cJXL"),
    ("OpenEXR", b"v/1\x01"),
    ("big TIFF", b"II+\0"),
    ("big TIFF", b"MM\0+"),
    ("ZIP", b"PK\x03\x04"),
    ("gzip", b"\x1f\x8b"),
    ("Matroska or WebM video", b"\x1a\x45\xdf\xa3"),
    ("Ogg", b"OggS"),
)
# Modes of Pillow with one number of 16 bits for each pixel; "I" is what the decoder of old files
# makes of them.
_WIDE_MODES = ("I;16", "I;16B", "I;16L", "I;16N", "I")
_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")


def sniff(data: bytes) -> str:
    """Return Pillow's name of a file's format.

    Raises:
        UnsupportedError: it is another format, which the message names.
        RequestError: it is no picture.
    """
    for name, magic in _FORMATS:
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    other = _other_format(data)
    if other is not None:
        raise UnsupportedError(f"the file is {other}; send {FORMATS}.")
    raise RequestError(
        f"the file is no picture: it has {len(data)} bytes and begins with {data[:12]!r}; send "
        f"{FORMATS}."
    )


def decode_image(data: bytes) -> NDArray[np.uint8]:
    """Decode a picture file.

    The result is what a person sees: it is rotated as its EXIF data say, transparent pixels are
    drawn over white, as vLLM does, and of an animation it has the first frame. Of numbers of 16
    bits it has the high byte. Bytes after the picture are not read.

    Args:
        data: the file: PNG, JPEG, WebP, GIF, BMP or TIFF.

    Returns:
        Pixels: uint8 [height, width, 3], red, green and blue.

    Raises:
        UnsupportedError: the format is another one.
        RequestError: the file is damaged, or the picture is too large.
    """
    name = sniff(data)
    Image.MAX_IMAGE_PIXELS = None  # `_check_size` is stricter, and names the limit
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata
            with Image.open(io.BytesIO(data), formats=[name]) as file:
                _check_size(*file.size)
                file.load()
                # Rotation keeps the number of pixels, and returns a copy if there is none.
                return to_rgb(ImageOps.exif_transpose(file))
    except (RequestError, MemoryError):
        raise
    # Decoders raise nearly anything for damaged files: OSError, ValueError, SyntaxError, EOFError,
    # struct.error, IndexError, KeyError, TypeError, OverflowError, ZeroDivisionError ...
    except Exception as error:
        raise RequestError(
            f"the {name} file is damaged or unusual: {_reason(error)}. Convert it to a plain PNG "
            "or JPEG."
        ) from None


def _check_size(width: int, height: int) -> None:
    """Refuse a picture that is too large, before its pixels are decoded."""
    if width < 1 or height < 1:
        raise RequestError(f"the picture has {width} x {height} pixels.")
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise RequestError(
            f"the picture has {width} x {height} pixels; at most {MAX_PIXELS} pixels, and "
            f"{MAX_SIDE} in a row or a column, are allowed. Make it smaller: models scale "
            "pictures down to a few megapixels."
        )


def to_rgb(image: Image.Image) -> NDArray[np.uint8]:
    """Return the pixels of an image: uint8 [height, width, 3]; see `decode_image`."""
    if image.mode in _WIDE_MODES:
        wide = np.asarray(image)
        if image.mode == "I" and (wide.min() < 0 or wide.max() > 0xFFFF):
            raise UnsupportedError("the picture has numbers of 32 bits; convert it to 8 bits.")
        high = (wide >> 8).astype(np.uint8)
        return np.repeat(high[:, :, None], 3, axis=2)
    if image.mode == "F":
        raise UnsupportedError("the picture has floating-point numbers; convert it to 8 bits.")
    if image.mode == "LAB":
        raise UnsupportedError("the picture has the color model Lab; convert it to RGB.")
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        image = white
    elif image.mode != "RGB":
        image = image.convert("RGB")
    return np.array(image)


def _other_format(data: bytes) -> str | None:
    """Return what a file of a known format that is refused is, such as "in the format PDF"."""
    for name, magic in _REFUSED:
        if data.startswith(magic):
            return f"in the format {name}"
    if data[4:8] == b"ftyp":
        brand = data[8:12].decode("latin-1")
        kinds = {"avif": "AVIF", "avis": "AVIF", "heic": "HEIC", "heix": "HEIC", "mif1": "HEIF"}
        return f"in the format {kinds.get(brand, 'MP4')}"
    if data[:4] == b"RIFF":
        return "a RIFF file, but no WebP picture"
    start = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<svg", b"<?xml")) or b"<svg" in start:
        return "an SVG drawing or another XML file, not a picture of pixels"
    if start.startswith((b"<!doctype", b"<html")):
        return "a web page"
    return None


def _reason(error: Exception) -> str:
    """Return an error of a decoder as one short line."""
    cut = isinstance(error, struct.error | EOFError)
    text = "a part of it is missing" if cut else str(error) or type(error).__name__
    if isinstance(error, UnidentifiedImageError):  # its text has an address in memory
        text = "its head cannot be read"
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror  # without the name of a file of this machine
    return " ".join(text.split())[:200].rstrip(".")
