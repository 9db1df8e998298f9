import subprocess
import sys

import pytest
import torch

from octavo.kernels.sizes import packed_nbytes
from tests.torch_ops import native_ops


def test_imports_no_torch() -> None:
    code = "import sys, octavo.kernels.sizes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (64, 64), (65, 63), (1000, 576)])
def test_is_what_packing_takes(n: int, k: int, dtype: str) -> None:
    ops = native_ops()
    weight = torch.zeros(n, k, dtype=getattr(torch, dtype))
    assert ops.pack_weight(weight).nbytes == packed_nbytes(n, k, dtype)


def test_wastes_little() -> None:
    assert packed_nbytes(5632, 2048, "bfloat16") == 5632 * 2048 * 2
    assert packed_nbytes(1, 1, "float32") == 64 * 2 * 4
