"""Reader of a tensor of embeddings in a file of `torch.save`, without torch and without pickle.

Such a file is a zip archive, with a pickle program in `data.pkl` that describes the tensor. Here
the program is only interpreted as words: nothing is looked up, made or called, and everything
beyond a plain tensor is rejected. Sizes are those of the file: nothing in it may be compressed, and
a tensor may not have more numbers than its storage.
"""

from __future__ import annotations

import binascii
import io
import math
import pickletools
import zipfile
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from octavo.errors import RequestError
from octavo.frontend.prompt_embeds import NAME, check_form
from octavo.messages import EMBEDS_DTYPES, PromptEmbeds

# The file of a tensor has seven.
_MAX_ENTRIES = 64
_MAX_PROGRAM_NBYTES = 4096
_ENTRY = b"PK\x01\x02"
# Characters of base64 that are decoded in one call, which keeps the interpreter's lock.
_PIECE = 2**20

_DTYPES = {
    "torch DoubleStorage": "float64",
    "torch FloatStorage": "float32",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
}
_PUSHES = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "NEWTRUE", "NEWFALSE"}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_LOADS = "torch persistent_load"


class _Name(NamedTuple):
    """Name in a module, which is not looked up."""

    name: str


class _Call(NamedTuple):
    """Call that pickle would make, with its arguments."""

    function: object
    args: object


class _Mark:
    """Beginning of a tuple."""


class _NotATensorError(Exception):
    """Error that describes why a file is no tensor."""


def decode_embeds(text: str) -> PromptEmbeds:
    """Return the embeddings of a tensor from a client: `torch.save`d, in base64.

    Raises:
        RequestError: the text is something else.
    """
    return read_tensor_file(b"".join(_decode(text)))


def read_tensor_file(data: bytes) -> PromptEmbeds:
    """Return the embeddings in the bytes of a file of `torch.save`.

    Raises:
        RequestError: the file is something else.
    """
    try:
        return _read_archive(data)
    except RequestError:
        raise
    except _NotATensorError as error:
        reason = str(error)
    except Exception:  # a broken archive or program raises arbitrary errors
        reason = "it is broken"
    raise RequestError(f"{NAME} is not a tensor saved with torch.save: {reason}.", NAME) from None


def _decode(text: str) -> Iterator[bytes]:
    padding = text.find("=")
    if padding < 0 or padding >= len(text) - 2:
        try:
            for begin in range(0, len(text), _PIECE):
                yield binascii.a2b_base64(text[begin : begin + _PIECE], strict_mode=True)
            return
        except ValueError:
            pass
    raise RequestError(f"{NAME} is not valid base64.", NAME)


def _read_archive(data: bytes) -> PromptEmbeds:
    if not data.startswith(b"PK\x03\x04"):
        raise _NotATensorError("it is not a zip archive")
    if data.count(_ENTRY) > _MAX_ENTRIES:
        raise _NotATensorError("it holds more than a tensor")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        programs = [name for name in entries if name.endswith("/data.pkl")]
        if len(programs) != 1:
            raise _NotATensorError("it has no data.pkl")
        folder = programs[0].removesuffix("data.pkl")

        def read(name: str, most: int) -> bytes:
            entry = entries.get(folder + name)
            if entry is None or entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                raise _NotATensorError(f"{name} is missing, compressed or encrypted")
            if entry.file_size > most:
                raise _NotATensorError(f"{name} is too large")
            return archive.read(entry)

        if folder + "byteorder" in entries and read("byteorder", 16) != b"little":
            raise _NotATensorError("its byte order is not little-endian")
        tensor = _read_tensor(_run(read("data.pkl", _MAX_PROGRAM_NBYTES)))
        # Check before its numbers are read.
        dtype, size = check_form(tensor.shape, tensor.dtype)
        itemsize = EMBEDS_DTYPES[dtype]
        storage = read(f"data/{tensor.key}", tensor.storage_numel * itemsize)
        if len(storage) != tensor.storage_numel * itemsize:
            raise _NotATensorError("its storage does not have the stated length")
    if not math.prod(tensor.shape):
        return PromptEmbeds(b"", dtype, size)
    numbers = np.frombuffer(storage, f"u{itemsize}", offset=tensor.offset * itemsize)
    strides = [stride * itemsize for stride in tensor.strides]
    strided = np.lib.stride_tricks.as_strided(numbers, tensor.shape, strides, writeable=False)
    return PromptEmbeds(strided.tobytes(), dtype, size)


class _Tensor(NamedTuple):
    """Tensor in a file: its numbers are inside of its storage."""

    key: str
    storage_numel: int
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _read_tensor(made: object) -> _Tensor:
    """Return the tensor that a program makes, or raise an error."""
    if isinstance(made, _Call) and made.function == _Name("torch._utils _rebuild_parameter"):
        made = made.args[0] if isinstance(made.args, tuple) else None
    match made:
        case _Call(
            _Name("torch._utils _rebuild_tensor_v2"),
            (
                _Call(_Name(name), ("storage", _Name(kind), str(key), str(), int(numel))),
                int(offset),
                tuple(shape),
                tuple(strides),
                bool(),
                _Call(_Name("collections OrderedDict"), ()),
            ),
        ) if name == _LOADS:
            pass
        case _:
            raise _NotATensorError("it holds something else than one plain tensor")
    sizes = (numel, offset, *shape, *strides)
    if not all(type(size) is int and 0 <= size < 2**48 for size in sizes):
        raise _NotATensorError("its sizes are not allowed")
    if not 1 <= len(shape) == len(strides) <= 8:
        raise _NotATensorError("its shape and strides are not allowed")
    if math.prod(shape) > numel:
        raise _NotATensorError("some of its numbers share memory; call contiguous() before")
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if (last if math.prod(shape) else offset - 1) >= numel:
        raise _NotATensorError("it reaches beyond its storage")
    dtype = _DTYPES.get(kind, kind[:40].removeprefix("torch ").removesuffix("Storage"))
    return _Tensor(key, numel, dtype, offset, tuple(shape), tuple(strides))


def _run(program: bytes) -> object:
    """Return the result of a pickle program in words; only a tensor's opcodes are allowed."""
    stack: list[object] = []
    memo: dict[object, object] = {}
    for opcode, argument, _ in pickletools.genops(program):
        name = opcode.name
        if name in _PUSHES:
            stack.append({"NEWTRUE": True, "NEWFALSE": False}.get(name, argument))
        elif name == "GLOBAL":
            stack.append(_Name(str(argument)))
        elif name == "MARK":
            stack.append(_Mark)
        elif name == "TUPLE":
            begin = len(stack) - stack[::-1].index(_Mark)
            stack[begin - 1 :] = [tuple(stack[begin:])]
        elif name in _TUPLES:
            begin = len(stack) - _TUPLES[name]
            stack[begin:] = [tuple(stack[begin:])]
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "BINPERSID":
            stack.append(_Call(_Name(_LOADS), stack.pop()))
        elif name == "REDUCE":
            args = stack.pop()
            stack.append(_Call(stack.pop(), args))
        elif name == "STOP":
            (made,) = stack
            return made
        elif name != "PROTO":
            raise _NotATensorError("it holds something else than one plain tensor")
    raise _NotATensorError("it is broken")
