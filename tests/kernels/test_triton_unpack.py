"""PTX of the conversion of codes, executed here: no GPU, and not Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")

from octavo.kernels.triton import unpack

Register = NDArray[np.uint32]
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def wide(bits: Register, dtype: torch.dtype) -> NDArray[np.float64]:
    """Return the numbers in 16 bits."""
    return torch.from_numpy(bits.astype(np.uint16)).view(dtype).double().numpy()


def narrow(numbers: NDArray[np.float64], dtype: torch.dtype) -> Register:
    """Return the bits of numbers that 16 bits hold exactly."""
    exact = torch.from_numpy(numbers).to(dtype)
    assert torch.equal(exact.double(), torch.from_numpy(numbers))
    return exact.view(torch.uint16).numpy().astype(np.uint32)


def select(a: Register, b: Register, selector: Register) -> Register:
    """Do `prmt`: each nibble of the selector names a byte of a and b."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << 32
    result = np.zeros_like(both)
    for i in range(4):
        byte = (selector >> (4 * i)) & 15
        assert (byte < 8).all(), "this nibble copies a sign"
        result |= ((both >> (8 * byte).astype(np.uint64)) & 255) << np.uint64(8 * i)
    return result.astype(np.uint32)


def execute(code: str, inputs: list[Register], outputs: int) -> list[Register]:
    """Execute the instructions that `assembly` uses."""
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}

    def read(name: str) -> Register:
        if name[0].isdigit():
            return np.full_like(inputs[0], int(name, 16) if "x" in name else int(name))
        return registers[name]

    for line in code.strip("{}\n").split(";"):
        if not line.strip() or ".reg" in line:
            continue
        operation, names = line.split(maxsplit=1)
        to, *arguments = (name.strip() for name in names.split(","))
        x = [read(name) for name in arguments]
        name, *_ = operation.split(".")
        dtype = torch.bfloat16 if ".bf16x2" in operation else torch.float16
        match name:
            case "mov":
                value = x[0]
            case "shr":
                value = x[0] >> x[1]
            case "shl":
                value = x[0] << x[1]
            case "and":
                value = x[0] & x[1]
            case "lop3":
                assert arguments[3] == "0xEA"
                value = x[0] & x[1] | x[2]
            case "prmt":
                value = select(*x)
            case "sub":
                value = (x[0].view(np.float32) - x[1].view(np.float32)).view(np.uint32)
            case "fma":
                a, b, c = ([wide(part >> s & 0xFFFF, dtype) for s in (0, 16)] for part in x)
                low, high = (narrow(a[i] * b[i] + c[i], dtype) for i in range(2))
                value = low | high << 16
            case "cvt":
                high, low = (narrow(part.view(np.float32).astype(float), dtype) for part in x)
                value = low | high << 16
            case _:
                raise AssertionError(operation)
        registers[to] = value.astype(np.uint32)
    return [registers[f"${i}"] for i in range(outputs)]


def check(format: str, kind: str, dtype: torch.dtype, numbers: Tensor, zeros: int | None) -> None:
    """Check each code in each place of two words; `numbers` are those of all codes."""
    planes = 4 if len(numbers) == 16 else 2
    rng = np.random.default_rng(0)
    codes = rng.integers(0, len(numbers), (4096, 2, planes)).astype(np.uint32)
    if format == "fp8":  # NaN is not converted
        codes[codes & 127 == 127] = 5
    words = sum(codes[:, :, plane] << (16 // planes * plane) for plane in range(planes))
    inputs = [words[:, 0] | words[:, 1] << 16]
    if zeros is not None and planes == 4:
        bits = 0x8000 | (0x4300 if dtype == torch.bfloat16 else 0x6400) | zeros
        inputs += [np.full_like(inputs[0], bits << 16 | bits)] * planes
    elif zeros is not None:
        shifted = np.full(4096, zeros + 2**23, np.float32).view(np.uint32)
        inputs += [shifted] * 2 * planes
    results = execute(unpack.assembly(format, kind, dtype), inputs, planes)
    table = numbers.to(dtype).double().numpy() - (zeros or 0)
    for plane, result in enumerate(results):
        for word in range(2):
            got = wide(result >> (16 * word) & 0xFFFF, dtype)
            assert np.array_equal(got, table[codes[:, word, plane]]), (plane, word)


@dtypes
@pytest.mark.parametrize("format", ["int4_levels", "nf4"])
def test_levels(format: str, dtype: torch.dtype) -> None:
    levels = unpack.level_table(format)
    assert levels is not None
    check(format, "levels", dtype, levels, None)


@dtypes
def test_four_bits(dtype: torch.dtype) -> None:
    check("int4", "middle", dtype, torch.arange(16) - 8, None)
    for zeros in (0, 7, 15):
        check("int4_zeros", "zeros", dtype, torch.arange(16), zeros)


@dtypes
def test_eight_bits(dtype: torch.dtype) -> None:
    for zeros in (0, 128, 255):
        check("int8_groups", "zeros", dtype, torch.arange(256), zeros)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    check("fp8", "fp8", dtype, numbers, None)
