"""Conversion of the codes of quantized weights to numbers, in registers.

A word of 16 bits has the codes of 4 inputs of 4 bits each, or of 2 inputs of 8 bits each. These
inputs are some distance apart; see `quantized.CodesWeight`. Two words of neighbouring inputs share
a register. `assembly` converts this register to the pairs of neighbouring numbers that matrix
instructions read. There are three ways:

- The code becomes the low bits of the mantissa of a power of two, which is then subtracted (Kim et
  al., "Who Says Elephants Can't Run: Bringing Large Scale MoE Models into Cloud Scale Production",
  2022).
- The code selects the bytes of its number in a table.
- The code is shifted to the place of a number's bits.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from octavo.kernels.dequantize import NF4_LEVELS
from octavo.kernels.reference import LEVELS
from octavo.kernels.triton import fp8

# Bits of 1, and of the smallest power of two whose last bit of the mantissa is worth 1.
_ONE = {torch.bfloat16: 0x3F80, torch.float16: 0x3C00}
_MAGIC = {torch.bfloat16: 0x4300, torch.float16: 0x6400}
_FMA = {torch.bfloat16: "fma.rn.bf16x2", torch.float16: "fma.rn.f16x2"}


def level_table(format: str) -> torch.Tensor | None:
    """Return the numbers of the 16 codes of a format, float32, if they are in a table."""
    if format == "int4_levels":
        return LEVELS / 16
    return torch.from_numpy(NF4_LEVELS).float() if format == "nf4" else None


def _twice(bits: int) -> str:
    return f"0x{bits << 16 | bits:08X}"


@functools.cache
def assembly(format: str, kind: str, dtype: torch.dtype) -> str:
    """Return the PTX that `planes` runs for numbers of a 16-bit type.

    Operands: 4 results (2 for codes of 8 bits), then the register of two words. With zeros, the
    zeros of each plane follow: results of `_pair` for 4 bits, two float32 for 8 bits.
    """
    if kind == "levels":
        lines = _levels(format, dtype)
    elif kind == "fp8":
        lines = _fp8(dtype)
    elif format == "int8_groups":
        lines = _bytes(dtype)
    else:
        lines = _nibbles(kind == "zeros", dtype)
    return "{\n" + "\n".join(line + ";" for line in lines) + "\n}"


def assembly_of(x: torch.Tensor, format: str, kind: str) -> str | None:
    """Return the PTX for activations x; None if a kernel must do without: see `one`."""
    if x.element_size() != 2 or x.device.type == "cpu":  # Triton's interpreter runs no PTX
        return None
    return assembly(format, kind, x.dtype)


def _nibbles(zeros: bool, dtype: torch.dtype) -> list[str]:
    magic = _MAGIC[dtype]
    lines = [".reg .b32 t, one, zero", f"mov.b32 one, {_twice(_ONE[dtype])}"]
    if not zeros:
        lines.append(f"mov.b32 zero, {_twice(0x8000 | magic | 8)}")
    for plane in range(4):
        zero = f"${5 + plane}" if zeros else "zero"
        lines += [
            f"shr.u32 t, $4, {4 * plane}",
            f"lop3.b32 t, t, 0x000F000F, {_twice(magic)}, 0xEA",  # (t & mask) | magic
            f"{_FMA[dtype]} ${plane}, t, one, {zero}",
        ]
    return lines


def _bytes(dtype: torch.dtype) -> list[str]:
    # 2^23 + code, minus 2^23 + zero: exact in float32, and up to 255 in both types.
    lines = [".reg .b32 a, b, magic", ".reg .f32 x, y", "mov.b32 magic, 0x4B000000"]
    name = "bf16x2" if dtype == torch.bfloat16 else "f16x2"
    for plane in range(2):
        lines += [
            f"prmt.b32 a, $2, magic, 0x765{plane}",
            f"prmt.b32 b, $2, magic, 0x765{2 + plane}",
            "mov.b32 x, a",
            "mov.b32 y, b",
            f"sub.f32 x, x, ${3 + 2 * plane}",
            f"sub.f32 y, y, ${4 + 2 * plane}",
            f"cvt.rn.{name}.f32 ${plane}, y, x",
        ]
    return lines


def _fp8(dtype: torch.dtype) -> list[str]:
    # Move sign and magnitude into place, and multiply by a power of two: the difference of the
    # exponents' biases. NaN becomes 480: `quantized.pack` has made its scale NaN.
    right, mask, factor = (4, 0x07F0, 0x7B80) if dtype == torch.bfloat16 else (1, 0x3F80, 0x5C00)
    lines = [
        ".reg .b32 s, t, factor, zero",
        f"mov.b32 factor, {_twice(factor)}",
        "mov.b32 zero, 0x80008000",
    ]
    for plane, shift in enumerate((8 - right, -right)):
        move = f"shl.b32 t, $2, {shift}" if shift >= 0 else f"shr.u32 t, $2, {-shift}"
        lines += [
            move,
            f"and.b32 t, t, {_twice(mask)}",
            "shl.b32 s, $2, 8" if plane == 0 else "mov.b32 s, $2",
            "lop3.b32 t, s, 0x80008000, t, 0xEA",
            f"{_FMA[dtype]} ${plane}, t, factor, zero",
        ]
    return lines


def _levels(format: str, dtype: torch.dtype) -> list[str]:
    table = level_table(format)
    assert table is not None
    words = table.to(dtype).view(torch.uint8).view(16, 2).T.contiguous().view(torch.int32)
    lines = [
        ".reg .b32 seven, side, u, v, a, b, x0, y0, x1, y1, c, d, "
        + ", ".join(f"t{byte}{part}" for byte in range(2) for part in range(4))
    ]
    for byte in range(2):
        for part in range(4):
            lines.append(f"mov.b32 t{byte}{part}, {int(words[byte, part]) & 0xFFFFFFFF:#010x}")
    # Selectors of bytes: the low 3 bits of a code select in one half of the table, and bit 3
    # selects the half.
    lines += [
        "and.b32 seven, $4, 0x77777777",
        "shr.u32 side, $4, 1",
        "lop3.b32 side, side, 0x44444444, 0x32103210, 0xEA",
    ]
    for word in range(2):
        if word:
            lines += ["shr.u32 seven, seven, 16", "shr.u32 side, side, 16"]
        for byte, result in enumerate("cd"):
            lines += [
                f"prmt.b32 a, t{byte}0, t{byte}1, seven",
                f"prmt.b32 b, t{byte}2, t{byte}3, seven",
                f"prmt.b32 {result}, a, b, side",
            ]
        lines += [f"prmt.b32 x{word}, c, d, 0x5140", f"prmt.b32 y{word}, c, d, 0x7362"]
    return lines + [
        "prmt.b32 $0, x0, x1, 0x5410",
        "prmt.b32 $1, x0, x1, 0x7632",
        "prmt.b32 $2, y0, y1, 0x5410",
        "prmt.b32 $3, y0, y1, 0x7632",
    ]


@triton.jit
def _pair(zeros, MAGIC: tl.constexpr):
    """Return zeros of 4 bits as `assembly` reads them: the bits of -(magic + zero)."""
    return (zeros | (MAGIC - 32768)).to(tl.int16)[:, None]


@triton.jit
def _two(ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, operands, DTYPE: tl.constexpr):
    if DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, operands, (tl.bfloat16, tl.bfloat16), True, 2
        )
    else:
        return tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, operands, (tl.float16, tl.float16), True, 2
        )


@triton.jit
def _four(ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, operands, DTYPE: tl.constexpr):
    if DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            ASM,
            CONSTRAINTS,
            operands,
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            True,
            2,
        )
    else:
        return tl.inline_asm_elementwise(
            ASM,
            CONSTRAINTS,
            operands,
            (tl.float16, tl.float16, tl.float16, tl.float16),
            True,
            2,
        )


@triton.jit
def planes(
    words,
    zeros,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
    ASM: tl.constexpr,
    PLANES: tl.constexpr,
    SHARE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return the numbers in words [N, words], in units of their scales, plane by plane.

    Args:
        words: int16.
        zeros: a tuple of the zeros [N] of each group.
        FORMAT: see `octavo.kernels.base.QuantFormat`.
        KIND: see `octavo.kernels.triton.quantized`.
        ASM: result of `assembly`.
        PLANES: number of codes in a word.
        SHARE: number of planes of a group.
        DTYPE: bfloat16 or float16.
    """
    if KIND != "zeros":
        if PLANES == 4:
            return _four(ASM, "=r,=r,=r,=r,r", (words,), DTYPE)
        else:
            return _two(ASM, "=r,=r,r", (words,), DTYPE)
    elif FORMAT == "int8_groups":
        first = (zeros[0] + 8388608.0)[:, None]
        second = (zeros[1 // SHARE] + 8388608.0)[:, None]
        return _two(ASM, "=r,=r,r,f,f,f,f", (words, first, second), DTYPE)
    else:
        MAGIC: tl.constexpr = 0x4300 if DTYPE == tl.bfloat16 else 0x6400
        first = _pair(zeros[0], MAGIC)
        second = _pair(zeros[1 // SHARE], MAGIC)
        third = _pair(zeros[2 // SHARE], MAGIC)
        fourth = _pair(zeros[3 // SHARE], MAGIC)
        operands = (words, first, second, third, fourth)
        return _four(ASM, "=r,=r,=r,=r,r,r,r,r,r", operands, DTYPE)


@triton.jit
def one(codes, zeros, levels, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Return the numbers of int32 codes, in units of their scales: `planes` without PTX."""
    if KIND == "fp8":
        x = fp8.decode(codes.to(tl.uint8), 1)
    elif KIND == "levels":
        x = tl.load(levels + codes)
    else:
        x = codes - zeros
    return x.to(DTYPE)
