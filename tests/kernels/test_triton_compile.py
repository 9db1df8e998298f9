"""Compilation of every Triton kernel for its GPUs; no GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

CAPABILITIES = ("80", "90")
MAX_SHARED = 99 * 1024  # bytes for a program on the smallest cards, of capability 8.6 and 8.9
KERNELS = {
    "_rms_norm",
    "_act",
    "_linear",
    "_add_splits",
    "_linear_codes",
    "_linear_int8",
    "_to_int8",
    "_experts",
    "_experts_codes",
    "_experts_int8",
    "_gather",
    "_sum_experts",
    "_route",
    "_rotate_and_write",
    "_write_latents",
    "_head_linear",
    "_attention",
    "_prefill",
    "_merge_splits",
    "_causal_conv",
    "_token_shift",
    "_gated_delta_rule",
    "_ssd",
    "_selective_scan",
    "_wkv7",
    "_sample",
    "_apply_bitmask",
    "_take",
    "_shrink",
    "_expand",
    "_columns",
    "_replace",
    "_copy_rows",
}


def test_every_kernel_compiles(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    compiler = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_triton", *CAPABILITIES],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert compiler.returncode == 0, compiler.stderr[-4000:]
    lines = [line.split(maxsplit=3) for line in compiler.stdout.splitlines()]
    found = {(capability, name) for capability, _, name, _ in lines}
    assert found == set(product(CAPABILITIES, KERNELS))
    for capability, shared, name, constants in lines:
        assert int(shared) <= MAX_SHARED, (capability, name, constants)
