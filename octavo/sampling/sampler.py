"""From logits to tokens.

A sampled row draws by inverse transform with one Philox number for (request seed, output
position). Everything between the exponential, which is elementwise, and the token is integer
arithmetic: a token's weight is the fixed-point number floor(2**40 * exp((logit - max) / T)), and
integer sums are exact in any order. So a row's token depends neither on the other rows nor on how
a device orders its sums, ties cannot be broken by rounding, and a token of weight zero can never
be drawn. (Tokens 2**40 times less probable than the most probable one have weight zero.)

The filters are vLLM's, in its order: min-p, then top-k, then top-p of what is left. Tokens are
ranked by value descending, then by id ascending, so each filter keeps a beginning of that ranking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.kernels.base import Ops
from octavo.messages import LogprobsLists
from octavo.sampling import philox
from octavo.sampling.logits_processors import apply_grammar_bitmask, apply_logits_processors
from octavo.sampling.metadata import NO_LOGPROBS, SamplingMetadata
from octavo.sampling.sizes import rows_per_chunk

LongArray = NDArray[np.int64]

# Fixed point of the weights: 2**40 * a vocabulary of 2**22 tokens still fits an int64.
_ONE = 2.0**40
# Candidates that top-p tries in turn before it ranks the whole row: the nucleus of a language
# model is mostly small. `Ops.top_k` serves up to the first number.
FEW_CANDIDATES, MANY_CANDIDATES = 64, 1024
_LOW_WORD = 0xFFFFFFFF


@dataclass(slots=True)
class SamplerOutput:
    """What one call of the sampler brought."""

    token_ids: torch.Tensor
    """int64 [R], on the logits' device; -1 for a row that failed."""
    logprobs: dict[int, LogprobsLists] = field(default_factory=dict)
    """For each row that asks: one position, the chosen token first, then its top candidates."""
    errors: dict[int, str] = field(default_factory=dict)
    """Rows that failed by themselves: logits that are not finite, or no token left."""


