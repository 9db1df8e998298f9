"""Every Triton kernel compiles for the GPUs it is meant for; none is needed for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

MAX_SHARED = 99 * 1024  # bytes for a program on the smallest cards, of capability 8.6 and 8.9
KERNELS = {
    "_rms_norm",
    "_act",
    "_linear",
    "_rotate_and_write",
    "_attention",
    "_merge_splits",
    "_sample",
    "_apply_bitmask",
    "_take",
}


def test_every_kernel_compiles(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    compilers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.compile_triton", capability],
            cwd=Path(__file__).parents[2],
            env=environment | {"TRITON_CACHE_DIR": str(tmp_path / capability)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for capability in ("80", "90")
    ]
    for compiler in compilers:
        out, error = compiler.communicate(timeout=280)
        assert compiler.returncode == 0, error[-4000:]
        lines = [line.split(maxsplit=2) for line in out.splitlines()]
        assert {name for _, name, _ in lines} == KERNELS
        for shared, name, constants in lines:
            assert int(shared) <= MAX_SHARED, (name, constants)
