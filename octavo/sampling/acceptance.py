"""Which drafts are kept, where that is not to be decided by what would have been sampled anyway.

Both ways say for a position either the draft or another token; a draft is kept, as everywhere, as
long as it is what was said. With temperature 0 both keep what the plain answer has.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.kernels.base import Ops
from octavo.kernels.memory import to_device
from octavo.kernels.reference import sampling_weights
from octavo.sampling.sizes import rows_per_chunk

# Of typical acceptance: a draft is kept if its probability is more than the lower of these, the
# second one times exp(-entropy).
_EPSILON, _DELTA = 0.09, 0.3
# Streams of random numbers beside the one that tokens are sampled with.
ACCEPT, RECOVER, DRAFT = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafts of a step's rows of logits that have one."""

    typical: bool
    """Whether they are accepted as typical; else by rejection sampling."""
    at: NDArray[np.int64]
    """[A], which rows; none twice."""
    token_ids: NDArray[np.int64]
    """[A]"""
    probs: torch.Tensor | None
    """float32 [A, V], what each was drawn from; None: each was certain."""
    accept: NDArray[np.float64]
    """[A] random numbers in [0, 1), that say whether a draft is kept,"""
    recover: NDArray[np.float64]
    """and which token takes its place."""


def accept_drafts(
    ops: Ops,
    logits: torch.Tensor,
    params: NDArray[np.void],
    drafted: Drafted,
    token_ids: torch.Tensor,
) -> None:
    """Puts drafts that are accepted, and tokens that recover from others, in place of tokens.

    rejection: Leviathan et al., "Fast inference from transformers via speculative decoding", 2023,
    section 2.3: a draft is kept with the probability min(1, p / q), else a token is drawn from
    what p has more than q; the tokens that come out are distributed as without drafts.
    typical: Cai et al., "Medusa", 2024, section 3.3.1: what is likely enough is kept, else the
    token stays that was sampled; that changes the distribution.

    Args:
        ops: the operations of the logits' device.
        logits: float32 [R, V], as they are sampled from.
        params: `SAMPLING_ROW` [R].
        drafted: of A of these rows.
        token_ids: int64 [R], the tokens sampled; changed in place. -1, of a row that failed, stays.
    """
    step = rows_per_chunk(logits.shape[1])
    for begin in range(0, len(drafted.at), step):
        some = slice(begin, begin + step)
        at = to_device(drafted.at[some], logits.device)
        weights = sampling_weights(ops, logits[at], params[drafted.at[some]])
        chosen = _choose(weights, drafted, some, token_ids[at])
        token_ids[at] = torch.where(token_ids[at] < 0, token_ids[at], chosen)


def _choose(
    weights: torch.Tensor, drafted: Drafted, some: slice, sampled: torch.Tensor
) -> torch.Tensor:
    """Some drafts, or the tokens in their places; see `accept_drafts`.

    Args:
        weights: int64 [A, V], of the tokens that are sampled from.
        drafted: the drafts.
        some: which of them.
        sampled: int64 [A], what was sampled there.

    Returns:
        int64 [A].
    """
    drafts, accept, recover = (
        to_device(array[some], weights.device)[:, None]
        for array in (drafted.token_ids, drafted.accept, drafted.recover)
    )
    p = weights.to(torch.float64) / weights.sum(-1, keepdim=True)
    likely = p.gather(1, drafts)
    if drafted.typical:
        entropy = torch.special.entr(p).sum(-1, keepdim=True)
        keep = likely > (_DELTA * torch.exp(-entropy)).clamp_max(_EPSILON)
        return torch.where(keep, drafts, sampled[:, None])[:, 0]
    if drafted.probs is None:
        q = torch.zeros_like(p).scatter_(1, drafts, 1.0)
    else:
        q = drafted.probs[some].to(torch.float64)
    cumulative = (p - q).clamp_min(0.0).cumsum(-1)
    total = cumulative[:, -1:]
    # Where rounding leaves nothing that p has more than q, the two are equal.
    keep = (accept * q.gather(1, drafts) < likely) | (total == 0)
    recovered = torch.searchsorted(cumulative, recover * total, right=True)
    return torch.where(keep, drafts, recovered)[:, 0]
