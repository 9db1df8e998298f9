"""Headers of safetensors files.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from octavo.checkpoints.config_json import MOST_JSON_NBYTES
from octavo.checkpoints.mapped_file import StoredTensor
from octavo.checkpoints.model_files import open_file, printable, refuse_lfs_pointer
from octavo.errors import ModelError, reason_of

_DTYPES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_DTYPES["F8_E8M0"] = "uint8"  # exponents of powers of two, which numbers of one byte represent
_DTYPES |= {f"F{bits}": f"float{bits}" for bits in (16, 32, 64)}
_DTYPES |= {f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)} | {"U8": "uint8"}
_BITS = {f"{kind}{bits}": bits for kind in "UIF" for bits in (8, 16, 32, 64)}
_BITS |= {"BOOL": 8, "BF16": 16, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_BITS |= {f"F8_{form}": 8 for form in ("E4M3", "E5M2", "E8M0", "E4M3FNUZ", "E5M2FNUZ")}
"""Bits of a number of each type of the format."""
_Size = Annotated[int, Meta(ge=0)]


class _Entry(msgspec.Struct):
    """Description of a tensor."""

    dtype: str
    shape: Annotated[list[_Size], Meta(max_length=16)]
    data_offsets: tuple[_Size, _Size]
    """Begin and end, from the end of the header on."""


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name.

    As the format requires, the tensors fill the file without gaps and overlaps. The file is read,
    not mapped: it may be cut off meanwhile.

    Raises:
        ModelError: the file is cut off or is not a safetensors file.
    """
    try:
        refuse_lfs_pointer(file)
        with open_file(file) as stream:
            length = int.from_bytes(stream.read(8), "little")
            data_nbytes = os.fstat(stream.fileno()).st_size - 8 - length
            if length > MOST_JSON_NBYTES or data_nbytes < 0:
                raise ValueError("the header's length is impossible")
            raw = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(it, type=_Entry) for name, it in raw.items()}
        _check_places(entries, data_nbytes)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{file} is damaged or cut off ({reason_of(error)}); download the file again."
        ) from None
    return {
        name: StoredTensor(
            file, tuple(it.shape), _DTYPES.get(it.dtype, it.dtype), 8 + length + it.data_offsets[0]
        )
        for name, it in entries.items()
    }


def _check_places(entries: dict[str, _Entry], data_nbytes: int) -> None:
    """Raise ValueError if tensors do not fill the file, or one has another size than its place."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda it: it[1].data_offsets):
        begin, end = entry.data_offsets
        bits = _BITS.get(entry.dtype)
        if bits is None:
            raise ValueError(f"{printable(name)} has the unknown type {printable(entry.dtype)}")
        if begin != at:
            raise ValueError(f"{printable(name)} does not begin where another tensor ends")
        if (end - begin) * 8 != math.prod(entry.shape) * bits:
            raise ValueError(f"{printable(name)} has another size than its place")
        at = end
    if at != data_nbytes:
        raise ValueError(f"the tensors have {at} bytes, and the file has {data_nbytes} for them")
