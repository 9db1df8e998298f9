"""Choice of a token's experts, one program for each token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.routing import Routing
from octavo.kernels.triton.activation import sigmoid, softplus


@triton.jit
def _first_largest(x, at, open):
    """Return the place of the first of the largest numbers that are `open`; none of x is NaN."""
    most = tl.max(tl.where(open, x, float("-inf")))
    return tl.min(tl.where(open & (x == most), at, 2147483647))


@triton.jit
def _softmax(x):
    e = tl.exp(x - tl.max(x))
    return e / tl.sum(e)


@triton.jit
def _route(
    logits,
    bias,
    factors,
    ids,
    weights,
    experts,
    logits_stride,
    tolerance,
    epsilon,
    least,
    scale,
    SCORE: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    TOLERANT: tl.constexpr,
    SOFTMAX_CHOSEN: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Experts are [groups, experts of a group]."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)[:, None]
    own = tl.arange(0, BLOCK_E)[None, :]
    at = group * (experts // GROUPS) + own
    there = (group < GROUPS) & (own < experts // GROUPS)
    scores = tl.load(logits + token * logits_stride + at, mask=there, other=float("-inf"))
    if SCORE == "softmax":
        scores = _softmax(scores)
    elif SCORE == "sigmoid":
        scores = sigmoid(scores)
    elif SCORE == "sqrt_softplus":
        scores = tl.sqrt(softplus(scores))
    else:
        tl.static_assert(SCORE == "none")
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + at, mask=there, other=0.0)
    choice = tl.where(choice == choice, choice, float("-inf"))
    if GROUPS > 1:
        best = tl.zeros([BLOCK_G, 1], tl.float32)
        left = there
        for _ in tl.static_range(GROUP_BEST):
            most = tl.max(tl.where(left, choice, float("-inf")), axis=1, keep_dims=True)
            best += most
            first = tl.min(
                tl.where(left & (choice == most), own, 2147483647), axis=1, keep_dims=True
            )
            left = left & (own != first)
        closed = group < GROUPS
        for _ in tl.static_range(TOP_GROUPS):
            closed = closed & (group != _first_largest(best, group, closed))
        choice = tl.where(closed, float("-inf"), choice)
    place = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    parts = tl.full([BLOCK_K], float("-inf"), tl.float32)
    left = there
    for i in range(TOP_K):
        expert = _first_largest(choice, at, left)
        weight = tl.sum(tl.where(at == expert, scores, 0.0))
        if TOLERANT:
            known = tl.where(there, scores, 0.0)
            size = tl.abs(known)
            apart = (weight - known) / tl.where(size < weight, weight, size)
            near = tl.where(apart > tolerance, float("-inf"), scores)  # NaN stays
            near = tl.where(left, near, float("-inf"))
            weight = tl.sum(tl.where(at == expert, _softmax(near), 0.0))
        chosen = tl.where(place == i, expert, chosen)
        parts = tl.where(place == i, weight, parts)
        left = left & (at != expert)
    if SOFTMAX_CHOSEN:
        parts = _softmax(parts)
    if RENORMALIZE:
        total = tl.sum(tl.where(place < TOP_K, parts, 0.0)) + epsilon
        parts = parts / tl.where(total < least, least, total)
    parts *= scale
    if HAS_FACTORS:
        parts *= tl.load(factors + chosen)
    tl.store(ids + token * TOP_K + place, chosen, mask=place < TOP_K)
    tl.store(weights + token * TOP_K + place, parts, mask=place < TOP_K)


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None, factors: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Implement `Ops.route`."""
    tokens, experts = logits.shape
    ids = torch.empty(tokens, routing.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    if tokens:
        _route[(tokens,)](
            logits,
            logits if bias is None else bias,
            logits if factors is None else factors,
            ids,
            weights,
            experts,
            logits.stride(0),
            routing.tolerance,
            routing.epsilon,
            routing.least,
            routing.scale,
            SCORE=routing.score,
            TOP_K=routing.top_k,
            GROUPS=routing.groups,
            TOP_GROUPS=routing.top_groups,
            GROUP_BEST=routing.group_best,
            HAS_BIAS=bias is not None,
            HAS_FACTORS=factors is not None,
            TOLERANT=routing.tolerance != 0.0,
            SOFTMAX_CHOSEN=routing.softmax_chosen,
            RENORMALIZE=routing.renormalize,
            BLOCK_G=triton.next_power_of_2(routing.groups),
            BLOCK_E=triton.next_power_of_2(experts // routing.groups),
            BLOCK_K=triton.next_power_of_2(routing.top_k),
            num_warps=1 if experts <= 512 else 4,
        )
    return ids, weights
