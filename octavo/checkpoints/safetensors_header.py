"""Headers of safetensors files."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from octavo.checkpoints.config_json import MOST_JSON_NBYTES
from octavo.checkpoints.mapped_file import StoredTensor
from octavo.checkpoints.model_files import printable, refuse_lfs_pointer, require_file
from octavo.errors import ModelError

_DTYPES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_DTYPES["F8_E8M0"] = "uint8"  # exponents of powers of two, which numbers of one byte represent
_DTYPES |= {f"F{bits}": f"float{bits}" for bits in (16, 32, 64)}
_DTYPES |= {f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)} | {"U8": "uint8"}


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name.

    The library checks that tensors do not overlap, and that the file contains all of them.

    Raises:
        ModelError: the file is cut off or is not a safetensors file.
    """
    require_file(file)
    try:
        refuse_lfs_pointer(file)
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > MOST_JSON_NBYTES:
                raise ValueError("the header's length is impossible")
            header = msgspec.json.decode(stream.read(length))
        with _opened(file, header) as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  # no dict
            return {
                name: StoredTensor(
                    file,
                    tuple(s.get_shape()),
                    _DTYPES.get(d := s.get_dtype(), d),
                    8 + length + header[name]["data_offsets"][0],
                )
                for name, s in slices.items()
            }
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{file} is damaged or cut off ({error}); download the file again."
        ) from None


def _opened(file: Path, header: object) -> Any:
    """Return an open file.

    Raises:
        ValueError: the library refuses the header; names the wrong tensor where it does not.
    """
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        entries = header.items() if isinstance(header, dict) else ()
        wrong = (name for name, entry in entries if not _has_its_size(name, entry))
        if (name := next(wrong, None)) is None or f"`{name}`" in str(error):
            raise
        raise ValueError(f"{error}: {printable(name)}") from None


def _has_its_size(name: str, entry: object) -> bool:
    """Return True if a tensor's place is as large as its shape and type require."""
    if name == "__metadata__":
        return True
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if (
            all(type(size) is int for size in shape)
        ):
            bits = re.search(r"\d+", dtype)
            return bool((end - begin) * 8 == math.prod(shape) * int(bits[0] if bits else 8))
    return False