class Sampler:
    """Chooses one token for each row of logits.

    Args:
        ops: the operations of the logits' device.
    """

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def sample(
        self,
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        grammar_bitmask: torch.Tensor | None = None,
        grammar_rows: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Chooses a token for each row.

        Logprobs are vLLM's `raw_logprobs`: of the logits before any processor.

        Args:
            logits: float32 [R, V], contiguous; changed in place.
            metadata: of the same R rows.
            grammar_bitmask: int32 [G, ceil(V / 32)], bit 1: allowed.
            grammar_rows: int64 [G], the rows of the logits that the bitmask's rows belong to.
        """
        output = SamplerOutput(
            torch.full((metadata.num_rows,), -1, dtype=torch.int64, device=logits.device)
        )
        changes = metadata.changes_logits or grammar_bitmask is not None
        asking = np.flatnonzero(metadata.num_logprobs != NO_LOGPROBS)
        raw, raw_rows = logits, np.arange(metadata.num_rows)
        if changes and len(asking):
            raw = logits[_tensor(asking, logits)]
            raw_rows[asking] = np.arange(len(asking))

        good = self._fail_rows(
            logits, output, "the model's logits for it are not finite (NaN or infinity)"
        )
        if grammar_bitmask is not None:
            assert grammar_rows is not None
            apply_grammar_bitmask(logits, grammar_bitmask, grammar_rows)
        apply_logits_processors(logits, metadata)
        if changes:
            good &= self._fail_rows(
                logits,
                output,
                "no token is left to choose: allowed_token_ids, bad_words, min_tokens or its"
                " grammar exclude them all, or a penalty made its logits infinite",
            )

        sampled = metadata.temperature > 0
        greedy_rows = np.flatnonzero(good & ~sampled)
        if len(greedy_rows):
            best = self.ops.argmax(logits)  # of all rows: cheaper than copying some
            if len(greedy_rows) == metadata.num_rows:
                output.token_ids = best
            else:
                at = _tensor(greedy_rows, logits)
                output.token_ids[at] = best[at]
        self._sample_rows(logits, metadata, np.flatnonzero(good & sampled), output.token_ids)
        self._add_logprobs(raw, raw_rows, metadata, asking[good[asking]], output)
        return output

    def _fail_rows(
        self, logits: torch.Tensor, output: SamplerOutput, message: str
    ) -> NDArray[np.bool_]:
        """Notes the rows without a finite maximum; returns which have one."""
        good: NDArray[np.bool_] = logits.amax(dim=-1).isfinite().cpu().numpy()
        for row in np.flatnonzero(~good).tolist():
            output.errors.setdefault(row, message)
        return good

    def _sample_rows(
        self,
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        rows: LongArray,
        token_ids: torch.Tensor,
    ) -> None:
        """Draws the tokens of the sampled rows; each kind of row takes its cheapest path."""
        top_k, top_p = metadata.top_k[rows], metadata.top_p[rows]
        paths: list[tuple[NDArray[np.bool_], Callable[[_Rows], torch.Tensor]]] = [
            ((top_k == 0) & (top_p >= 1.0), self._draw_plain),
            ((top_k == 0) & (top_p < 1.0), self._draw_nucleus),
            ((top_k > 0) & (top_k <= FEW_CANDIDATES), self._draw_top_k),
            (top_k > FEW_CANDIDATES, self._draw_top_k),
        ]
        for mask, draw in paths:
            for some in _chunks(rows[mask], logits.shape[1]):
                chosen = _Rows.gather(logits, metadata, some)
                token_ids[_tensor(some, logits)] = draw(chosen)

    def _weights(self, shifted: torch.Tensor, rows: _Rows) -> torch.Tensor:
        """Fixed-point weights int64 of logits less their row's maximum; min-p applied."""
        probs = self.ops.exp(shifted / rows.temperature)
        weights = (probs * _ONE).to(torch.int64)
        if rows.any_min_p:
            weights.masked_fill_(probs < rows.min_p, 0)
        return weights

    def _draw_plain(self, rows: _Rows) -> torch.Tensor:
        """Rows that keep the whole vocabulary, or what min-p leaves of it."""
        return _draw(self._weights(rows.shifted(), rows), rows.uniforms)

    def _draw_top_k(self, rows: _Rows) -> torch.Tensor:
        """Rows with top-k: only the candidates are looked at."""
        ids = top_candidates(self.ops, rows.logits, int(rows.top_k.max()))
        weights = self._weights(rows.shifted().gather(1, ids), rows)
        rank = torch.arange(ids.shape[1], device=ids.device)
        weights.masked_fill_(rank >= rows.top_k, 0)
        return _draw_ranked(ids, weights, weights.sum(dim=-1), rows)

    def _draw_nucleus(self, rows: _Rows) -> torch.Tensor:
        """Rows with top-p alone: more candidates only where fewer do not make up the share."""
        all_weights = self._weights(rows.shifted(), rows)
        totals = all_weights.sum(dim=-1)
        limits = _top_p_limit(totals, rows)
        tokens = torch.full_like(totals, -1)
        vocab_size = rows.logits.shape[1]
        left = torch.arange(len(totals), device=totals.device)
        for k in (FEW_CANDIDATES, MANY_CANDIDATES, vocab_size):
            k = min(k, vocab_size)
            ids = top_candidates(self.ops, rows.logits[left], k)
            weights = all_weights[left].gather(1, ids)
            enough = weights.sum(dim=-1) >= limits[left]
            if k == vocab_size:
                enough[:] = True
            at = left[enough]
            tokens[at] = _draw_ranked(ids[enough], weights[enough], totals[at], rows.select(at))
            left = left[~enough]
            if not len(left):
                break
        return tokens

    def _add_logprobs(
        self,
        raw: torch.Tensor,
        raw_rows: LongArray,
        metadata: SamplingMetadata,
        rows: LongArray,
        output: SamplerOutput,
    ) -> None:
        """Reports logprobs; rows that ask for equally many candidates go together.

        `raw_rows[i]` is where the unchanged logits of row i are in `raw`.
        """
        for k in np.unique(metadata.num_logprobs[rows]).tolist():
            same = rows[metadata.num_logprobs[rows] == k]
            for some in _chunks(same, raw.shape[1]):
                chosen = output.token_ids[_tensor(some, raw)]
                lists = _gather_logprobs(self.ops, raw[_tensor(raw_rows[some], raw)], chosen, k)
                for i, row in enumerate(some.tolist()):
                    output.logprobs[row] = LogprobsLists(
                        [lists.token_ids[i]], [lists.logprobs[i]], [lists.ranks[i]]
                    )


def prompt_logprobs(
    ops: Ops, logits: torch.Tensor, target_token_ids: torch.Tensor, num_logprobs: int
) -> LogprobsLists:
    """Logprobs of given tokens, such as the prompt tokens that follow.

    Args:
        ops: the operations of the logits' device.
        logits: float32 [T, V].
        target_token_ids: int64 [T], the token to report for each row.
        num_logprobs: most probable tokens to report beside it; -1: the whole vocabulary.

    Returns:
        T rows of 1 + num_logprobs entries.
    """
    lists = LogprobsLists([], [], [])
    step = rows_per_chunk(logits.shape[1])
    for at in range(0, len(logits), step):
        part = _gather_logprobs(
            ops, logits[at : at + step], target_token_ids[at : at + step], num_logprobs
        )
        lists.token_ids += part.token_ids
        lists.logprobs += part.logprobs
        lists.ranks += part.ranks
    return lists


def top_candidates(ops: Ops, logits: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the k largest of each row: by value descending, then by id ascending.

    Args:
        ops: the operations of the logits' device.
        logits: float32 [R, V] without NaN.
        k: at most V.

    Returns:
        int64 [R, k].
    """
    if k <= FEW_CANDIDATES:
        return ops.top_k(logits, k)[1]
    # Value and id packed into one integer that sorts like the pair: no two are equal, so any
    # algorithm gives the same answer.
    vocab_size = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF  # negative floats sort backwards as integers
    keys = bits.to(torch.int64) << 32
    keys |= _LOW_WORD - torch.arange(vocab_size, device=logits.device)
    if logits.device.type == "cpu":  # numpy's sort of integers is ten times faster than torch's
        packed = keys.numpy()
        if k < vocab_size:
            packed.partition(vocab_size - k, axis=-1)
            packed = packed[:, vocab_size - k :]
        packed.sort(axis=-1)
        best = torch.from_numpy(packed).flip(-1)
    else:
        best = keys.topk(k, dim=-1, sorted=True).values
    return _LOW_WORD - (best & _LOW_WORD)


@dataclass(slots=True)
class _Rows:
    """Some sampled rows: their logits and, as columns [r, 1], their parameters."""

    logits: torch.Tensor
    """float32 [r, V]"""
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniforms: torch.Tensor
    any_min_p: bool

    @staticmethod
    def gather(logits: torch.Tensor, metadata: SamplingMetadata, rows: LongArray) -> _Rows:
        def column(values: NDArray[np.generic]) -> torch.Tensor:
            return _tensor(values, logits).unsqueeze(1)

        min_p = metadata.min_p[rows]
        return _Rows(
            logits[_tensor(rows, logits)],
            column(metadata.temperature[rows]),
            column(metadata.top_k[rows]),
            column(metadata.top_p[rows]),
            column(min_p),
            column(philox.uniform(metadata.seeds[rows], metadata.positions[rows])),
            bool(min_p.any()),
        )

    def select(self, at: torch.Tensor) -> _Rows:
        return _Rows(
            self.logits[at],
            self.temperature[at],
            self.top_k[at],
            self.top_p[at],
            self.min_p[at],
            self.uniforms[at],
            self.any_min_p,
        )

    def shifted(self) -> torch.Tensor:
        """Logits less the row's maximum: no temperature can make them overflow."""
        return self.logits - self.logits.amax(dim=-1, keepdim=True)


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative weight exceeds u times the total.

    Args:
        weights: int64 [r, n], the total of each row positive.
        uniforms: float64 [r, 1] in [0, 1).

    Returns:
        int64 [r].
    """
    cumulative = weights.cumsum(dim=-1)
    totals = cumulative[:, -1:]
    # The product may round up to the total itself, which no index exceeds.
    threshold = torch.minimum((uniforms * totals).to(torch.int64), totals - 1)
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1)


def _top_p_limit(totals: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """float64 [r]: a token is kept while the weights ranked before it stay below this."""
    top_p = rows.top_p.squeeze(1)
    return torch.where(top_p < 1.0, top_p * totals, math.inf)


def _draw_ranked(
    ids: torch.Tensor, weights: torch.Tensor, totals: torch.Tensor, rows: _Rows
) -> torch.Tensor:
    """Applies top-p to ranked candidates and draws among what is left, in vocabulary order.

    Args:
        ids: int64 [r, n], candidates from the most probable one on.
        weights: int64 [r, n], their weights; 0 where another filter drops them.
        totals: int64 [r], what `top_p` is a share of.
        rows: the rows' parameters.

    Returns:
        int64 [r], token ids.
    """
    before = weights.cumsum(dim=-1) - weights
    kept = weights.masked_fill(before >= _top_p_limit(totals, rows).unsqueeze(1), 0)
    if ids.shape[1] * 64 > rows.logits.shape[1]:  # many: putting them in place beats sorting
        whole = torch.zeros(rows.logits.shape, dtype=torch.int64, device=ids.device)
        return _draw(whole.scatter_(1, ids, kept), rows.uniforms)
    ids, order = ids.sort(dim=-1)
    chosen = _draw(kept.gather(1, order), rows.uniforms)
    return ids.gather(1, chosen.unsqueeze(1)).squeeze(1)


def _gather_logprobs(
    ops: Ops, logits: torch.Tensor, token_ids: torch.Tensor, k: int
) -> LogprobsLists:
    """The given token of each row and its k most probable ones (-1: all), ranked as for sampling.

    Ranks come from the logits, not from the logprobs, which rounding may have made equal: the
    greedy token has rank 1.
    """
    logprobs = ops.log_softmax(logits)
    token = token_ids.unsqueeze(1)
    ids = token
    if k != 0:
        vocab_size = logits.shape[1]
        ids = torch.cat([token, top_candidates(ops, logits, vocab_size if k == -1 else k)], dim=1)
    value = logits.gather(1, token)
    lower_id = torch.arange(logits.shape[1], device=logits.device) < token
    ahead = (logits > value) | ((logits == value) & lower_id)
    return LogprobsLists(
        ids.tolist(), logprobs.gather(1, ids).tolist(), (ahead.sum(dim=-1) + 1).tolist()
    )


def _chunks(rows: LongArray, vocab_size: int) -> Iterator[LongArray]:
    """Splits rows so that temporaries stay small."""
    step = rows_per_chunk(vocab_size)
    for at in range(0, len(rows), step):
        yield rows[at : at + step]


def _tensor(array: NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array).to(like.device)
