"""Tensors from clients: read as torch reads them, or rejected, with any content."""

import base64
import io
import pickle
import random
import struct
import warnings
import zipfile

import pytest
import torch

from octavo.errors import RequestError
from octavo.frontend.prompt_embeds import read_tensor
from octavo.server.tensor_file import decode_embeds, read_tensor_file


def saved(value, **options):
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def changed(data, change):
    """Return the archive with `change` applied to each (name, bytes); None omits it."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            if (content := change(name, old.read(name))) is not None:
                new.writestr(name, content)
    return file.getvalue()


def with_program(program):
    return changed(FILE, lambda name, old: program if name.endswith("data.pkl") else old)


TENSOR = torch.arange(12, dtype=torch.float32).view(3, 4)
FILE = saved(TENSOR)
PROGRAM = next(
    zipfile.ZipFile(io.BytesIO(FILE)).read(n)
    for n in zipfile.ZipFile(io.BytesIO(FILE)).namelist()
    if n.endswith("data.pkl")
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x[1:3],
        lambda x: x[:, ::2],
        lambda x: x.T,
        lambda x: x[None],
        lambda x: x[:0],
        torch.nn.Parameter,
    ],
    ids=["whole", "rows", "strides", "transposed", "batch of one", "nothing", "parameter"],
)
def test_as_torch_reads_it(dtype, make):
    tensor = make(torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(dtype))
    found = read_tensor_file(saved(tensor))
    assert found == read_tensor(tensor)
    assert found.dtype == str(dtype).removeprefix("torch.")
    if found.data:
        flat = torch.frombuffer(bytearray(found.data), dtype=dtype)
        assert torch.equal(
            flat.view(found.num_tokens, found.size),
            tensor.view(-1, found.size).detach() if tensor.is_contiguous() else tensor.detach(),
        )


def test_in_base64():
    big = torch.randn(200, 1024)  # more than is decoded in one call
    text = base64.b64encode(saved(big)).decode()
    assert decode_embeds(text) == read_tensor(big)
    for wrong in ("", "é", "AAA", text[:-1] + "!", "AA==" + text, text + "\n", " " + text):
        with pytest.raises(RequestError) as error:
            decode_embeds(wrong)
        assert error.value.param == "prompt_embeds"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.zeros(2, 4, dtype=torch.int64), "of type int64"),
        (torch.zeros(2, 4, dtype=torch.bool), "of type bool"),
        (torch.zeros(2, 4, dtype=torch.float8_e4m3fn), "prompt_embeds"),
        (torch.zeros(4), r"shape \[4\]"),
        (torch.zeros(2, 3, 4), r"shape \[2, 3, 4\]"),
        (torch.zeros(2, 0), "without numbers"),
        (torch.zeros(1, 4).expand(10**9, 4), "share memory"),
        (torch.zeros(2, 4).to_sparse(), "something else"),
        ({"a": torch.zeros(2, 4)}, "holds a dictionary"),
        ([torch.zeros(2, 4)], "something else"),
        ("text", "something else"),
        (torch.nn.Linear(2, 2), "something else|too large"),
    ],
    ids=str,
)
def test_what_is_no_embeddings_is_refused(value, says):
    with pytest.raises(RequestError, match=says) as error:
        read_tensor_file(saved(value))
    assert error.value.param == "prompt_embeds"
    assert len(str(error.value)) < 300


def compressed():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", PROGRAM)
        archive.writestr("archive/data/0", bytes(2**26))
    return file.getvalue()


def program(storage=12, offset=0, shape=(3, 4), strides=(4, 1), kind="FloatStorage"):
    """Return the program that `torch.save` would write for such a tensor."""

    def number(n):
        return (
            b"\x8a" + bytes([k := (n.bit_length() // 8 + 1)]) + n.to_bytes(k, "little", signed=True)
        )

    def numbers(values):
        return b"(" + b"".join(map(number, values)) + b"t"

    persistent = b"(X\x07\0\0\0storagectorch\n" + kind.encode() + b"\nX\x01\0\0\x000X\x03\0\0\0cpu"
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
        + persistent
        + number(storage)
        + b"tQ"
        + number(offset)
        + numbers(shape)
        + numbers(strides)
        + b"\x89ccollections\nOrderedDict\n)Rt R.".replace(b" ", b"")
    )


def test_such_programs_are_read():
    assert read_tensor_file(with_program(program())) == read_tensor(TENSOR)


@pytest.mark.parametrize(
    "sizes",
    [
        {"offset": 1},
        {"offset": 12},
        {"offset": -1},
        {"offset": 2**64},
        {"shape": (4, 4)},
        {"shape": (-3, -4)},
        {"shape": (3, 4, 1)},
        {"shape": (2**40, 2**40)},
        {"shape": (2**60, 0), "strides": (1, 1)},
        {"strides": (5, 1)},
        {"strides": (-4, 1)},
        {"strides": (0, 1), "shape": (4, 4)},
        {"strides": (2**62, 1)},
        {"strides": (1,)},
        {"shape": (), "strides": ()},
        {"shape": (1,) * 100, "strides": (1,) * 100},
        {"storage": 11},
        {"storage": 13},
        {"storage": 2**70},
        {"storage": -1},
        {"kind": "DoubleStorage"},
        {"kind": "HalfStorage"},
        {"kind": "X" * 3000},
    ],
    ids=str,
)
def test_sizes_that_lie_are_refused(sizes):
    with pytest.raises(RequestError) as error:
        read_tensor_file(with_program(program(**sizes)))
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04",
        saved(TENSOR, _use_new_zipfile_serialization=False),
        compressed(),
        FILE[:-30],
        changed(FILE, lambda name, old: None if name.endswith("data.pkl") else old),
        changed(FILE, lambda name, old: None if name.endswith("data/0") else old),
        changed(FILE, lambda name, old: b"big" if name.endswith("byteorder") else old),
        changed(FILE, lambda name, old: old[:-4] if name.endswith("data/0") else old),
        with_program(PROGRAM * 100),
        with_program(b"\x80\x02cos\nsystem\n(X\x02\0\0\0ls\x85R."),
        with_program(pickle.dumps(print)),
        with_program(b"\x80\x02]q\xff."),
        with_program(b"\x80\x02K\x01r\xff\xff\xff\x7f."),  # memory for 2**31 things
        with_program(b"\x80\x02\x8e\xff\xff\xff\xff\xff\xff\xff\x7f."),
        with_program(b"\x80\x02)" + b"\x85" * 4000 + b"."),
        with_program(b"\x80\x02)" + b"q\x00h\x00\x86" * 800 + b"."),
        with_program(b"\x80\x02ctorch._utils\n_rebuild_parameter\n)R."),
        with_program(b"t."),
        with_program(b"("),
        with_program(b"."),
    ],
    ids=range(21),
)
def test_broken_and_hostile_files_are_refused(data):
    with pytest.raises(RequestError, match="prompt_embeds is not a tensor"):
        read_tensor_file(data)


def test_nothing_in_a_file_is_ever_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "made"), "w")

    with pytest.raises(RequestError):
        read_tensor_file(saved(Evil()))
    assert not (tmp_path / "made").exists()


def test_any_bytes_are_read_or_refused():
    """The result is within the file's bytes, and equals torch's, if torch reads the file."""
    rng = random.Random(0)
    files = [FILE, saved(torch.randn(4, 6)[:, ::2]), saved(TENSOR.bfloat16())]
    num_read = 0
    for _ in range(3000):
        data = bytearray(rng.choice(files))
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at : at + 4] = struct.pack("<i", rng.choice((-1, 0, 1, 2**31 - 1, 255)))
            elif kind == 2:
                del data[at : at + rng.randrange(1, 40)]
            else:
                data[at:at] = data[at : at + rng.randrange(1, 40)]
        try:
            found = read_tensor_file(bytes(data))
        except RequestError:
            continue
        num_read += 1
        assert len(found.data) <= len(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                known = torch.load(io.BytesIO(bytes(data)), weights_only=True)
            except Exception:
                continue
        assert found == read_tensor(known)
    assert 100 < num_read < 2900


def test_programs_of_any_bytes_are_refused_or_read():
    rng = random.Random(1)
    for _ in range(2000):
        data = bytearray(PROGRAM)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
        try:
            found = read_tensor_file(with_program(bytes(data)))
        except RequestError:
            continue
        assert len(found.data) <= TENSOR.nbytes
