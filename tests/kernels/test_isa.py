"""Instruction set of the kernels: that of OCTAVO_ISA, or the best available."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch

from octavo.kernels import native
from tests.torch_ops import native_ops

BASES = {
    "amx": "avx512_bf16",
    "avx512_bf16": "avx512_vnni",
    "avx512_vnni": "avx512",
    "avx2_vnni": "avx2",
}
"""Instruction sets, and further flags of a processor that has them."""


def is_intel() -> bool:
    cpus = Path("/proc/cpuinfo")
    return cpus.exists() and "GenuineIntel" in cpus.read_text()


def run(code: str, isa: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    env = os.environ | {"OCTAVO_ISA": isa}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)


def test_the_best_is_first() -> None:
    names = [name for name in native.available_isas() if name != "amx_emulated"]
    assert names[-1] in ("portable", "neon")
    for isa, base in BASES.items():
        if isa in names and not (isa == "avx512_bf16" and is_intel()):
            assert base in names[names.index(isa) :]


@pytest.mark.skipif(not is_intel(), reason="bfloat16 products are slow on Intel's processors only")
def test_slow_products_of_bfloat16_are_not_the_choice() -> None:
    names = native.available_isas()
    if "avx512_bf16" in names and "avx512_vnni" in names:
        assert names.index("avx512_vnni") < names.index("avx512_bf16")


@pytest.mark.parametrize("isa", ["", *native.available_isas()])
def test_forced(isa: str) -> None:
    done = run("from octavo import _native; print(_native.isa())", isa)
    assert done.stdout.split() == [isa or native.available_isas()[0]], done.stderr


def test_an_unknown_one_is_refused_before_anything_is_loaded() -> None:
    done = run("from octavo import LLM; LLM(max_model_len=64)", "vliw")
    assert done.returncode == 1
    assert "Exception in thread" not in done.stderr
    *_, line = done.stderr.splitlines()
    known = " ".join(native.available_isas())
    assert line == (
        f"octavo.errors.ConfigError: OCTAVO_ISA=vliw: this processor has kernels for {known}; "
        "set it to one of these, or unset it."
    )


@pytest.mark.parametrize(("format", "group"), [("int8", 0), ("int4_levels", 32)])
def test_products_of_bytes_are_the_same_bits(
    format: Literal["int8", "int4_levels"], group: int
) -> None:
    """With instructions for them and without, in vectors of one width."""
    ops = native_ops()
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(130, 257, generator=generator)
    x = torch.randn(9, 257, generator=generator)

    def product(isa: str) -> torch.Tensor:
        native.set_isa(isa)
        return ops.linear(x, ops.quantize_weight([weight], format, group))

    before = native.isa()
    try:
        for isa in {*BASES} & {*native.available_isas()}:
            assert torch.equal(product(isa), product(BASES[isa])), isa
    finally:
        native.set_isa(before)
