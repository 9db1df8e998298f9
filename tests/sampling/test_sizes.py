"""Memory of sampling, compared with its own figures."""

import subprocess
import sys

from octavo.sampling import sizes


def test_imports_no_torch():
    code = "import sys, octavo.sampling.sizes; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_workspace_does_not_grow_with_the_batch():
    assert sizes.workspace_nbytes(10**6, 1000) == sizes.workspace_nbytes(10**5, 1000)
    assert sizes.workspace_nbytes(1, 1000) == sizes.workspace_nbytes(3, 1000) // 3
    assert sizes.rows_per_chunk(10**9) == 1
