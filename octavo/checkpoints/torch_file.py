"""Reader of files of `torch.save`, without torch and without pickle.

Such a file is a zip archive: `data.pkl` is a pickle program that describes tensors, and `data/N`
are their numbers. Here the program only makes dictionaries, tuples and descriptions of tensors:
nothing is looked up or called, and all other opcodes and names are refused. Numbers are not read:
the positions of the tensors in the file are returned. Memory and time depend on limits of the
caller, not on the sizes that a file states.
"""

from __future__ import annotations

import io
import math
import struct
from dataclasses import dataclass
from typing import Any

from octavo.checkpoints.model_files import FileBytes
from octavo.system.tensor import itemsize

_MAX_DIMS = 8
_MAX_SIZE = 2**48
_DTYPES = {
    "torch DoubleStorage": "float64",
    "torch FloatStorage": "float32",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
    "torch LongStorage": "int64",
    "torch IntStorage": "int32",
    "torch ShortStorage": "int16",
    "torch CharStorage": "int8",
    "torch ByteStorage": "uint8",
    "torch BoolStorage": "bool",
}
_DTYPES |= {f"torch uint{bits}": f"uint{bits}" for bits in (16, 32, 64)}
_DTYPES |= {f"torch {name}": name for name in ("float8_e4m3fn", "float8_e5m2")}
_UNTYPED = "torch.storage UntypedStorage"
# The structures of zip archives: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
_END = struct.Struct("<4s4HIIH")
_END_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_MAX_COMMENT_NBYTES = 2**16 - 1
_MAX_ENTRY_NBYTES = 512  # of the description of an entry, with its name
_STORED = 0  # the method of an entry that is not compressed
_ENCRYPTED = 1  # a flag
_ALL_ONES = 2**32 - 1  # a size that the zip64 field holds instead
# Opcodes of pickle: https://docs.python.org/3/library/pickletools.html
_BYTE, _LENGTH = struct.Struct("<B"), struct.Struct("<I")
_INTS = {b"K": _BYTE, b"M": struct.Struct("<H"), b"J": struct.Struct("<i")}
_PUTS = {b"q": _BYTE, b"r": _LENGTH}
_GETS = {b"h": _BYTE, b"j": _LENGTH}
_CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False}
_TUPLES = {b")": 0, b"\x85": 1, b"\x86": 2, b"\x87": 3}


class TorchFileError(Exception):
    """File that cannot be read; the message is the reason, as a clause."""


@dataclass(frozen=True)
class FileTensor:
    """Tensor in a file. All of its numbers are inside of the file."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Distances of successive numbers of each dimension, in bytes."""
    begin: int
    """Position of its first number in the file."""


@dataclass(frozen=True)
class _Name:
    """Name in a module, which is not looked up."""

    name: str


@dataclass(frozen=True)
class _Storage:
    """Numbers of an entry of the archive."""

    kind: str
    key: str
    size: int


@dataclass(frozen=True)
class _Tensor:
    """Tensor as a program describes it, which is not checked yet."""

    storage: _Storage
    kind: str
    """Name of its type in a module."""
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch_file(
    data: FileBytes | memoryview, *, max_entries: int, max_program_nbytes: int
) -> FileTensor | dict[str, FileTensor]:
    """Return the tensor of a file, or the dictionary of its tensors.

    Args:
        data: the bytes of the file.
        max_entries: greatest number of entries of the archive.
        max_program_nbytes: greatest size of the pickle program.

    Raises:
        TorchFileError: the file holds something else, or is damaged.
    """
    entries = _read_entries(data, max_entries)
    programs = [name for name in entries if name.endswith("/data.pkl")]
    if len(programs) != 1:
        raise TorchFileError("it has no data.pkl")
    folder = programs[0].removesuffix("data.pkl")
    if folder + "byteorder" in entries:
        begin, end = entries[folder + "byteorder"]
        if bytes(data[begin:end][:8]) != b"little":
            raise TorchFileError("its byte order is not little-endian")
    begin, end = entries[programs[0]]
    if end - begin > max_program_nbytes:
        raise TorchFileError(f"its data.pkl has more than {max_program_nbytes} bytes")
    try:
        made = _run(bytes(data[begin:end]))
    except (struct.error, ValueError, LookupError):
        raise TorchFileError("its data.pkl is damaged") from None
    storages = {
        name.removeprefix(folder + "data/"): place
        for name, place in entries.items()
        if name.startswith(folder + "data/")
    }
    if isinstance(made, _Tensor):
        return _locate("its tensor", made, storages)
    if not isinstance(made, dict):
        raise TorchFileError("it holds something else than tensors")
    return {name: _locate(_quote(name), tensor, storages) for name, tensor in made.items()}


def _quote(text: str) -> str:
    """Return a text of a file for a message."""
    return text if text.isprintable() and len(text) <= 100 else ascii(text[:100])


