"""Reader of the header of GGUF files: metadata, and names, types and places of the tensors.

The header may be hostile. Every length is compared with the rest of the file before it is used, so
memory and time are limited by the size of the file. Texts of arrays are decoded when they are read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from octavo.checkpoints.gguf.repack import REPACKED
from octavo.checkpoints.model_files import open_file, refuse_lfs_pointer
from octavo.errors import ModelError, reason_of
from octavo.system.block_types import BLOCK_TYPES

_TENSOR_TYPES = {
    0: "float32",
    1: "float16",
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    10: "q2_k",
    11: "q3_k",
    12: "q4_k",
    13: "q5_k",
    14: "q6_k",
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    20: "iq4_nl",
    21: "iq3_s",
    22: "iq2_s",
    23: "iq4_xs",
    28: "float64",
    29: "iq1_m",
    30: "bfloat16",
    34: "tq1_0",
    35: "tq2_0",
    39: "mxfp4",
    40: "nvfp4",
}
"""Types that Octavo reads, by ggml's numbers."""
_OTHER_TYPES = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64"}
"""Names of types that Octavo does not read."""
STORED_BLOCKS = {kind: BLOCK_TYPES[kind] for kind in _TENSOR_TYPES.values() if kind in BLOCK_TYPES}
STORED_BLOCKS |= {kind: repacked.stored for kind, repacked in REPACKED.items()}
"""Blocks of the types that have blocks, as they are in files."""
_FLOAT_NBYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_NUMBERS = dict(enumerate("BbHhIif", 0)) | {10: "Q", 11: "q", 12: "d"}
"""Types of numbers in metadata, by GGUF's numbers, as codes of struct."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
MOST_COPIED = 2**24
"""Most bytes of a header that is copied."""
_MOST_DIMS = 4
_MOST_ENTRIES = 2**16  # metadata keys, and tensors of a file
_MOST_TEXT = 2**24  # bytes of a text outside of arrays, such as a chat template
_MOST_ITEMS = 2**22  # texts of all arrays, and numbers of one array


@dataclass(frozen=True)
class GGUFTensor:
    """Tensor of a file."""

    file: Path
    name: str
    type: str
    """Type of floats, or of blocks: a key of `STORED_BLOCKS`."""
    shape: tuple[int, ...]
    """Shape in numbers, rows first."""
    begin: int
    """Position of its first byte in the file."""
    nbytes: int


class Texts(Sequence[str]):
    """Array of texts, which are decoded when they are read."""

    def __init__(self, data: memoryview, ends: array[int]) -> None:
        self._data, self._ends = data, ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Return a text; bytes that are not UTF-8 are replaced."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        end = self._ends[index]
        index %= len(self._ends)
        begin = self._ends[index - 1] + 8 if index else 8
        return bytes(self._data[begin:end]).decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def tolist(self) -> list[str]:
        """Return all texts: they are decoded together, with zero bytes between them."""
        if not self._ends:
            return []
        data = np.frombuffer(self._data, np.uint8)
        begins = np.zeros(len(self._ends), np.int64)
        begins[1:] = self._ends[:-1]
        lengths = begins[:, None] + np.arange(8)
        kept = np.ones(len(data), bool)
        kept[lengths[:, 1:]] = False
        joined = data.copy()
        joined[lengths[:, 0]] = 0
        texts = joined[kept].tobytes().decode("utf-8", "replace").split("\0")[1:]
        if len(texts) == len(self._ends):
            return texts
        return [self[i] for i in range(len(self))]  # some contain zero bytes


class MissingBytesError(ModelError):
    """The header is longer than the part of the file that is there."""


class GGUFHeader:
    """Header of one file.

    Args:
        file: the file.
        nbytes: bytes of the file that are there, from its beginning; None: all.
        is_mapped: False to copy the header, of at most `MOST_COPIED`: the file may be cut off.

    Raises:
        ModelError: the file is not GGUF, is damaged, or has a tensor of a type that is not
            supported.
        MissingBytesError: the header is longer than `nbytes`.
    """

    def __init__(self, file: Path, nbytes: int | None = None, *, is_mapped: bool = True) -> None:
        self.file = file
        try:
            refuse_lfs_pointer(file)
            with open_file(file) as stream:
                self._file_nbytes = os.fstat(stream.fileno()).st_size
                if is_mapped:
                    mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
                    self.data = memoryview(mapped)
                else:
                    self.data = memoryview(stream.read(MOST_COPIED))
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read: {reason_of(error)}.") from error
        self._size = len(self.data) if nbytes is None else nbytes
        self._at = self._num_texts = 0
        self.metadata: Mapping[str, Any]
        """Numbers, texts, booleans, and arrays of these (numpy arrays, or `Texts`)."""
        self.tensors: dict[str, GGUFTensor]
        """Tensors by name."""
        self._read()
        self.bytes = self.data[: self._at]
        """Bytes of the header, without the tensors' data."""

    def _read(self) -> None:
        if bytes(self.data[:4]) != b"GGUF":
            raise ModelError(f"{self.file} is not a GGUF file; download it again.")
        self._at = 4
        version = self._number("I", "the version")
        if version >> 16:
            raise self._error("is big-endian; convert it to little-endian (gguf-convert-endian)")
        if version not in (2, 3):
            raise self._error(f"has version {version}; supported: 2 and 3. Convert the model again")
        num_tensors = self._count("Q", "the number of tensors", _MOST_ENTRIES)
        num_entries = self._count("Q", "the number of metadata entries", _MOST_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._text("a metadata key", 2**16)
            if key in metadata:
                raise self._error(f"has the metadata key {key!r} twice")
            metadata[key] = self._value(self._number("I", key), key)
        self.metadata = metadata
        tensors = [self._tensor() for _ in range(num_tensors)]
        self.tensors = self._place(tensors)

    def _error(self, problem: str) -> ModelError:
        return ModelError(f"{self.file} {problem}.")

    def _end(self, problem: str) -> ModelError:
        """Return the error of a file that ends too early."""
        kind = MissingBytesError if self._size < self._file_nbytes else ModelError
        return kind(f"{self.file} {problem}.")

    def _need(self, nbytes: int, what: str) -> int:
        """Return the current position and move on.

        Raises:
            ModelError: the file ends before.
        """
        begin = self._at
        if nbytes > self._size - begin:
            raise self._end(
                f"is damaged at {what}: it needs {nbytes} bytes from byte {begin} on, and the file "
                f"has {self._size}; download it again"
            )
        self._at = begin + nbytes
        return begin

    def _number(self, code: str, what: str) -> Any:
        (number,) = struct.unpack_from(
            f"<{code}", self.data, self._need(struct.calcsize(f"<{code}"), what)
        )
        return number

    def _count(self, code: str, what: str, most: int) -> int:
        count: int = self._number(code, what)
        if count > most:
            raise self._error(f"is damaged: {what} is {count}, more than {most}; download it again")
        return count

    def _text(self, what: str, most: int = _MOST_TEXT) -> str:
        nbytes = self._count("Q", f"the length of {what}", most)
        begin = self._need(nbytes, what)
        return bytes(self.data[begin : begin + nbytes]).decode("utf-8", "replace")

    def _value(self, kind: int, key: str) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind], key)
        if kind == _BOOL:
            return bool(self._number("B", key))
        if kind == _STRING:
            return self._text(key)
        if kind == _ARRAY:
            item = self._number("I", key)
            count = self._count("Q", f"the length of {key}", _MOST_ITEMS)
            if item == _STRING:
                return self._texts(count, key)
            if item in _NUMBERS or item == _BOOL:
                dtype = np.dtype(f"<{_NUMBERS.get(item, '?')}")
                begin = self._need(count * dtype.itemsize, key)
                return np.frombuffer(self.data, dtype, count, begin)
            kind = item
        raise self._error(f"is damaged: {key} has a value of type {kind}; download it again")

    def _texts(self, count: int, key: str) -> Texts:
        self._num_texts += count
        if self._num_texts > _MOST_ITEMS:
            raise self._error(f"is damaged: {key} is one text of more than {_MOST_ITEMS}")
        self._need(8 * count, key)  # at least
        self._at -= 8 * count
        start = at = self._at
        size, unpack, ends = self._size, struct.Struct("<Q").unpack_from, array("Q")
        for _ in range(count):
            if at + 8 > size:
                break
            at += 8 + unpack(self.data, at)[0]
            if at > size:
                break
            ends.append(at - start)
        else:
            self._at = at
            return Texts(self.data[start:at], ends)
        raise self._end(f"is damaged: text {len(ends)} of {key} ends after the file")

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text("the name of a tensor", 2**10)
        dims = self._count("I", f"the number of dimensions of {name}", _MOST_DIMS)
        shape = tuple(self._number("Q", name) for _ in range(dims))
        return name, shape[::-1], self._number("I", name), self._number("Q", name)

    def _place(self, found: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, GGUFTensor]:
        """Return the tensors, after a check of types, sizes and places."""
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 2**20 or alignment % 8:
            raise self._error(f"has general.alignment={alignment!r}; it must be a multiple of 8")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, number, offset in found:
            if name in tensors:
                raise self._error(f"has the tensor {name} twice")
            kind = _TENSOR_TYPES.get(number)
            if kind is None:
                known = ", ".join(kind.upper() for kind in _TENSOR_TYPES.values())
                unknown = _OTHER_TYPES.get(number, f"number {number}")
                raise self._error(
                    f"has the tensor {name} of type {unknown}, which is not supported; supported: "
                    f"{known}. Choose another quantization of the model"
                )
            size = STORED_BLOCKS.get(kind)
            columns = shape[-1] if shape else 1
            if size is not None and columns % size.numbers:
                raise self._error(
                    f"has the tensor {name} with {columns} columns, which blocks of {size.numbers} "
                    f"numbers ({kind.upper()}) do not divide"
                )
            numbers = 1
            for dim in shape:
                numbers *= dim
            if size is None:
                nbytes = numbers * _FLOAT_NBYTES[kind]
            else:
                nbytes = numbers // size.numbers * size.nbytes
            if numbers == 0 or offset % alignment or start + offset + nbytes > self._file_nbytes:
                raise self._error(
                    f"is damaged: the tensor {name} {list(shape)} has {nbytes} bytes from byte "
                    f"{start + offset} on, and the file has {self._file_nbytes} bytes; download it "
                    "again"
                )
            tensors[name] = GGUFTensor(self.file, name, kind, shape, start + offset, nbytes)
        before = None
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.begin):
            if before is not None and before.begin + before.nbytes > tensor.begin:
                raise self._error(f"is damaged: {before.name} and {tensor.name} overlap")
            before = tensor
        return tensors
