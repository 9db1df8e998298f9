"""Counter-based random numbers: Philox4x32-10.

J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC'11, section 3.3. A number is a pure function of (seed, position, stream). So no state is needed,
and a request draws the same numbers on every engine and in every batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo import _native


def uniform(
    seeds: NDArray[np.uint64], positions: NDArray[np.uint32], stream: int
) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each row, with all 53 bits of a double.

    Args:
        seeds: uint64 [R], the key.
        positions: uint32 [R]; the counter is (position, stream, 0, 0).
        stream: index of one of several independent numbers for a position; in [0, 2**32).

    Returns:
        float64 [R].
    """
    assert seeds.shape == positions.shape
    assert seeds.dtype == np.uint64
    assert positions.dtype == np.uint32
    assert seeds.flags.c_contiguous
    assert positions.flags.c_contiguous
    out = np.empty(len(seeds))
    _native.philox_uniforms(
        seeds.ctypes.data, positions.ctypes.data, stream, len(seeds), out.ctypes.data
    )
    return out