def _locate(name: str, tensor: object, storages: dict[str, tuple[int, int]]) -> FileTensor:
    """Return the place of a tensor in the file.

    Args:
        name: its name for error messages.
        tensor: the description of the tensor.
        storages: begin and end of each storage in the file.

    Raises:
        TorchFileError: it is no tensor, or is not inside of its storage.
    """
    if not isinstance(tensor, _Tensor):
        raise TorchFileError(f"{name} is not a tensor")
    storage, offset, shape, strides = tensor.storage, tensor.offset, tensor.shape, tensor.strides
    dtype = _DTYPES.get(tensor.kind)
    if dtype is None:
        raise TorchFileError(f"{name} has the unsupported type {_quote(tensor.kind[:40])}")
    if len(shape) != len(strides) or len(shape) > _MAX_DIMS:
        raise TorchFileError(f"{name} has {len(shape)} dimensions and {len(strides)} strides")
    sizes = (storage.size, offset, *shape, *strides)
    if not all(type(size) is int and 0 <= size < _MAX_SIZE for size in sizes):
        raise TorchFileError(f"the sizes of {name} are impossible")
    if math.prod(max(size, 1) for size in shape) >= _MAX_SIZE:
        raise TorchFileError(f"the shape of {name} is too large")
    if storage.key not in storages:
        raise TorchFileError(f"the numbers of {name} are missing")
    begin, end = storages[storage.key]
    size = itemsize(dtype)
    if storage.size * (1 if storage.kind == _UNTYPED else size) != end - begin:
        raise TorchFileError(f"the storage of {name} does not have the stated length")
    numel, count = math.prod(shape), (end - begin) // size
    if numel > count:
        raise TorchFileError(
            f"some numbers of {name} share memory; call contiguous() before saving"
        )
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if (last >= count) if numel else (offset > count):
        raise TorchFileError(f"{name} reaches beyond its storage")
    return FileTensor(
        dtype, shape, tuple(stride * size for stride in strides), begin + offset * size
    )


def _run(program: bytes) -> object:
    """Return what a pickle program describes.

    Raises:
        TorchFileError: it describes something else than tensors.
        struct.error, ValueError, LookupError: it is damaged.
    """
    stack: list[object] = []
    outer: list[list[object]] = []
    memo: dict[int, object] = {}
    stream = io.BytesIO(program)

    def read_int(form: struct.Struct) -> int:
        number: int = form.unpack(stream.read(form.size))[0]
        return number

    while True:
        code = stream.read(1)
        if code in _INTS:
            stack.append(read_int(_INTS[code]))
        elif code == b"\x8a":  # LONG1
            stack.append(int.from_bytes(stream.read(read_int(_BYTE)), "little", signed=True))
        elif code == b"X":  # BINUNICODE
            stack.append(stream.read(read_int(_LENGTH)).decode())
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code == b"c":  # GLOBAL
            module, name = stream.readline(), stream.readline()
            stack.append(_Name(f"{module.decode().strip()} {name.decode().strip()}"))
        elif code in _PUTS:
            memo[read_int(_PUTS[code])] = stack[-1]
        elif code in _GETS:
            stack.append(memo[read_int(_GETS[code])])
        elif code == b"(":  # MARK
            outer.append(stack)
            stack = []
        elif code == b"t":  # TUPLE
            items, stack = stack, outer.pop()
            stack.append(tuple(items))
        elif code in _TUPLES:
            begin = len(stack) - _TUPLES[code]
            if begin < 0:
                raise IndexError
            stack[begin:] = [tuple(stack[begin:])]
        elif code == b"Q":  # BINPERSID
            stack.append(_make_storage(stack.pop()))
        elif code == b"R":  # REDUCE
            args = stack.pop()
            stack.append(_make(stack.pop(), args))
        elif code == b"}":  # EMPTY_DICT
            stack.append({})
        elif code == b"s":  # SETITEM
            value, key = stack.pop(), stack.pop()
            _set_items(stack[-1], [key, value])
        elif code == b"u":  # SETITEMS
            items, stack = stack, outer.pop()
            _set_items(stack[-1], items)
        elif code == b"b" and isinstance(stack[-2], dict):  # BUILD
            stack.pop()  # attributes of a dictionary, such as the versions of its modules
        elif code == b".":  # STOP
            (made,) = stack
            return made
        elif code == b"\x80":  # PROTO
            stream.read(1)
        elif not code:
            raise ValueError
        else:
            raise TorchFileError(f"it holds something else than tensors (opcode {code!r})")


def _set_items(made: object, items: list[object]) -> None:
    """Add keys and values, in turn, to a dictionary that a program makes."""
    if not isinstance(made, dict) or len(items) % 2:
        raise ValueError
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str):
            raise TorchFileError("it has a dictionary with names that are not texts")
        if key in made:
            raise TorchFileError(f"it has {_quote(key)} twice")
        made[key] = value


def _make_storage(described: object) -> _Storage:
    """Return the storage that a persistent id describes."""
    match described:
        case ("storage", _Name(kind), str(key), str(), int(size)):
            return _Storage(kind, key, size)
    raise TorchFileError("it holds something else than tensors")


