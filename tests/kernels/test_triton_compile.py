"""Every Triton kernel compiles for the GPUs it is meant for; none is needed for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

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


@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability: int, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_triton", str(capability)],
        cwd=Path(__file__).parents[2],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert {line.split()[0] for line in result.stdout.splitlines()} == KERNELS
