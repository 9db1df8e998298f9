"""Sampling of tokens from logits.

A sampled row draws by a race among its tokens, each with a Philox number for (request seed, output
position, token); see `Ops.sample`. A row's token depends neither on the other rows nor on a
device's order of sums. Rounding cannot break ties, and a token of weight zero can never be drawn.
(Tokens 2**40 times less probable than the most probable one have weight zero, and one that is 2**33
times less probable than all together is hardly ever drawn: numbers have 32 bits.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.kernels.base import Ops
from octavo.kernels.memory import is_host, to_device
from octavo.messages import LogprobsLists
from octavo.sampling.acceptance import accept_drafts
from octavo.sampling.metadata import NO_LOGPROBS, SamplingMetadata
from octavo.sampling.sizes import rows_per_chunk

LongArray = NDArray[np.int64]

# Maximum number of candidates for which `Ops.top_k` is the fastest way to find them.
FEW_CANDIDATES = 64
_LOW_WORD = 0xFFFFFFFF
NOT_FINITE = "the model's logits for it are not finite (NaN or infinity)"


@dataclass(slots=True)
class SamplerOutput:
    """Result of one call of the sampler."""

    token_ids: torch.Tensor
    """int64 [R], on the logits' device; -1 for a row that failed."""
    logprobs: dict[int, LogprobsLists] = field(default_factory=dict)
    """Logprobs of each row that requests them: one position, the chosen token, then candidates."""
    errors: dict[int, str] = field(default_factory=dict)
    """Errors of single rows: logits that are not finite, no token left, or a plug-in."""


