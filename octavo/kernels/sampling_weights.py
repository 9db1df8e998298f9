"""Weights by which tokens are sampled, on the host. The kernels compute the same ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.base import Ops
from octavo.kernels.ops_logits import LongArray
from octavo.system.tensor import Tensor


def sampling_weights(ops: Ops, x: Tensor, params: NDArray[np.void]) -> LongArray:
    """Return the weight of each token for `Ops.sample`.

    Args:
        ops: operations on x's device.
        x: float32 [M, V]; a row without a finite maximum has undefined weights.
        params: `SAMPLING_ROW` [M]. A row with temperature 0 has one token.

    Returns:
        int64 [M, V], at most 2**40 each.
    """
    temperature, min_p, top_p, top_k = (
        params[name][:, None] for name in ("temperature", "min_p", "top_p", "top_k")
    )
    logits: NDArray[np.float32] = ops.to_host(x)
    with np.errstate(all="ignore"):  # undefined rows, and those with temperature 0
        scaled = (logits - logits.max(-1, keepdims=True)) / temperature
        probs: NDArray[np.float32] = ops.to_host(ops.exp(ops.to_device(scaled)))
        weights = (probs * np.float32(2**40)).astype(np.int64)
    weights[probs < min_p] = 0
    ids = np.argsort(-logits, axis=-1, kind="stable")
    ranked = np.take_along_axis(weights, ids, 1)
    rank = np.arange(logits.shape[1])
    ranked[(top_k > 0) & (rank >= top_k)] = 0
    before = ranked.cumsum(-1) - ranked
    ranked[(top_p < 1.0) & (before >= top_p * ranked.sum(-1, keepdims=True))] = 0
    ranked = np.where(temperature == 0.0, np.where(rank == 0, 2**40, 0), ranked)
    np.put_along_axis(weights, ids, ranked, 1)
    return weights


def sampling_probs(ops: Ops, x: Tensor, params: NDArray[np.void]) -> NDArray[np.float64]:
    """Return the probability of each token, float64 [M, V], from `sampling_weights`."""
    weights = sampling_weights(ops, x, params)
    with np.errstate(all="ignore"):  # undefined rows
        probs: NDArray[np.float64] = weights / weights.sum(-1, keepdims=True)
    return probs
