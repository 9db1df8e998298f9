"""Tensors from clients: files of `torch.save` and of `numpy.save`, in base64.

Neither torch nor pickle reads them: no content of a file is looked up or called.
"""

from __future__ import annotations

import binascii
import io
import math
from collections.abc import Iterator

import numpy as np
from numpy.lib import format as npy

from octavo.checkpoints.torch_file import FileTensor, TorchFileError, read_torch_file
from octavo.errors import RequestError
from octavo.messages import TensorData
from octavo.system.tensor import itemsize

# The file of a tensor has eight.
_MAX_ENTRIES = 64
_MAX_PROGRAM_NBYTES = 4096
# Characters of base64 that are decoded in one call, which keeps the interpreter's lock.
_PIECE = 2**20
_NPY = b"\x93NUMPY"
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def decode_tensor(text: str, name: str) -> TensorData:
    """Return the tensor in the base64 of a file.

    Args:
        text: the base64.
        name: field that has the text, for errors.

    Raises:
        RequestError: the text is something else.
    """
    return read_tensor(b"".join(_decode(text, name)), name)


def read_tensor(data: bytes, name: str) -> TensorData:
    """Return the tensor in the bytes of a file; `name` is the field that has it, for errors.

    Raises:
        RequestError: the file holds no tensor, or one of objects.
    """
    if data.startswith(_NPY):
        return _read_npy(data, name)
    try:
        tensor = read_torch_file(
            memoryview(data), max_entries=_MAX_ENTRIES, max_program_nbytes=_MAX_PROGRAM_NBYTES
        )
        if not isinstance(tensor, FileTensor):
            raise TorchFileError("it holds a dictionary, not one tensor")
    except TorchFileError as error:
        raise RequestError(
            f"{name} is not a tensor saved with torch.save or numpy.save: {error}.", name
        ) from None
    bits = f"u{itemsize(tensor.dtype)}"
    numbers: np.ndarray = np.ndarray(tensor.shape, bits, data, tensor.begin, tensor.strides)
    return TensorData(tensor.dtype, tensor.shape, numbers.tobytes())


def _read_npy(data: bytes, name: str) -> TensorData:
    """Return the array in a file of `numpy.save`."""
    file = io.BytesIO(data)
    try:
        version = npy.read_magic(file)
        shape, is_fortran, dtype = _HEADERS[version](file)
    except (KeyError, ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise RequestError(f"{name} is a damaged file of numpy.save.", name) from None
    if dtype.kind not in "fiu":
        raise RequestError(
            f"{name} holds an array of type {str(dtype)[:40]}; it must hold numbers.", name
        )
    left = memoryview(data)[file.tell() :]
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(left):
        raise RequestError(
            f"{name} is a damaged file of numpy.save: it has {len(left)} bytes of numbers, and "
            f"its shape is {str(list(shape))[:80]}.",
            name,
        )
    array = np.frombuffer(left, dtype).reshape(shape, order="F" if is_fortran else "C")
    numbers = array.astype(dtype.newbyteorder("<"), copy=False)
    return TensorData(dtype.name, shape, numbers.tobytes())


def _decode(text: str, name: str) -> Iterator[bytes]:
    padding = text.find("=")
    if padding < 0 or padding >= len(text) - 2:
        try:
            for begin in range(0, len(text), _PIECE):
                yield binascii.a2b_base64(text[begin : begin + _PIECE], strict_mode=True)
            return
        except ValueError:
            pass
    raise RequestError(f"{name} is not valid base64.", name)