class Sampler:
    """Sampler of one token for each row of logits.

    Args:
        ops: the operations of the logits' device.
    """

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def sample(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Choose a token for each row.

        Logprobs are vLLM's `raw_logprobs`: of the logits before any processor.

        Args:
            logits: float32 [R, V], contiguous; changed in place.
            metadata: parameters of the same R rows.
        """
        errors: dict[int, str] = {}
        changes = len(metadata.processors) > 0
        asking = np.flatnonzero(metadata.num_logprobs != NO_LOGPROBS)
        raw, raw_rows = logits, asking
        if changes and len(asking):
            raw, raw_rows = logits[to_device(asking, logits.device)], np.arange(len(asking))

        if changes:
            self._fail_rows(logits, errors, NOT_FINITE)
        for processor, step in metadata.processors:
            try:
                processor.apply(self.ops, logits, step)
            except RequestError as error:  # a plug-in's
                logits[to_device(step.at, logits.device)] = math.nan
                for row in step.at.tolist():
                    errors.setdefault(row, error.message)
        if changes:
            self._fail_rows(
                logits,
                errors,
                "no token is left to choose: allowed_token_ids, bad_words, min_tokens, extra_args"
                " or its grammar exclude them all, or a penalty made its logits infinite",
            )

        output = SamplerOutput(self.ops.sample(logits, metadata.params), errors=errors)
        if metadata.drafted is not None:
            drafted = metadata.drafted
            accept_drafts(self.ops, logits, metadata.params, drafted, output.token_ids)
        if not changes:
            for row in (output.token_ids < 0).nonzero().flatten().tolist():
                errors[row] = NOT_FINITE
        if len(asking):
            good = np.asarray([row not in errors for row in asking.tolist()])
            self._add_logprobs(raw, raw_rows[good], metadata, asking[good], output)
        return output

    def _fail_rows(self, logits: torch.Tensor, errors: dict[int, str], message: str) -> None:
        """Add an error for each row without a finite maximum."""
        good = self.ops.row_max(logits).isfinite()
        for row in (~good).nonzero().flatten().tolist():
            errors.setdefault(row, message)

    def _add_logprobs(
        self,
        raw: torch.Tensor,
        raw_rows: LongArray,
        metadata: SamplingMetadata,
        rows: LongArray,
        output: SamplerOutput,
    ) -> None:
        """Add logprobs; rows with the same number of candidates are processed together.

        `raw_rows[i]` is the index in `raw` of the unchanged logits of row `rows[i]`.
        """
        asked, ids = metadata.num_logprobs[rows], metadata.logprob_token_ids
        by_id = np.array([row in ids for row in rows.tolist()], np.bool_)
        for k, given in sorted(set(zip(asked.tolist(), by_id.tolist(), strict=True))):
            alike = np.flatnonzero((asked == k) & (by_id == given))
            for some in _chunks(alike, raw.shape[1]):
                chosen = output.token_ids[to_device(rows[some], raw.device)]
                logits = raw[to_device(raw_rows[some], raw.device)]
                candidates = None
                if given:
                    of_rows = np.stack([ids[row] for row in rows[some].tolist()])
                    candidates = to_device(of_rows.astype(np.int64), raw.device)
                lists = _gather_logprobs(self.ops, logits, chosen, k, candidates)
                for i, row in enumerate(rows[some].tolist()):
                    output.logprobs[row] = lists.select(i, i + 1)


def prompt_logprobs(
    ops: Ops, logits: torch.Tensor, target_token_ids: torch.Tensor, num_logprobs: int
) -> LogprobsLists:
    """Return logprobs of given tokens, such as the prompt tokens that follow.

    Args:
        ops: the operations of the logits' device.
        logits: float32 [T, V].
        target_token_ids: int64 [T], the token to report for each row.
        num_logprobs: number of most probable tokens to report in addition; -1: the whole
            vocabulary.

    Returns:
        T rows of 1 + num_logprobs entries.
    """
    step = rows_per_chunk(logits.shape[1])
    return LogprobsLists.join(
        [
            _gather_logprobs(
                ops, logits[at : at + step], target_token_ids[at : at + step], num_logprobs
            )
            for at in range(0, len(logits), step)
        ]
    )


def top_candidates(ops: Ops, logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return ids of the k largest of each row: by value descending, then by id ascending.

    Args:
        ops: the operations of the logits' device.
        logits: float32 [R, V] without NaN.
        k: at most V.

    Returns:
        int64 [R, k].
    """
    if k <= FEW_CANDIDATES:
        return ops.top_k(logits, k)[1]
        # Pack value and id into one integer that sorts like the pair: no two are equal, so every
        # algorithm returns the same order.
    vocab_size = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF  # negative floats sort backwards as integers
    keys = bits.to(torch.int64) << 32
    keys |= _LOW_WORD - torch.arange(vocab_size, device=logits.device)
    if is_host(logits.device):  # numpy's sort of integers is ten times faster than torch's
        packed = keys.numpy()
        if k < vocab_size:
            packed.partition(vocab_size - k, axis=-1)
            packed = packed[:, vocab_size - k :]
        packed.sort(axis=-1)
        best = torch.from_numpy(packed).flip(-1)
    else:
        best = keys.topk(k, dim=-1, sorted=True).values
    return _LOW_WORD - (best & _LOW_WORD)


def _gather_logprobs(
    ops: Ops,
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    k: int,
    candidates: torch.Tensor | None = None,
) -> LogprobsLists:
    """Return the logprobs of each row's token and its k most probable ones (-1: all).

    `candidates`, int64 [R, k], replaces the most probable ones. Ranks are those of the logits,
    since rounding may make logprobs equal: the greedy token has rank 1.
    """
    logprobs = ops.log_softmax(logits)
    token = token_ids.unsqueeze(1)
    ids = token
    if k != 0:
        if candidates is None:
            candidates = top_candidates(ops, logits, logits.shape[1] if k == -1 else k)
        ids = torch.cat([token, candidates], dim=1)
    value = logits.gather(1, token)
    lower_id = torch.arange(logits.shape[1], device=logits.device) < token
    ahead = (logits > value) | ((logits == value) & lower_id)
    return LogprobsLists(
        _bytes(ids.to(torch.int32)),
        _bytes(logprobs.gather(1, ids)),
        _bytes((ahead.sum(dim=-1) + 1).to(torch.int32)),
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _chunks(rows: LongArray, vocab_size: int) -> Iterator[LongArray]:
    """Split rows so that temporaries stay small."""
    step = rows_per_chunk(vocab_size)
    for at in range(0, len(rows), step):
        yield rows[at : at + step]
