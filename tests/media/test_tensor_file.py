"""Files of `numpy.save` from clients; those of torch: tests/server/test_tensor_file.py."""

import base64
import io
import random
import warnings

import numpy as np
import pytest

from octavo.errors import RequestError
from octavo.media.tensor_file import decode_tensor, read_tensor
from octavo.messages import TensorData


def saved(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


ARRAY = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize("kind", ["<f2", ">f4", "<f8", "<i8", ">i2", "u1"])
@pytest.mark.parametrize(
    "make", [np.asarray, np.asfortranarray, lambda x: x[:, ::2], lambda x: x[:0], np.ravel]
)
def test_as_numpy_reads_it(kind, make):
    array = make(ARRAY.astype(kind))
    found = read_tensor(saved(array), "field")
    plain = array.astype(array.dtype.newbyteorder("<"))
    assert found == TensorData(plain.dtype.name, array.shape, plain.tobytes())
    text = base64.b64encode(saved(array)).decode()
    assert decode_tensor(text, "field") == found


def with_header(text, data=b"\0" * 16):
    header = text.encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (saved(np.array([{}, 1], object)), "holds no array of numbers"),
        (saved(np.array(["a"])), "holds no array of numbers"),
        (saved(np.zeros(2, [("a", "f4")])), "holds no array of numbers"),
        (saved(ARRAY)[:-1], "has 95 bytes of numbers, and its shape is"),
        (saved(ARRAY) + b"\0", "97 bytes"),
        (b"\x93NUMPY\x07\x00" + saved(ARRAY)[8:], "is damaged"),
        (b"\x93NUMPY", "is damaged"),
        (with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -2)}"), "damaged"),
        (with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (10**9, 4)}"), "damaged"),
        (
            with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (4000000000, 4)}"),
            "has 16 bytes",
        ),
        (
            with_header(
                "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 999999999999, 99999999999)}",
                b"",
            ),
            "has 0 bytes",
        ),
        (
            with_header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'1, ' * 9}4)}}"),
            "damaged",
        ),
        (with_header("print(1)"), "damaged"),
        (with_header("(" * 9000), "damaged"),
        (b"PK\x03\x04", "not a tensor saved with torch.save or numpy.save"),
    ],
)
def test_others_are_refused(data, says):
    with pytest.raises(RequestError, match=says) as error:
        read_tensor(data, "field")
    assert error.value.param == "field"
    assert len(str(error.value)) < 300


def test_damaged_files_are_read_or_refused():
    source = random.Random(0)
    data = saved(ARRAY)
    for _ in range(2000):
        damaged = bytearray(data)
        for _ in range(source.randrange(1, 4)):
            damaged[source.randrange(100)] = source.randrange(256)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                found = read_tensor(bytes(damaged), "field")
            except RequestError:
                continue
        assert len(found.data) == 96