def _make(function: object, args: object) -> object:
    """Return the result of a function that makes tensors or dictionaries."""
    match function, args:
        case _Name("collections OrderedDict"), ():
            return {}
        case (
            _Name("torch._utils _rebuild_tensor_v2"),
            (_Storage() as storage, int(offset), tuple(shape), tuple(strides), bool(), dict()),
        ):
            return _Tensor(storage, storage.kind, offset, shape, strides)
        case (
            _Name("torch._utils _rebuild_tensor_v3"),
            (
                _Storage() as storage,
                int(offset),
                tuple(shape),
                tuple(strides),
                bool(),
                dict(),
                _Name(kind),
            ),
        ) if storage.kind == _UNTYPED:
            return _Tensor(storage, kind, offset, shape, strides)
        case _Name("torch._utils _rebuild_parameter"), (_Tensor() as tensor, bool(), dict()):
            return tensor
    name = f" ({_quote(function.name[:60])})" if isinstance(function, _Name) else ""
    raise TorchFileError(f"it holds something else than tensors{name}")


def _read_entries(data: FileBytes | memoryview, most: int) -> dict[str, tuple[int, int]]:
    """Return begin and end of the bytes of each entry of a zip archive.

    Raises:
        TorchFileError: an entry is compressed or encrypted, or the archive is damaged.
    """
    if bytes(data[:4]) != b"PK\x03\x04":
        if bytes(data[:1]) == b"\x80":
            raise TorchFileError(
                "it has the form of torch before version 1.6; load it with torch.load("
                "weights_only=True), and save it again, weights of models with safetensors"
            )
        raise TorchFileError("it is not a zip archive")
    found: dict[str, tuple[int, int]] = {}
    try:
        count, at, end = _find_directory(data)
        if count > most or end - at > most * _MAX_ENTRY_NBYTES:
            raise TorchFileError(f"its zip archive has more than {most} entries")
        for _ in range(count):
            name, place, at = _read_entry(data, at)
            if at > end:
                raise ValueError
            if name in found:
                raise TorchFileError(f"its zip archive has {_quote(name)} twice")
            found[name] = place
    except (struct.error, ValueError, LookupError):
        raise TorchFileError("its zip archive is damaged or cut off") from None
    return found


def _find_directory(data: FileBytes | memoryview) -> tuple[int, int, int]:
    """Return the number of entries of a zip archive, and begin and end of their directory."""
    tail = bytes(data[-_END.size - _MAX_COMMENT_NBYTES :])
    at = len(data) - len(tail) + tail.rindex(b"PK\x05\x06")
    *_, count, nbytes, begin, _ = _unpack(_END, data, at, b"PK\x05\x06")
    at -= _END_LOCATOR.size
    if at >= 0 and bytes(data[at : at + 4]) == b"PK\x06\x07":
        _, _, at, _ = _unpack(_END_LOCATOR, data, at, b"PK\x06\x07")
        *_, count, nbytes, begin = _unpack(_END64, data, at, b"PK\x06\x06")
    return count, begin, begin + nbytes


def _read_entry(data: FileBytes | memoryview, at: int) -> tuple[str, tuple[int, int], int]:
    """Return the name of an entry, begin and end of its bytes, and the next entry's position."""
    fields = _unpack(_ENTRY, data, at, b"PK\x01\x02")
    flags, method, packed, size = fields[3], fields[4], fields[8], fields[9]
    name_end = at + _ENTRY.size + fields[10]
    extra_end = name_end + fields[11]
    name = bytes(data[at + _ENTRY.size : name_end])
    size, packed, offset = _widen(data[name_end:extra_end], [size, packed, fields[16]])
    text = _quote(name.decode())
    if method != _STORED or flags & _ENCRYPTED or packed != size:
        raise TorchFileError(
            f"its entry {text} is compressed or encrypted (as in TorchScript); save a state_dict "
            "with torch.save"
        )
    local = _unpack(_LOCAL, data, offset, b"PK\x03\x04")
    begin = offset + _LOCAL.size + local[9]
    sizes = (0, _ALL_ONES, size)  # the size may follow the bytes, or be in another field
    if local[2:4] != (flags, method) or data[begin - local[9] : begin] != name:
        raise TorchFileError(f"the two headers of its entry {text} differ")
    if local[7] not in sizes or local[8] not in sizes:
        raise TorchFileError(f"the two headers of its entry {text} differ")
    begin += local[10]
    if begin + size > len(data):
        raise TorchFileError(f"its entry {text} is cut off")
    return name.decode(), (begin, begin + size), extra_end + fields[12]


def _widen(extra: bytes | memoryview, sizes: list[int]) -> list[int]:
    """Return the sizes of an entry: those that are too large are in its zip64 field."""
    while _ALL_ONES in sizes:
        kind, length = struct.unpack("<HH", extra[:4])
        if kind == 1:
            wide = [n for (n,) in struct.iter_unpack("<Q", extra[4 : 4 + length // 8 * 8])]
            return [wide.pop(0) if size == _ALL_ONES else size for size in sizes]
        extra = extra[4 + length :]
    return sizes


def _unpack(
    form: struct.Struct, data: FileBytes | memoryview, at: int, signature: bytes
) -> tuple[Any, ...]:
    """Return the fields of a structure with a signature."""
    fields = form.unpack(data[at : at + form.size])
    if fields[0] != signature:
        raise ValueError
    return fields
