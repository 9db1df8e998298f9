"""Files of `torch.save` with weights: read as torch reads them, or refused, with any content."""

import io
import pickletools
import random
import struct
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.checkpoints.base import Expected, Source
from octavo.checkpoints.mapped_file import MappedFile
from octavo.checkpoints.registry import open_checkpoint, open_mapped_folder
from octavo.checkpoints.torch_file import TorchFileError, read_torch_file
from octavo.checkpoints.torch_folder import TorchFolder
from octavo.errors import ModelError

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
INTS = ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"]
DTYPES = FLOATS + INTS
STATE = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(7, dtype=torch.float16)}


def read(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Return the tensors of the file in a folder, as torch's."""
    sources = [Source(name, shape, dtypes=tuple(DTYPES)) for name, shape in shapes.items()]
    tensors = open_checkpoint(folder).open(Expected("Any", sources, ""))
    found = {source.name: tensors.read(source) for source in sources}
    return {
        name: torch.frombuffer(
            bytearray(np.ascontiguousarray(tensor.numpy()).tobytes()) or bytearray(8),
            dtype=getattr(torch, tensor.dtype),
        )[: tensor.numel()].view(tensor.shape)
        for name, tensor in found.items()
    }


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def require_equal(folder: Path, state: dict[str, torch.Tensor], **options: int) -> None:
    """Save a state, and compare what is read with torch's tensors."""
    file = folder / "pytorch_model.bin"
    torch.save(state, file, **options)
    known = torch.load(file, weights_only=True)
    assert known.keys() == state.keys()
    found = read(folder, {name: tuple(tensor.shape) for name, tensor in known.items()})
    for name, tensor in known.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert as_bytes(found[name]) == as_bytes(tensor), name


@pytest.mark.parametrize("name", DTYPES)
def test_types_and_views(name, tmp_path):
    numbers = torch.randint(0, 2, (6, 8, 2)).to(getattr(torch, name))
    views = {"whole": numbers, "rows": numbers[1:3], "steps": numbers[::2, 1::3]}
    views |= {
        "transposed": numbers.transpose(0, 2),
        "scalar": numbers[1, 2, 1],
        "none": numbers[:0],
    }
    views["own"] = numbers[5].clone()
    require_equal(tmp_path, views)


def test_states_of_modules(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    module[1].register_buffer("tied", module[0].weight.detach())
    require_equal(tmp_path, module.state_dict())
    require_equal(tmp_path, dict(module.named_parameters()))
    require_equal(tmp_path, OrderedDict(module.named_parameters()))


def test_nothing_is_copied(tmp_path):
    torch.save(STATE, tmp_path / "pytorch_model.bin")
    source = Source("a", (3, 4))
    expected = Expected("Any", [source, Source("b", (7,))], "")
    tensors = open_checkpoint(tmp_path, "pt").open(expected)
    tensor = tensors.read(source)
    assert not tensor.numpy().flags.writeable
    assert tensor.data_ptr() == tensors.read(source).data_ptr()
    tensors.done(tensor)
    assert np.array_equal(tensor.numpy(), STATE["a"].numpy())


def test_safetensors_come_first(tmp_path):
    torch.save(STATE, tmp_path / "pytorch_model.bin")
    assert [file.name for file in open_checkpoint(tmp_path).weight_files] == ["pytorch_model.bin"]
    with pytest.raises(ModelError, match=r"\.bin files and no \*\.safetensors; set load_format=pt"):
        open_checkpoint(tmp_path, "safetensors").open(Expected("Any", [], ""))
    assert open_mapped_folder(tmp_path).read_tensor("b").shape == (7,)
    with pytest.raises(ModelError, match="lacks the tensor d2t"):
        open_mapped_folder(tmp_path).read_tensor("d2t")
    (tmp_path / "model.safetensors").touch()
    assert [file.name for file in open_checkpoint(tmp_path).weight_files] == ["model.safetensors"]


def saved(value: object, **options: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


FILE = saved(STATE)
with zipfile.ZipFile(io.BytesIO(FILE)) as archive:
    PROGRAM = archive.read("archive/data.pkl")


def with_program(program: bytes) -> bytes:
    """Return `FILE` with another program."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(FILE)) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            new.writestr(name, program if name.endswith("data.pkl") else old.read(name))
    return file.getvalue()


def zipped(*entries: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as new:
        for name, content in entries:
            new.writestr(name, content)
    return file.getvalue()


def script() -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), file)
    return file.getvalue()


def edited(old: bytes, new: bytes, count: int = 1) -> bytes:
    """Return `FILE` with other bytes of the same length."""
    assert len(old) == len(new)
    assert old in FILE
    return FILE.replace(old, new, count)


class Code:
    def __init__(self, *call: object) -> None:
        self.call = call

    def __reduce__(self) -> tuple[object, ...]:
        return self.call[0], self.call[1:]


SYSTEM = b"\x80\x02cos\nsystem\nX\x04\0\0\0true\x85R."
HOSTILE = {
    "nothing": (b"", "damaged or cut off"),
    "text": (b"hello", "not a zip archive"),
    "old form": (saved(STATE, _use_new_zipfile_serialization=False), "before version 1.6; load it"),
    "another protocol": (saved(STATE, pickle_protocol=4), "opcode"),
    "half": (FILE[: len(FILE) // 2], "zip archive is damaged or cut off"),
    "no end": (FILE[:-30], "zip archive is damaged or cut off"),
    "no program": (zipped(("archive/x", b"")), "no data.pkl"),
    "compressed": (
        zipped(("archive/data.pkl", PROGRAM * 9), method=zipfile.ZIP_DEFLATED),
        "archive/data.pkl is compressed",
    ),
    "numbers missing": (zipped(("archive/data.pkl", PROGRAM)), "numbers of a are missing"),
    "another local name": (
        edited(b"archive/data/0FB", b"archive/data/9FB"),
        "headers of .* differ",
    ),
    "big-endian": (edited(b"littlePK", b"bigbigPK"), "byte order"),
    "other length": (edited(b"K\x0c", b"K\x0b"), "storage of a does not have the stated length"),
    "beyond the storage": (edited(b"QK\x00K\x03K\x04", b"QK\x01K\x03K\x04"), "a reaches beyond"),
    "too many numbers": (edited(b"K\x03K\x04\x86", b"K\xffK\xff\x86"), "numbers of a share memory"),
    "two programs": (zipped(("a/data.pkl", b""), ("b/data.pkl", b"")), "no data.pkl"),
    "TorchScript": (script(), "TorchScript.*; save a state_dict"),
    "one tensor": (saved(STATE["a"]), "not a dictionary"),
    "a list": (saved([STATE["a"]]), "something else than tensors"),
    "a nested state": (saved({"state_dict": STATE}), "state_dict is not a tensor"),
    "a number": (saved({"epoch": 3}), "epoch is not a tensor"),
    "names that are numbers": (saved({3: STATE["a"]}), "names that are not texts"),
    "sparse": (saved({"a": STATE["a"].to_sparse()}), "something else"),
    "complex": (saved({"a": torch.zeros(2, dtype=torch.complex64)}), "unsupported type .*Complex"),
    "a name twice": (
        with_program(b"\x80\x02}X\x01\0\0\0aNsX\x01\0\0\0aNs."),
        "a twice",
    ),
    "code of a path": (saved({"a": Path("x")}), r"something else than tensors \(pathlib"),
    "a command": (with_program(SYSTEM), r"something else than tensors \(os system\)"),
    "a command in the state": (
        saved({**STATE, "c": Code(eval, "1/0")}),
        r"something else than tensors \(__builtin__ eval\)",
    ),
    "attributes of a tensor": (with_program(PROGRAM[:-2] + b"Nb."), "opcode|damaged"),
    "a memo never set": (with_program(b"\x80\x02h\x07."), "data.pkl is damaged"),
    "an empty stack": (with_program(b"\x80\x02R."), "data.pkl is damaged"),
    "no stop": (with_program(PROGRAM[:-1]), "data.pkl is damaged"),
    "a text of all the memory": (with_program(b"\x80\x02X\xff\xff\xff\xffx."), "damaged"),
    "a long program": (with_program(b"}" * (2**22 + 1)), "data.pkl has more than 4194304 bytes"),
    "marks": (with_program(b"(" * 2**20), "data.pkl is damaged"),
    "deep": (with_program(b")" + b"\x85" * 2**20 + b"."), "something else than tensors"),
    "doubled": (with_program(b")" + b"q\0h\0\x86" * 2**17 + b"."), "something else than tensors"),
    "many tuples": (with_program(b")" * 2**19 + b"(t" * 2**19 + b"."), "data.pkl is damaged"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name, tmp_path):
    data, message = HOSTILE[name]
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(data)
    with pytest.raises(ModelError, match=message) as error:
        read(tmp_path, {"a": (3, 4), "b": (7,)})
    assert str(file) in str(error.value)
    assert len(str(error.value)) < 400


def test_every_other_opcode_is_refused(tmp_path):
    known = b"KMJ\x8aXN\x88\x89cqrhj(t)\x85\x86\x87QR}sub.\x80"
    for code in sorted({ord(op.code) for op in pickletools.opcodes} - set(known)):
        program = PROGRAM[:2] + bytes([code]) + PROGRAM[2:]
        (tmp_path / "pytorch_model.bin").write_bytes(with_program(program))
        with pytest.raises(ModelError, match=r"something else than tensors \(opcode"):
            read(tmp_path, {"a": (3, 4), "b": (7,)})


def test_two_entries_of_one_name(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        data = zipped(("archive/data.pkl", PROGRAM), ("archive/data.pkl", PROGRAM))
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(ModelError, match=r"zip archive has archive/data\.pkl twice"):
        read(tmp_path, {"a": (3, 4), "b": (7,)})


def test_sizes_in_zip64_fields(monkeypatch):
    """Entries of 4 GiB have such fields."""
    entries = [("a/data/0", STATE["a"].numpy().tobytes()), ("a/data/1", bytes(14))]
    limits = {"max_entries": 9, "max_program_nbytes": 999}
    plain = zipped(*entries, ("a/data.pkl", PROGRAM))
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    wide = zipped(*entries, ("a/data.pkl", PROGRAM))
    assert len(wide) > len(plain)
    for data in (plain, wide):
        tensor = read_torch_file(memoryview(data), **limits)["a"]
        assert data[tensor.begin : tensor.begin + 48] == entries[0][1]
    field = struct.pack("<HHQQ", 1, 16, 48, 48)
    assert field in wide
    cut = wide.replace(field, struct.pack("<HHQQ", 1, 16, 2**63, 2**63))
    with pytest.raises(TorchFileError, match="its entry a/data/0 is cut off"):
        read_torch_file(memoryview(cut), **limits)


def test_numbers_that_are_not_aligned(tmp_path):
    data = zipped(
        ("archive/data.pkl", PROGRAM), ("archive/data/0", bytes(48)), ("archive/data/1", bytes(14))
    )
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(ModelError, match="is not aligned; save the file again"):
        read(tmp_path, {"a": (3, 4), "b": (7,)})


def test_changed_files(tmp_path):
    """Files with random changes are read as torch reads them, or are refused."""
    rng, file = random.Random(0), tmp_path / "pytorch_model.bin"
    folder = TorchFolder(tmp_path, "pt")
    module = torch.nn.Linear(3, 5, dtype=torch.bfloat16)
    files = [FILE, saved(module.state_dict()), saved({"a": STATE["a"][:, ::2], "b": STATE["b"]})]
    num_read = 0
    for _ in range(1500):
        data = bytearray(rng.choice(files))
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(min(len(data), rng.choice((400, 10**6))))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at : at + 4] = struct.pack("<i", rng.choice((-1, 0, 1, 2**31 - 1, 255)))
            elif kind == 2:
                del data[at : at + rng.randrange(1, 40)]
            else:
                data[at:at] = data[at : at + rng.randrange(1, 40)]
        file.write_bytes(data)
        try:
            tensors = folder.read_header(file)
        except ModelError:
            continue
        num_read += 1
        for stored in tensors.values():
            assert MappedFile(file).tensor(stored).nbytes <= len(data)
    assert 100 < num_read < 1400
