"""Counter-based random numbers: Philox4x32-10.

J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC'11, section 3.3. A number is a pure function of (seed, position, stream): no state to carry, so
a request draws the same numbers wherever and in whatever company it runs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)  # the paper's multipliers for 4x32
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # Weyl constants: golden ratio, sqrt(3) - 1
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_ROUNDS = 10


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Philox4x32-10, row by row.

    Args:
        counter: uint32 [R, 4].
        key: uint32 [R, 2].

    Returns:
        uint32 [R, 4], the random words.
    """
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[:, i].astype(np.uint64) for i in range(2))
    for step in range(_ROUNDS):
        round_k0 = (k0 + np.uint64(step * _W0)) & _LOW
        round_k1 = (k1 + np.uint64(step * _W1)) & _LOW
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (
            (p1 >> _32) ^ c1 ^ round_k0,
            p1 & _LOW,
            (p0 >> _32) ^ c3 ^ round_k1,
            p0 & _LOW,
        )
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniform(
    seeds: NDArray[np.uint64], positions: NDArray[np.int64], stream: int = 0
) -> NDArray[np.float64]:
    """One number in [0, 1) for each row, with all 53 bits of a double.

    Args:
        seeds: uint64 [R], the key.
        positions: int64 [R], not negative: the low half of the counter.
        stream: which of several independent numbers for one position; in [0, 2**32).

    Returns:
        float64 [R].
    """
    counter = np.zeros((len(seeds), 4), np.uint32)
    position = positions.astype(np.uint64)
    counter[:, 0] = position & _LOW
    counter[:, 1] = position >> _32
    counter[:, 2] = stream
    key = np.empty((len(seeds), 2), np.uint32)
    key[:, 0] = seeds & _LOW
    key[:, 1] = seeds >> _32
    words = philox4x32(counter, key).astype(np.uint64)
    bits = (words[:, 1] << _32 | words[:, 0]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
