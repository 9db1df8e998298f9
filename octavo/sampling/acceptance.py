"""Acceptance of drafts by other rules than equality with the sampled token.

Both rules return for a position either the draft or another token. A draft is kept as long as it
equals the returned token. With temperature 0 both rules keep the tokens of plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.base import Ops
from octavo.kernels.sampling_weights import sampling_probs
from octavo.sampling.sizes import rows_per_chunk
from octavo.system.tensor import Tensor

# Thresholds of typical acceptance: a draft is kept if its probability is above the smaller of the
# first, and the second times exp(-entropy).
_EPSILON, _DELTA = 0.09, 0.3
# Streams of random numbers in addition to the one for sampling tokens.
ACCEPT, RECOVER, DRAFT = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts of the rows of a step's logits that have one."""

    typical: bool
    """True for typical acceptance, False for rejection sampling."""
    at: NDArray[np.int64]
    """[A], rows of the drafts, without duplicates."""
    token_ids: NDArray[np.int64]
    """[A]"""
    probs: NDArray[np.float32] | None
    """float32 [A, V], distribution that each draft was drawn from; None: each was certain."""
    accept: NDArray[np.float64]
    """[A] random numbers in [0, 1) that decide if a draft is kept."""
    recover: NDArray[np.float64]
    """[A] random numbers in [0, 1) that choose the replacement."""


def accept_drafts(
    ops: Ops,
    logits: Tensor,
    params: NDArray[np.void],
    drafted: Drafted,
    token_ids: Tensor,
) -> None:
    """Replace tokens by accepted drafts, and by recovered tokens where a draft is rejected.

    rejection: Leviathan et al., "Fast inference from transformers via speculative decoding", 2023,
    section 2.3. A draft is kept with probability min(1, p / q); else a token is drawn from the
    excess of p over q. The distribution of the tokens is the same as without drafts.
    typical: Cai et al., "Medusa", 2024, section 3.3.1. A draft that is likely enough is kept; else
    the sampled token stays. That changes the distribution.

    Args:
        ops: the operations of the logits' device.
        logits: float32 [R, V], as they are sampled from.
        params: `SAMPLING_ROW` [R].
        drafted: drafts of A of these rows.
        token_ids: int64 [R], the sampled tokens; changed in place. -1 in a failed row stays.
    """
    step = rows_per_chunk(logits.shape[1])
    tokens: NDArray[np.int64] = ops.to_host(token_ids)
    for begin in range(0, len(drafted.at), step):
        some = slice(begin, begin + step)
        at = drafted.at[some]
        probs = sampling_probs(ops, ops.embedding(logits, ops.to_device(at)), params[at])
        chosen = _choose(probs, drafted, some, tokens[at])
        tokens[at] = np.where(tokens[at] < 0, tokens[at], chosen)
    ops.copy_(token_ids, ops.to_device(tokens))


@np.errstate(all="ignore")  # for rows that failed
def _choose(
    p: NDArray[np.float64], drafted: Drafted, some: slice, sampled: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return accepted drafts, or the tokens in their places; see `accept_drafts`.

    Args:
        p: float64 [A, V], probabilities of the tokens.
        drafted: the drafts.
        some: slice of the drafts.
        sampled: int64 [A], the tokens sampled in the rows of the drafts.

    Returns:
        int64 [A].
    """
    drafts, accept, recover = drafted.token_ids[some], drafted.accept[some], drafted.recover[some]
    likely = np.take_along_axis(p, drafts[:, None], 1)[:, 0]
    if drafted.typical:
        logs = np.log(p, where=p > 0, out=np.zeros_like(p))
        entropy = -(p * logs).sum(-1)
        return np.where(likely > np.minimum(_DELTA * np.exp(-entropy), _EPSILON), drafts, sampled)
    if drafted.probs is None:
        q = np.zeros_like(p)
        np.put_along_axis(q, drafts[:, None], 1.0, 1)
    else:
        q = drafted.probs[some].astype(np.float64)
    cumulative = np.maximum(p - q, 0.0).cumsum(-1)
    total = cumulative[:, -1]
    # If rounding leaves no excess of p over q, the two are equal.
    keep = (accept * np.take_along_axis(q, drafts[:, None], 1)[:, 0] < likely) | (total == 0)
    recovered = [
        np.searchsorted(row, number, side="right")
        for row, number in zip(cumulative, recover * total, strict=True)
    ]
    return np.where(keep, drafts, np.asarray(recovered, np.int64))
