"""Tensors from clients: files of `torch.save` and of `numpy.save`, in base64.

Neither torch nor pickle reads them: no content of a file is looked up or called.
"""

from __future__ import annotations

import binascii
import math
import re
from collections.abc import Iterator

import numpy as np

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
_MAX_HEADER = 4096
_MAX_SIZE = 2**48
_HEADER = re.compile(
    rb"\{'descr': '(?P<dtype>[<>|](f[248]|[iu][1248]))', 'fortran_order': (?P<fortran>True|False), "
    rb"'shape': \((?P<shape>(\d{1,12}(, ?|(?=\)))){0,8})\),? ?\}\s*"
)


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
    """Return the array in a file of `numpy.save`.

    The format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
    """
    size = {1: 2, 2: 4, 3: 4}.get(data[6] if len(data) > 6 else 0, 0)
    begin = len(_NPY) + 2 + size
    end = begin + int.from_bytes(data[begin - size : begin], "little")
    header = _HEADER.fullmatch(data[begin:end]) if size and end - begin <= _MAX_HEADER else None
    if header is None:
        raise RequestError(
            f"{name} is a file of numpy.save that is damaged, or holds no array of numbers.", name
        )
    dtype = np.dtype(header["dtype"].decode())
    shape = tuple(int(number) for number in header["shape"].replace(b",", b" ").split())
    left = memoryview(data)[end:]
    most = math.prod(max(number, 1) for number in shape)
    if math.prod(shape) * dtype.itemsize != len(left) or most > _MAX_SIZE:
        raise RequestError(
            f"{name} is a damaged file of numpy.save: it has {len(left)} bytes of numbers, and "
            f"its shape is {str(list(shape))[:80]}.",
            name,
        )
    is_fortran = header["fortran"] == b"True"
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
